"""Measures the most memory that each stage's process ever held."""

import resource
import sys
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

MIB = 2.0**20


def peak_memory_mib() -> float:
    """Return this process's peak resident set in MiB, device memory not included."""
    # On Linux a program started by a large process inherits that one's ru_maxrss; VmHWM is this program's own.
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / MIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MIB if sys.platform == "darwin" else peak * 1024 / MIB


class PeakMemory(Callback):
    """At the end of training, gather each stage's peak resident set into `per_stage_mib` (MiB) on all ranks.

    The order is that of the stages, whichever ranks run them; with strategies without stages that of the ranks.
    """

    def __init__(self) -> None:
        self.per_stage_mib: tuple[float, ...] | None = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure and gather."""
        stage = getattr(trainer.strategy, "stage_index", trainer.global_rank)
        own = torch.tensor(
            [stage, peak_memory_mib()], dtype=torch.float64, device=trainer.strategy.root_device
        )
        everyone = trainer.strategy.all_gather(own).reshape(-1, 2).tolist()
        self.per_stage_mib = tuple(peak for _, peak in sorted(everyone))
