"""Runs that something happens to: a process is killed or stopped, a cable pulled, a disk filled; then they go on."""

import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn

from lightning_hybridop import HybridOPStrategy
from lightning_hybridop.callbacks import Recovery
from lightning_hybridop.commands.resuming import newest_checkpoint
from tests.distributed.harness import _CONTEXT, free_port
from tests.network.namespaces import Lan, lan

Kind = Literal["kill", "stop", "unplug", "full disk"]
KINDS: tuple[Kind, ...] = ("kill", "stop", "unplug", "full disk")

STEPS = 30
HEARTBEAT = 2.0
SECONDS_TO_END = 20.0
"""How long after trouble all processes may still be there; a stopped one is not waited for."""

SECONDS_TO_FINISH = 90.0
CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What happens to which rank, once rank 0 has taken `step` steps and a part of the next one has gone by."""

    kind: Kind
    stages: int
    rank: int
    step: int
    delay: float

    def __str__(self) -> str:
        return f"{self.kind} of rank {self.rank} of {self.stages} at step {self.step}"


def random_trouble(seed: int) -> Trouble:
    """Return the trouble of a run: kinds in turn, everything else drawn."""
    draw = random.Random(seed)
    stages = draw.randint(3, 5)
    kind = KINDS[seed % len(KINDS)]
    return Trouble(
        kind=kind,
        stages=stages,
        rank=draw.randrange(stages),
        step=draw.randrange(STEPS - 2),
        delay=draw.uniform(0.0, 0.05),
    )


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        return hidden_BTD + torch.tanh(self.inner(hidden_BTD))


class _Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8).requires_grad_(False)
        self.blocks = nn.ModuleList([_Block() for _ in range(6)])
        self.head = nn.Linear(8, 11).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (tokens_BT,) = batch
        hidden_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            hidden_BTD = block(hidden_BTD)
        return nn.functional.cross_entropy(self.head(hidden_BTD).flatten(0, 1), tokens_BT.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)


class _Progress(Callback):
    """Tells the test how far the run is, and takes long enough over a step for something to happen in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.losses: list[float] = []

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._tell(trainer)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))
        time.sleep(0.02)
        self._tell(trainer)

    def _tell(self, trainer: lightning.Trainer) -> None:
        if trainer.is_global_zero:
            self.path.write_text(str(trainer.global_step))


