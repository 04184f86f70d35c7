"""A script with a Trainer starts its peers itself, runs under torchrun, and leaves no process behind."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.distributed.harness import free_port

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
SECONDS = 200

# A model without Hugging Face, so that the processes start sooner.
SCRIPT = """
import json
import os
import sys
from pathlib import Path

import lightning
import torch
from torch import nn

from lightning_hybridop import HybridOPStrategy


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

    def training_step(self, batch, batch_idx):
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if {crash} and attempt == "0" and self.global_rank == 1 and batch_idx == 1:
            raise ArithmeticError("the second batch of rank 1")
        (tokens,) = batch
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        loss = nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)


if __name__ == "__main__":
    torch.set_num_threads(1)
    tokens = torch.arange(88).view(8, 11) % 11
    rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=4, shuffle=True)
    trainer = lightning.Trainer(
        {strategy}, accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Module(), rows)
    strategy = trainer.strategy
    answer = {{
        "rank": trainer.global_rank,
        "stages": [[stage.first, stage.last, stage.role] for stage in strategy.plan.stages],
        "steps": trainer.global_step,
        "loss": float(trainer.callback_metrics["loss"]),
        "is_global_zero": trainer.is_global_zero,
    }}
    Path(__file__).with_name(f"rank{{trainer.global_rank}}.json").write_text(json.dumps(answer))
"""


def script(folder: Path, strategy: str, *, crash: bool = False) -> Path:
    path = folder / "train.py"
    path.write_text(SCRIPT.format(strategy=strategy, crash=crash), encoding="utf-8")
    return path


def script_environment() -> dict[str, str]:
    """Return the environment of a script that nobody has given a rank."""
    about_runs = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
    )
    own = {name: value for name, value in os.environ.items() if name not in about_runs}
    return {**own, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def launch(
    command: Sequence[str], *, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a session of its own, and check that nothing of that session is left."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=script_environment() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        _, left = psutil.wait_procs(processes_of_session(process.pid), timeout=5)
        for other in left:
            other.kill()
    assert left == []
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def processes_of_session(session: int) -> list[psutil.Process]:
    """Return the living processes of a session."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def answers(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


def check(found: list[dict[str, Any]], roles: Sequence[str]) -> None:
    assert [answer["rank"] for answer in found] == list(range(len(roles)))
    assert [answer["is_global_zero"] for answer in found] == [True] + [False] * (len(roles) - 1)
    for answer in found:
        assert [role for *_, role in answer["stages"]] == list(roles)
        assert answer["stages"] == found[0]["stages"]
        assert answer["steps"] == 4
        assert answer["loss"] == found[0]["loss"]


STAGES = "strategy=HybridOPStrategy(stages=3, zo_stages=1)"


def test_a_plain_script_starts_its_peers(tmp_path: Path) -> None:
    result = launch([sys.executable, str(script(tmp_path, STAGES))])
    assert result.returncode == 0, result.stderr
    check(answers(tmp_path), ["zo", "bp", "bp"])


def test_the_same_script_runs_under_torchrun(tmp_path: Path) -> None:
    arguments = ["-m", "torch.distributed.run", "--nproc-per-node", "3", "--master-port", str(free_port())]
    result = launch([sys.executable, *arguments, str(script(tmp_path, STAGES))])
    assert result.returncode == 0, result.stderr
    check(answers(tmp_path), ["zo", "bp", "bp"])


def test_a_second_attempt_under_torchrun_finishes(tmp_path: Path) -> None:
    arguments = ["-m", "torch.distributed.run", "--nproc-per-node", "3", "--master-port", str(free_port())]
    command = [sys.executable, *arguments, "--max-restarts", "1", str(script(tmp_path, STAGES, crash=True))]
    result = launch(command)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("ArithmeticError: the second batch of rank 1") == 1
    check(answers(tmp_path), ["zo", "bp", "bp"])


def test_the_strategy_has_a_name(tmp_path: Path) -> None:
    result = launch([sys.executable, str(script(tmp_path, 'strategy="hybridop", devices=2'))])
    assert result.returncode == 0, result.stderr
    check(answers(tmp_path), ["bp", "bp"])


def test_a_script_whose_peer_breaks_ends_with_an_error(tmp_path: Path) -> None:
    result = launch([sys.executable, str(script(tmp_path, STAGES, crash=True))])
    assert result.returncode not in (0, None)
    assert "ArithmeticError: the second batch of rank 1" in result.stderr
    assert answers(tmp_path) == []


def test_a_script_whose_port_is_in_use_ends_with_one_sentence(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        result = launch([sys.executable, str(script(tmp_path, STAGES))], MASTER_PORT=str(port))
    assert result.returncode not in (0, None)
    assert (
        f"Port {port} on 127.0.0.1 is in use; set MASTER_PORT to a free port, or leave it unset."
        in result.stderr
    )
