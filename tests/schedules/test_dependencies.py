from dataclasses import replace

import pytest

from lightning_hybridop.planning.plan import Plan, even_plan
from lightning_hybridop.schedules import build_schedule
from lightning_hybridop.schedules.actions import Action, Kind
from lightning_hybridop.schedules.dependencies import (
    ScheduleError,
    check_schedule,
    crossing,
    dependencies,
    expected_actions,
    perturbed_forwards,
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
        replace(plan, exit_baseline="running"),
        replace(plan, difference="central"),
        replace(plan, exit_queries=0),
    ):
        assert baseline not in expected_actions(other, 1)
    assert baseline in expected_actions(replace(plan, difference="antithetic"), 1)


def test_at_the_boundary_perturbed_forwards_wait_for_gradients_and_for_slower_stages(plan: Plan) -> None:
    plan = replace(plan, estimator="boundary", micro_batches=4, queries=5, queries_per_forward=2)

    def perturbed(micro_batch: int, query: int, count: int = 2) -> Action:
        return Action(kind=Kind.PERTURBED, micro_batch=micro_batch, query=query, count=count)

    # Three forwards for each micro-batch; the last four of all twelve come first.
    order = [(2, 4), (3, 0), (3, 2), (3, 4), *((m, query) for m in (0, 1, 2) for query in (0, 2, 4))][:12]
    expected = [perturbed(m, query, 1 if query == 4 else 2) for m, query in order]
    assert perturbed_forwards(plan, 0) == perturbed_forwards(plan, 1) == expected
    assert perturbed_forwards(plan, 2) == []
    assert dependencies(plan, 0, expected[0]) == ()
    assert set(dependencies(plan, 0, expected[9])) == {(0, expected[8]), (1, expected[1])}
    assert set(dependencies(plan, 1, expected[2])) == {
        (0, expected[2]),
        (1, expected[1]),
        (1, Action(kind=Kind.FORWARD, micro_batch=3)),
    }
    assert set(dependencies(plan, 1, expected[5])) == {
        (0, expected[5]),
        (1, expected[4]),
        (1, F0),
        (1, B0),
    }
    assert set(dependencies(plan, 1, B0)) == {(1, F0), (2, B0)}
    assert B0 not in expected_actions(plan, 0)


def test_with_adjoints_zo_stages_go_back_and_nothing_is_perturbed(plan: Plan) -> None:
    plan = replace(plan, estimator="adjoint", exit_queries=0)

    assert [expected_actions(plan, stage) for stage in range(4)] == [frozenset({F0, F1, B0, B1})] * 4
    assert set(dependencies(plan, 0, B0)) == {(0, F0), (1, B0)}


def test_what_crosses_a_link() -> None:
    riding = Action(kind=Kind.PERTURBED, micro_batch=0, query=0, count=3)

    assert crossing(1, riding, 0) == 3
    assert crossing(0, riding, 1) == 0  # only waits until the next stage has taken an earlier one
    assert crossing(1, F0, 0) == crossing(1, B0, 2) == 1
    assert crossing(1, B0, 1) == 0


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