def _train(
    rank: int, stages: int, folder: Path, address: str, port: int, namespace: str | None, copies: bool
) -> None:
    """One process: what the worker of `hybridop fit` does, with a small model that needs no library to start."""
    if namespace is not None:
        with Path("/var/run/netns", namespace).open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK="0" if namespace or copies else str(rank),
        WORLD_SIZE=str(stages),
        LOCAL_WORLD_SIZE="1" if namespace else str(stages),
        GROUP_RANK=str(rank) if namespace else "0",
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="chaos",
        OMP_NUM_THREADS="1",
        HYBRIDOP_HOST=f"host-{rank}" if namespace else "host",
    )
    with (folder / f"rank_{rank}.log").open("ab") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    torch.set_num_threads(1)
    lightning.seed_everything(0, verbose=False)
    tokens_BT = torch.arange(88).view(8, 11) % 11
    rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens_BT), batch_size=2, shuffle=True)
    disk = folder / "disk" if rank == 0 else folder / f"disk_of_rank_{rank}"
    progress = _Progress(folder / "step")
    trainer = lightning.Trainer(
        strategy=HybridOPStrategy(
            stages=stages, zo_stages=1, timeout=60, heartbeat=HEARTBEAT, checkpoint_copies=copies
        ),
        accelerator="cpu",
        default_root_dir=disk,
        max_steps=STEPS,
        callbacks=[ModelCheckpoint(disk / "recovery", every_n_train_steps=3), Recovery(folder), progress],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    found = newest_checkpoint(disk)
    path = None if found is None else str(found.path)
    if path is None and any(newest_checkpoint(other) for other in folder.glob("disk*")):
        path = "on another disk"
    module = _Module()
    trainer.fit(module, rows, ckpt_path=path)
    if rank == 0:
        trained = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
        torch.save({"loss": progress.losses[-1], "trained": trained}, folder / "result.pt")


def _start(folder: Path, stages: int, network: Lan | None, *, copies: bool = False) -> list[BaseProcess]:
    port = free_port()
    hosts = [] if network is None else list(network.addresses)
    address = "127.0.0.1" if network is None else network.addresses[hosts[0]]
    processes: list[BaseProcess] = []
    for rank in range(stages):
        namespace = None if network is None else f"{network.prefix}{hosts[rank]}"
        processes.append(
            _CONTEXT.Process(target=_train, args=(rank, stages, folder, address, port, namespace, copies))
        )
        processes[-1].start()
    return processes


def _finish(processes: list[BaseProcess], seconds: float, *, but: int | None = None) -> float:
    """Wait for processes to end, for all but one, and return how long that took; kill what is left.

    Raises:
        TimeoutError: naming the ranks that were still there.
    """
    began = time.monotonic()
    awaited = [rank for rank in range(len(processes)) if rank != but]
    for rank in awaited:
        processes[rank].join(timeout=max(0.0, began + seconds - time.monotonic()))
    left = [rank for rank in awaited if processes[rank].is_alive()]
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
    if left:
        raise TimeoutError(f"Ranks {left} were still there after {seconds:g} s.")
    return time.monotonic() - began


def undisturbed(folder: Path, stages: int) -> dict[str, Any]:
    """Return what a run comes to that nothing happens to: the loss of its last step, and the trained parameters."""
    folder.mkdir(parents=True)
    processes = _start(folder, stages, None)
    _finish(processes, SECONDS_TO_FINISH)
    return result(folder)


def result(folder: Path) -> dict[str, Any]:
    """Return what a finished run has left."""
    loaded: dict[str, Any] = torch.load(folder / "result.pt", weights_only=True)
    return loaded


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Make a folder a file system of its own, of 4 MiB."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=True, timeout=20)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


def interrupted(folder: Path, trouble: Trouble, *, copies: bool = False) -> float:
    """Begin a run, make trouble, and return the seconds in which all processes that could were gone.

    What was in the way is put right afterwards. With `copies` each process is a host that keeps a copy of checkpoints.
    """
    hosts = [f"c{rank}" for rank in range(trouble.stages)]
    if trouble.kind != "unplug":
        return _interrupted(folder, trouble, None, copies)
    with lan(*hosts) as network:
        return _interrupted(folder, trouble, network, copies)


def _interrupted(folder: Path, trouble: Trouble, network: Lan | None, copies: bool) -> float:
    processes = _start(folder, trouble.stages, network, copies=copies)
    try:
        deadline = time.monotonic() + SECONDS_TO_FINISH
        while _step(folder) < trouble.step:
            if time.monotonic() > deadline:
                raise TimeoutError(f"The run did not reach step {trouble.step}.")
            time.sleep(0.005)
        time.sleep(trouble.delay)
        victim = processes[trouble.rank]
        assert victim.pid is not None
        filler = folder / "disk" / "filler"
        if trouble.kind == "kill":
            os.kill(victim.pid, signal.SIGKILL)
        elif trouble.kind == "stop":
            os.kill(victim.pid, signal.SIGSTOP)
        elif trouble.kind == "unplug":
            assert network is not None
            network.unplug(list(network.addresses)[trouble.rank])
        else:
            _fill(filler)
        stopped = trouble.rank if trouble.kind == "stop" else None
        taken = _finish(processes, SECONDS_TO_END, but=stopped)
        filler.unlink(missing_ok=True)
        return taken
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def _fill(filler: Path) -> None:
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:  # full
            return


def _step(folder: Path) -> int:
    try:
        return int((folder / "step").read_text())
    except (OSError, ValueError):
        return -1


def resumed(folder: Path, stages: int) -> dict[str, Any]:
    """Let an interrupted run go on to its end, and return what it came to."""
    processes = _start(folder, stages, None)
    _finish(processes, SECONDS_TO_FINISH)
    return result(folder)


def log_of(folder: Path) -> str:
    """Return what all processes of a run said."""
    return "\n".join(
        f"{path.name}:\n{path.read_text(errors='replace')}" for path in sorted(folder.glob("rank_*.log"))
    )
