"""Writes when each stage did what during one mini-batch: a picture and a trace."""

import logging
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_hybridop.callbacks.pipeline import pipeline_strategy
from lightning_hybridop.reporting.gantt import draw_timeline, require_matplotlib
from lightning_hybridop.reporting.perfetto import write_trace

log = logging.getLogger(__name__)


class PipelineTrace(Callback):
    """Write `timeline.png` (Gantt picture) and `timeline.json` (Perfetto or Chrome trace) of one mini-batch.

    `step` counts training mini-batches from 0 over all epochs, resumed ones included; the first is slower than the
    rest, so the default is the third. A run that ends, or was resumed, past it writes the nearest one that it ran.
    `folder` takes the two files, written by rank 0 on a clock that the strategy aligned over hosts. A pipeline of
    one stage has no timeline and writes nothing.
    """

    def __init__(self, folder: str | Path, step: int = 2) -> None:
        if step < 0:
            raise ValueError(f"PipelineTrace got step={step}, expected a mini-batch number counted from 0.")
        self.folder = Path(folder)
        self.step = step
        self._written = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse what would fail only after the mini-batch to be traced."""
        pipeline_strategy(trainer, self)
        require_matplotlib()
        self._written = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the files behind the chosen mini-batch."""
        if not self._written and trainer.fit_loop.total_batch_idx >= self.step:
            self._write(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the latest mini-batch's files when the run was too short to reach the chosen one."""
        if not self._written:
            self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        strategy = pipeline_strategy(trainer, self)
        timeline = strategy.gather_timeline()  # on all ranks, also on those that write nothing
        self._written = True
        if not timeline:
            log.info("PipelineTrace writes nothing: the strategy recorded no pipelined mini-batch.")
        elif trainer.is_global_zero:
            draw_timeline(timeline, strategy.plan, self.folder / "timeline.png")
            write_trace(timeline, strategy.plan, self.folder / "timeline.json")
