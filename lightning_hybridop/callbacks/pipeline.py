"""What the callbacks ask of a strategy."""

from typing import Protocol, cast

from lightning.pytorch import Callback, Trainer

from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.schedules.timeline import Timeline


class PipelineStrategy(Protocol):
    """A strategy that runs a plan and can tell when each action of the latest mini-batch ran."""

    @property
    def plan(self) -> Plan:
        """The plan that runs."""

    def gather_timeline(self) -> Timeline:
        """Return all stages' actions of the latest training mini-batch; every rank must call it."""


def pipeline_strategy(trainer: Trainer, callback: Callback) -> PipelineStrategy:
    """Return the Trainer's strategy; TypeError when it is not one that runs a pipeline."""
    if not hasattr(trainer.strategy, "gather_timeline"):
        raise TypeError(
            f"{type(callback).__name__} found the strategy {type(trainer.strategy).__name__}, expected one that runs a "
            "pipeline: pass Trainer(strategy=HybridOPStrategy(...)) or remove the callback."
        )
    return cast(PipelineStrategy, trainer.strategy)
