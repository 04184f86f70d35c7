"""One small mini-batch with numbers that are easy to check by hand."""

import pytest

from lightning_hybridop.planning.plan import Plan, Stage
from lightning_hybridop.schedules.actions import Action, Kind
from lightning_hybridop.schedules.timeline import TimedAction, Timeline


@pytest.fixture
def plan() -> Plan:
    """A zo stage of blocks 0-1 and a bp stage of block 2."""
    return Plan(
        blocks=3,
        stages=(Stage(first=0, last=2, role="zo", device="npu:0"), Stage(first=2, last=3, dtype="bfloat16")),
        micro_batches=1,
        queries=1,
        exit_queries=1,
    )


@pytest.fixture
def timeline() -> Timeline:
    """Makespan 10 ms; stage 0 is busy for 6 ms, stage 1 for 7 ms, so Comu_ti is 65 %."""

    def timed(stage: int, kind: Kind, start: float, end: float, query: int | None = None) -> TimedAction:
        action = Action(kind=kind, micro_batch=0, query=query)
        return TimedAction(stage=stage, action=action, start=50 + start / 1e3, end=50 + end / 1e3)

    return (
        timed(1, Kind.FORWARD, 2, 4),
        timed(0, Kind.FORWARD, 0, 2),
        timed(1, Kind.BACKWARD, 4, 8),
        timed(0, Kind.PERTURBED, 2, 4, query=0),
        timed(1, Kind.PERTURBED, 9, 10, query=0),
        timed(0, Kind.EXIT, 4, 6, query=1),
    )
