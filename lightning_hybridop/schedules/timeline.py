"""Actions with their times, simulated or measured, and what follows from them."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hybridop.schedules.actions import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAction:
    """An action of a stage from `start` to `end`, in seconds on the pipeline's common clock."""

    stage: int
    action: Action
    start: float
    end: float


Timeline = tuple[TimedAction, ...]


def makespan(timeline: Sequence[TimedAction]) -> float:
    """Return the time from the first action's start to the last action's end; 0 without actions."""
    if not timeline:
        return 0.0
    return max(timed.end for timed in timeline) - min(timed.start for timed in timeline)


def busy_time(timeline: Sequence[TimedAction], stage: int) -> float:
    """Return the sum of the durations of one stage's actions."""
    return sum(timed.end - timed.start for timed in timeline if timed.stage == stage)


def comu_ti(timeline: Sequence[TimedAction], stages: int) -> float:
    """Return the compute utilisation: busy time over all stages / (stages x makespan); 0 without actions."""
    span = makespan(timeline)
    if span == 0.0:
        return 0.0
    return sum(busy_time(timeline, stage) for stage in range(stages)) / (stages * span)


def bubble_rate(timeline: Sequence[TimedAction], stages: int) -> float:
    """Return `1 - comu_ti`."""
    return 1.0 - comu_ti(timeline, stages)
