import pytest

from lightning_hybridop.planning.plan import Plan, Stage, even_plan
from lightning_hybridop.schedules.gpipe import gpipe
from lightning_hybridop.schedules.one_forward_one_backward import one_forward_one_backward
from tests.schedules.executor import execute, texts


def bp_plan(*blocks: int, micro_batches: int) -> Plan:
    """Return a plan of bp stages with so many blocks each."""
    bounds = [sum(blocks[:index]) for index in range(len(blocks) + 1)]
    stages = tuple(Stage(first=bounds[index], last=bounds[index + 1]) for index in range(len(blocks)))
    return Plan(blocks=bounds[-1], stages=stages, micro_batches=micro_batches)


@pytest.mark.parametrize(
    ("blocks", "micro_batches", "expected"),
    [
        # 3 (sum t + (M - 1) max t): all four devices back-propagate, the slow two in three units per forward.
        ((3, 3, 1, 1), 4, 51),
        # The two fast devices alone: twice the blocks, two micro-batches of twice the rows.
        ((4, 4), 2, 36),
        ((1,), 1, 3),
    ],
)
def test_gpipe_takes_as_long_as_its_formula(
    blocks: tuple[int, ...], micro_batches: int, expected: float
) -> None:
    plan = bp_plan(*blocks, micro_batches=micro_batches)

    assert execute(plan, gpipe(plan)).makespan == expected


def test_gpipe_order() -> None:
    plan = even_plan(blocks=2, stages=2, zo_stages=1, micro_batches=2, queries=2, exit_queries=1)

    assert texts(gpipe(plan)) == (
        "F0 F1 P0.0 P1.0 P0.1 P1.1 X0 X1 X0.0 X1.0",
        "F0 F1 P0.0 P1.0 P0.1 P1.1 B1 B0",
    )


def test_1f1b_order() -> None:
    plan = even_plan(
        blocks=4, stages=4, zo_stages=1, micro_batches=4, queries=1, exit_queries=1, exit_baseline="full"
    )

    assert texts(one_forward_one_backward(plan)) == (
        "F0 F1 F2 F3 P0.0 P1.0 P2.0 P3.0 X0.0 X1.0 X2.0 X3.0",
        "F0 F1 F2 B0 F3 B1 B2 B3 P0.0 P1.0 P2.0 P3.0",
        "F0 F1 B0 F2 B1 F3 B2 B3 P0.0 P1.0 P2.0 P3.0",
        "F0 B0 F1 B1 F2 B2 F3 B3 P0.0 P1.0 P2.0 P3.0",
    )


BOUNDARY = even_plan(
    blocks=3,
    stages=3,
    zo_stages=2,
    micro_batches=2,
    queries=3,
    exit_queries=1,
    estimator="boundary",
    queries_per_forward=2,
)
ADJOINT = even_plan(blocks=3, stages=3, zo_stages=2, micro_batches=3, estimator="adjoint")


def test_gpipe_order_with_the_other_estimators() -> None:
    assert texts(gpipe(BOUNDARY)) == (
        "F0 F1 P1.0 P1.2 P0.0 P0.2 X0.0 X1.0",
        "F0 F1 B1 B0 P1.0 P1.2 P0.0 P0.2 X0 X1 X0.0 X1.0",
        "F0 F1 B1 B0",
    )
    assert texts(gpipe(ADJOINT)) == ("F0 F1 F2 B2 B1 B0",) * 3


def test_1f1b_order_with_the_other_estimators() -> None:
    assert texts(one_forward_one_backward(BOUNDARY)) == (
        "F0 F1 P1.0 P1.2 P0.0 P0.2 X0.0 X1.0",
        "F0 F1 P1.0 P1.2 B0 P0.0 P0.2 B1 X0 X1 X0.0 X1.0",
        "F0 B0 F1 B1",
    )
    assert texts(one_forward_one_backward(ADJOINT)) == (
        "F0 F1 F2 B0 B1 B2",
        "F0 F1 B0 F2 B1 B2",
        "F0 B0 F1 B1 F2 B2",
    )


def test_1f1b_with_fewer_micro_batches_than_stages() -> None:
    plan = even_plan(blocks=3, stages=3, micro_batches=1)

    assert texts(one_forward_one_backward(plan)) == ("F0 B0", "F0 B0", "F0 B0")


def test_central_differences_run_both_signs() -> None:
    plan = even_plan(
        blocks=1, stages=1, zo_stages=1, micro_batches=1, queries=1, exit_queries=1, difference="central"
    )

    assert texts(gpipe(plan)) == ("F0 P0.0 P0.0- X0.0 X0.0-",)
