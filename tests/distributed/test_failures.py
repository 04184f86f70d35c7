"""Whatever fails on whichever rank: every process ends soon, the cause is said once, the last checkpoint loads."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.distributed.test_launch import processes_of_session, script_environment

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(120)]

SECONDS_TO_END = 20

# A model without Hugging Face, so that the processes start sooner.
SCRIPT = """
import os
import signal
import sys
import time
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn

from lightning_hybridop import HybridOPStrategy

# What starts the tests may have told its children to ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)

WHERE, RANK, STAGES = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
FOLDER = Path(__file__).parent


def fail_in(where, module, step):
    if where == WHERE and module.global_rank == RANK and module.global_step == step:
        (FOLDER / "failed").write_text(str(time.time()))
        raise ArithmeticError("this is the cause")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, hidden):
        return hidden + torch.tanh(self.inner(hidden))


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8).requires_grad_(False)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(8, 11).requires_grad_(False)

    def loss(self, batch):
        (tokens,) = batch
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())

    def training_step(self, batch, batch_idx):
        fail_in("training_step", self, 3)
        if WHERE == "killed" and self.global_rank == RANK and self.global_step == 3:
            (FOLDER / "failed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        if WHERE == "interrupted":
            time.sleep(0.05)
            if self.global_rank == 0 and self.global_step == 3:
                (FOLDER / "ready").touch()
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        fail_in("validation_step", self, 4)
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)


class Fragile(Callback):
    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        fail_in("on_save_checkpoint", pl_module, 3)


if __name__ == "__main__":
    torch.set_num_threads(1)
    tokens = torch.arange(88).view(8, 11) % 11
    rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=2, shuffle=True)
    held_out = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=4)
    checkpoints = ModelCheckpoint(
        FOLDER / "checkpoints", filename="{step}", every_n_train_steps=1, save_top_k=-1,
        save_on_exception=WHERE.startswith("saved"),
    )
    trainer = lightning.Trainer(
        strategy=HybridOPStrategy(stages=STAGES, zo_stages=1, timeout=60), accelerator="cpu",
        max_epochs=1000 if WHERE == "interrupted" else 2, callbacks=[checkpoints, Fragile()], logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Module(), rows, held_out)
"""


def run(folder: Path, where: str, rank: int, *, stages: int) -> subprocess.Popen[str]:
    """Start a script of several stages that fails at a place on a rank; what it says on stderr goes to a file."""
    path = folder / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    with (folder / "stderr").open("w") as stderr:
        return subprocess.Popen(
            [sys.executable, str(path), where, str(rank), str(stages)],
            env=script_environment(),
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )


def ended(folder: Path, process: subprocess.Popen[str], since: float | None = None) -> str:
    """Wait for a failed run to end, check that it did so in time, and return what it said."""
    try:
        process.wait(timeout=100)
        while (
            processes_of_session(process.pid)
            and time.time() < (since or float((folder / "failed").read_text())) + 60
        ):
            time.sleep(0.1)
        taken = time.time() - (since or float((folder / "failed").read_text()))
    finally:
        for left in processes_of_session(process.pid):
            left.kill()
    said = (folder / "stderr").read_text(encoding="utf-8")
    assert process.returncode != 0, said
    assert taken < SECONDS_TO_END, said
    return said


def assert_last_checkpoint_loads(folder: Path, step: int) -> None:
    last = folder / "checkpoints" / f"step={step}.ckpt"
    checkpoint = torch.load(last, weights_only=True)
    assert checkpoint["global_step"] == step
    assert len(checkpoint["state_dict"]) == 8
    assert sorted(checkpoint["optimizer_states"][0]["state"]) == list(range(8))


@pytest.mark.parametrize(
    ("where", "rank", "stages", "step"),
    [
        ("training_step", 0, 3, 3),
        ("training_step", 1, 3, 3),
        ("training_step", 2, 3, 3),
        ("validation_step", 1, 2, 4),
        ("on_save_checkpoint", 0, 2, 2),
    ],
)
def test_an_exception_on_one_rank_is_said_once_and_ends_all(
    tmp_path: Path, where: str, rank: int, stages: int, step: int
) -> None:
    process = run(tmp_path, where, rank, stages=stages)
    said = ended(tmp_path, process)
    assert said.count("ArithmeticError: this is the cause") == 1, said
    assert said.count("Traceback") == 1, said
    role = "zo" if rank == 0 else "bp"
    assert re.search(rf"This was Stage {rank} \({role}, blocks \d to \d\), rank {rank} on host ", said), said
    assert_last_checkpoint_loads(tmp_path, step)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_and_ends_all(tmp_path: Path, rank: int) -> None:
    process = run(tmp_path, "killed", rank, stages=2)
    said = ended(tmp_path, process)
    assert len(re.findall(rf"\(rank {rank}, host \S+\) ended without a word: it was killed", said)) == 1, said
    assert said.count("Traceback (most recent call last)") <= 3, said
    assert_last_checkpoint_loads(tmp_path, 3)


@pytest.mark.parametrize("everybody", [True, False], ids=["terminal", "parent alone"])
def test_an_interrupt_ends_all(tmp_path: Path, everybody: bool) -> None:
    process = run(tmp_path, "interrupted", 0, stages=2)
    while not (tmp_path / "ready").exists() and process.poll() is None:
        time.sleep(0.05)
    since = time.time()
    for target in processes_of_session(process.pid) if everybody else [psutil.Process(process.pid)]:
        target.send_signal(signal.SIGINT)
    said = ended(tmp_path, process, since)
    assert "Traceback" not in said
    assert_last_checkpoint_loads(tmp_path, 3)
