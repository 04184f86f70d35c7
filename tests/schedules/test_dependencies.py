from dataclasses import replace

import pytest

from lightning_hybridop.planning.plan import Plan, even_plan
from lightning_hybridop.schedules import build_schedule
from lightning_hybridop.schedules.actions import Action, Kind
from lightning_hybridop.schedules.dependencies import (
    ScheduleError,
    check_schedule,
    dependencies,
    expected_actions,
)

F0, F1, B0, B1 = (Action(kind=kind, micro_batch=m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in (0, 1))
TWO_BP = even_plan(blocks=2, stages=2, micro_batches=2)


@pytest.fixture
def plan() -> Plan:
    """Two zo and two bp stages."""
    return even_plan(blocks=4, stages=4, zo_stages=2, micro_batches=2, queries=1, exit_queries=1)


def test_dependencies_follow_the_hidden_state_and_the_gradient(plan: Plan) -> None:
    perturbed = Action(kind=Kind.PERTURBED, micro_batch=1, query=0)
    leaving = Action(kind=Kind.EXIT, micro_batch=1, query=0)
    baseline = Action(kind=Kind.EXIT, micro_batch=1)

    assert dependencies(plan, 0, F0) == ()
    assert dependencies(plan, 2, F0) == ((1, F0),)
    assert dependencies(plan, 3, perturbed) == ((2, perturbed),)
    assert dependencies(plan, 1, leaving) == ((0, leaving),)
    assert dependencies(plan, 1, baseline) == ((1, F1),)
    assert dependencies(plan, 3, B0) == ((3, F0),)
    assert set(dependencies(plan, 2, B0)) == {(2, F0), (3, B0)}


def test_the_exit_baseline_runs_on_the_exit_stage_alone(plan: Plan) -> None:
    baseline = Action(kind=Kind.EXIT, micro_batch=0)

    assert [baseline in expected_actions(plan, stage) for stage in range(4)] == [False, True, False, False]
    for other in (
        replace(plan, exit_baseline="full"),
        replace(plan, difference="central"),
        replace(plan, exit_queries=0),
    ):
        assert baseline not in expected_actions(other, 1)


def test_a_schedule_that_does_all_work_is_accepted() -> None:
    check_schedule(((F0, F1, B1, B0), (F0, F1, B1, B0)), TWO_BP)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (((F0, F1, B0, B1), (F0, F1, B0)), "Stage 1 lacks Action(kind=<Kind.BACKWARD: 'B'>, micro_batch=1,"),
        (
            ((F0, F0, F1, B0, B1), (F0, F1, B0, B1)),
            "Stage 0 runs Action(kind=<Kind.FORWARD: 'F'>, micro_batch=0,",
        ),
        (
            ((F0, F1, B0, B1, Action(kind=Kind.FORWARD, micro_batch=2)), (F0, F1, B0, B1)),
            "Stage 0 has no use for Action(kind=<Kind.FORWARD: 'F'>, micro_batch=2,",
        ),
        (
            ((F0, B0, F1, B1), (F0, F1, B0, B1)),
            "Stage 0 waits for ever to run Action(kind=<Kind.BACKWARD: 'B'>",
        ),
        (
            ((F0, F1, B0, B1), (B0, F0, F1, B1)),
            "Stage 0 waits for ever to run Action(kind=<Kind.BACKWARD: 'B'>",
        ),
        (((F0, F1, B0, B1),), "The schedule has 1 lists of actions, but the plan has 2 stages"),
    ],
)
def test_a_schedule_that_cannot_be_right_is_refused(
    schedule: tuple[tuple[Action, ...], ...], message: str
) -> None:
    with pytest.raises(ScheduleError) as error:
        check_schedule(schedule, TWO_BP)

    assert str(error.value).startswith(message)


def test_schedules_are_built_once_per_plan() -> None:
    assert build_schedule(TWO_BP) is build_schedule(replace(TWO_BP))
    assert len(build_schedule(replace(TWO_BP, micro_batches=1))[0]) == 2
