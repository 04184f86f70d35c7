import dataclasses
from typing import Literal

import pytest

from lightning_hybridop.planning.costs import Assignment, DeviceCosts, LinkTimes, PipelineCosts
from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.planning.planner import layout_plan
from lightning_hybridop.simulation.predict import most_within_idle_time, simulate_layout, with_prediction


def device(name: str, forward: float, *, zo: bool, memory: float = 100.0) -> DeviceCosts:
    return DeviceCosts(
        name=name,
        zo=zo,
        forward=(forward,) * 4,
        backward=(2 * forward,) * 4,
        resident=(1.0,) * 4,
        kept=(1.0,) * 4,
        memory=memory,
        head_resident=1.0,
    )


def pipeline(zo_memory: float = 100.0) -> tuple[PipelineCosts, tuple[Assignment, ...], Plan]:
    """A zo stage of t = 1 in front of bp stages of t = 2: it idles, and its perturbed forwards would not be free."""
    devices = (
        device("zo", 1.0, zo=True, memory=zo_memory),
        device("a", 2.0, zo=False),
        device("b", 1.0, zo=False),
    )
    costs = PipelineCosts(
        devices=devices, links=((LinkTimes(),) * 3,) * 3, micro_batches=4, queries=1, exit_baseline=False
    )
    layout = tuple(
        Assignment(device=i, first=first, last=last) for i, first, last in ((0, 0, 1), (1, 1, 2), (2, 2, 4))
    )
    return costs, layout, dataclasses.replace(layout_plan(costs, layout), exit_baseline="full")


def makespan(field: str, number: int) -> float:
    costs, layout, plan = pipeline()
    costs = dataclasses.replace(costs, **{field: number})  # type: ignore[arg-type]
    return simulate_layout(costs, layout, dataclasses.replace(plan, **{field: number})).makespan  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["queries", "exit_queries"])
def test_one_more_would_lengthen_the_mini_batch(field: Literal["queries", "exit_queries"]) -> None:
    costs, layout, plan = pipeline()
    now = simulate_layout(costs, layout, plan).makespan
    most = most_within_idle_time(costs, layout, plan, field)

    assert makespan(field, most) <= now
    assert makespan(field, most + 1) > now


def test_at_the_boundary_more_queries_fit_into_idle_time() -> None:
    costs, layout, plan = pipeline()
    at_boundary = dataclasses.replace(costs, estimator="boundary")
    adjoint = dataclasses.replace(costs, estimator="adjoint")

    most = most_within_idle_time(costs, layout, plan, "queries")
    found = most_within_idle_time(
        at_boundary, layout, dataclasses.replace(plan, estimator="boundary"), "queries"
    )

    # T_head without queries is 1 + 3 x 4 + 3 x 6 = 31, and the zo stage's 4 (1 + Q) passes of 1 fit in for Q = 6. But the
    # last gradient comes at the end, and of its micro-batch only four perturbed hidden states can wait for it.
    assert most < found
    assert found == 4
    assert (
        most_within_idle_time(adjoint, layout, dataclasses.replace(plan, estimator="adjoint"), "queries") == 1
    )


def test_early_exits_fill_what_perturbed_forwards_cannot() -> None:
    costs, layout, plan = pipeline()

    assert most_within_idle_time(costs, layout, plan, "exit_queries") > 0


def test_a_head_that_does_not_fit_beside_the_blocks_takes_no_exits() -> None:
    # The zo stage's block takes 1 byte, the head 1 more.
    costs, layout, plan = pipeline(zo_memory=1.5)

    assert most_within_idle_time(costs, layout, plan, "exit_queries") == 0


def test_a_plan_without_zo_stages_perturbs_nothing() -> None:
    costs, _, _ = pipeline()
    layout = (Assignment(device=1, first=0, last=4),)

    assert most_within_idle_time(costs, layout, layout_plan(costs, layout), "queries") == 1


def test_a_prediction_is_part_of_the_plan_and_scaled_with_emulation() -> None:
    costs, layout, plan = pipeline()
    simulation = simulate_layout(costs, layout, plan)
    predicted = with_prediction(plan, simulation, time_scale=3.0).predicted

    assert predicted is not None
    assert predicted.iteration_seconds == 3.0 * simulation.makespan
    assert predicted.comu_ti == simulation.comu_ti
    assert predicted.memory_mib == tuple(each.memory / 2**20 for each in simulation.devices)
