import pytest

from lightning_hybridop.schedules.actions import Action, Kind
from lightning_hybridop.schedules.timeline import TimedAction, bubble_rate, busy_time, comu_ti, makespan

ACTION = Action(kind=Kind.FORWARD, micro_batch=0)


def timed(stage: int, start: float, end: float) -> TimedAction:
    return TimedAction(stage=stage, action=ACTION, start=start, end=end)


# Stage 0 works for 3 + 2 and stage 1 for 4 of the 10 seconds from 100 to 110.
TIMELINE = (timed(0, 100, 103), timed(1, 103, 107), timed(0, 108, 110))


def test_times_of_a_small_timeline() -> None:
    assert makespan(TIMELINE) == 10
    assert busy_time(TIMELINE, 0) == 5
    assert busy_time(TIMELINE, 1) == 4
    assert comu_ti(TIMELINE, 2) == pytest.approx(9 / 20)
    assert bubble_rate(TIMELINE, 2) == pytest.approx(11 / 20)


def test_an_idle_stage_counts() -> None:
    assert busy_time(TIMELINE, 2) == 0
    assert comu_ti(TIMELINE, 3) == pytest.approx(9 / 30)


def test_order_does_not_matter() -> None:
    assert makespan(TIMELINE[::-1]) == 10


def test_nothing_happened() -> None:
    assert makespan(()) == 0
    assert busy_time((), 0) == 0
    assert comu_ti((), 2) == 0
