"""Measures the most memory that each stage's process ever held."""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_hybridop.pipeline.measured import peak_memory_mib


class PeakMemory(Callback):
    """At the end of training, gather each stage's peak resident set into `per_stage_mib` (MiB) on all ranks.

    The order is that of the stages, whichever ranks run them; with strategies without stages that of the ranks. Of replicas
    the largest counts.
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
        self.per_stage_mib = tuple(dict(sorted(everyone)).values())
