"""Logs how busy the devices of the pipeline are and how fast samples go through it."""

import time
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_hybridop.callbacks.pipeline import pipeline_strategy
from lightning_hybridop.pipeline.batches import row_count
from lightning_hybridop.schedules.timeline import Timeline, bubble_rate, busy_time, comu_ti, makespan


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMeans:
    """What ComuTi saw over a run: means over mini-batches of the values that it logged, and the run's throughput.

    `comu_ti`, `comu_ti_per_stage` and `bubble_rate` are fractions of 1, None when no mini-batch was pipelined.
    `samples_per_second` is `samples / seconds`, `seconds` the wall-clock time of training without validation.
    """

    mini_batches: int
    samples: int
    seconds: float
    samples_per_second: float
    comu_ti: float | None
    comu_ti_per_stage: tuple[float, ...] | None
    bubble_rate: float | None


class ComuTi(Callback):
    """Log `comu_ti`, `comu_ti/stage_k`, `bubble_rate` and `samples_per_second` of every mini-batch.

    The values go through `LightningModule.log`, so they reach every logger of the Trainer once, every
    `log_every_n_steps` steps, in the same row as the loss; they are equal on all ranks and may be monitored by
    other callbacks. A pipeline of one stage has no timeline: then only `samples_per_second` is logged. `seconds` of a
    mini-batch run from the end of the one before it, so that waiting for data and the work of other
    callbacks count; validation does not.
    """

    def __init__(self) -> None:
        self._reset()

    @property
    def means(self) -> RunMeans | None:
        """The means of the latest run so far, equal on all ranks; None before its first mini-batch."""
        if not self._mini_batches:
            return None
        stages = tuple(total / self._pipelined for total in self._shares) if self._pipelined else None
        utilisation = self._utilisation / self._pipelined if self._pipelined else None
        return RunMeans(
            mini_batches=self._mini_batches,
            samples=self._samples,
            seconds=self._seconds,
            samples_per_second=self._samples / self._seconds,
            comu_ti=utilisation,
            comu_ti_per_stage=stages,
            bubble_rate=None if utilisation is None else 1 - utilisation,
        )

    def _reset(self) -> None:
        self._mini_batches = 0
        self._samples = 0
        self._seconds = 0.0
        self._pipelined = 0  # mini-batches that had a timeline
        self._utilisation = 0.0  # sum of comu_ti over those
        self._shares: list[float] = []  # sum of each stage's share of busy time over those
        self._since = time.perf_counter()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a strategy that has no timeline before any training is done."""
        pipeline_strategy(trainer, self)
        self._reset()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock: what lies between two epochs is not training."""
        self._since = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock again behind a validation in the middle of an epoch."""
        self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Gather the timeline on all ranks and log what it says."""
        strategy = pipeline_strategy(trainer, self)
        timeline = strategy.gather_timeline()
        now = time.perf_counter()
        # Clocks of the ranks differ by a little; callbacks that decide on a logged value must all see the same one.
        seconds = float(trainer.strategy.broadcast(now - self._since))
        self._since = now

        samples = row_count(batch)
        values = {"samples_per_second": samples / seconds}
        if timeline:
            values |= utilisation(timeline, len(strategy.plan.stages))
        self._add(values, samples, seconds)
        pl_module.log_dict(values, on_step=True, on_epoch=False, batch_size=samples)

    def _add(self, values: dict[str, float], samples: int, seconds: float) -> None:
        self._mini_batches += 1
        self._samples += samples
        self._seconds += seconds
        if "comu_ti" in values:
            shares = [value for name, value in values.items() if name.startswith("comu_ti/stage_")]
            self._pipelined += 1
            self._utilisation += values["comu_ti"]
            sums = self._shares or [0.0] * len(shares)
            self._shares = [old + new for old, new in zip(sums, shares, strict=True)]


def utilisation(timeline: Timeline, stages: int) -> dict[str, float]:
    """Return `comu_ti`, `bubble_rate` and each stage's `comu_ti/stage_k` of one mini-batch, as fractions of 1."""
    total = makespan(timeline)
    return {
        "comu_ti": comu_ti(timeline, stages),
        "bubble_rate": bubble_rate(timeline, stages),
        **{f"comu_ti/stage_{stage}": busy_time(timeline, stage) / total for stage in range(stages)},
    }
