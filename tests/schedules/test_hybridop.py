import os
import subprocess
import sys
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

import lightning_hybridop
from lightning_hybridop.planning.plan import Estimator, Plan, Stage, even_plan, save_plan
from lightning_hybridop.schedules.actions import Action, Kind
from lightning_hybridop.schedules.hybridop import hybridop, hybridop_timeline
from lightning_hybridop.schedules.timeline import TimedAction, makespan
from tests.schedules.executor import execute, perturbed_order, plans, texts

TWO_ZO_TWO_BP = Plan(
    blocks=6,
    stages=(
        Stage(first=0, last=2, role="zo"),
        Stage(first=2, last=4, role="zo"),
        Stage(first=4, last=5),
        Stage(first=5, last=6),
    ),
    micro_batches=4,
)


@pytest.mark.parametrize(
    ("queries", "expected"), [(1, 23), (2, 28), (3, 36), (4, 44), (6, 60), (12, 108), (20, 172)]
)
def test_makespan_with_two_zo_and_two_bp_stages(queries: int, expected: float) -> None:
    plan = replace(TWO_ZO_TWO_BP, queries=queries)

    assert makespan(hybridop_timeline(plan)) == expected
    assert execute(plan, hybridop(plan)).makespan == expected


@pytest.mark.parametrize("queries", [1, 2, 3, 4, 6, 12, 20])
def test_makespan_with_the_boundary_estimator(queries: int) -> None:
    plan = replace(TWO_ZO_TWO_BP, queries=queries, estimator="boundary")

    # T_head without queries, or all passes of a zo stage behind the first one's way to the last.
    assert makespan(hybridop_timeline(plan)) == max(2 + 2 + 6 + 9, 2 + 2 + (4 * (1 + queries) - 1) * 2)


def test_makespan_with_adjoints() -> None:
    # zo stages take 2 forth and 4 back: six for each micro-batch, and the first one's way through all other stages.
    assert makespan(hybridop_timeline(replace(TWO_ZO_TWO_BP, estimator="adjoint"))) == 4 * 6 + 4 + 2


@pytest.mark.parametrize(
    ("queries", "loss_split", "loss", "boundary_split", "boundary"),
    [
        (1, (7, 7, 2, 3, 4, 5), 13.4, (7, 6, 3, 3, 5, 4), 11.8),
        (2, (6, 6, 3, 3, 5, 5), 16.53, (5, 5, 4, 4, 5, 5), 13.4),
        (3, (6, 6, 3, 3, 5, 5), 21.07, (4, 4, 4, 4, 6, 6), 14.0),
        (6, (5, 5, 3, 3, 6, 6), 31.6, (2, 2, 5, 5, 7, 7), 16.5),
        (12, (4, 4, 4, 4, 6, 6), 51.6, (1, 1, 5, 5, 8, 8), 18.0),
    ],
)
def test_best_splits_of_28_layers_over_six_devices(
    queries: int,
    loss_split: tuple[int, ...],
    loss: float,
    boundary_split: tuple[int, ...],
    boundary: float,
) -> None:
    # Two zo stages of speed 10, then bp stages of 10, 10, 15 and 15, M = 8; best among all splits in this order. Without
    # a limit to what bp stages hold, it is 11.8, 12.5, 13.5, 15.4 and 16.8 with gradients at the boundary, 17.6 without
    # the zo stages.
    def time(split: tuple[int, ...], zo: int, estimator: Estimator) -> float:
        speeds = (10, 10, 10, 10, 15, 15)[-len(split) :]
        bounds = list(accumulate(split, initial=0))
        stages = tuple(
            Stage(first=first, last=last, role="zo" if index < zo else "bp", speed=speed)
            for index, ((first, last), speed) in enumerate(zip(pairwise(bounds), speeds, strict=True))
        )
        plan = Plan(blocks=28, stages=stages, micro_batches=8, queries=queries, estimator=estimator)
        return makespan(hybridop_timeline(plan))

    assert time(loss_split, 2, "loss") == pytest.approx(loss, abs=0.005)
    assert time(boundary_split, 2, "boundary") == pytest.approx(boundary, abs=0.005)
    assert boundary < loss
    assert boundary < time((6, 6, 8, 8), 0, "loss") == pytest.approx(19.0)


def paper_time(zo: list[int], bp: list[int], micro_batches: int, queries: int) -> int:
    """Return the paper's T_head: `sum_N t + 3 sum_G t + 3 (M-1) max_G t + M Q t*`."""
    return sum(zo) + 3 * sum(bp) + 3 * (micro_batches - 1) * max(bp) + micro_batches * queries * bp[0]


def two_roles(zo: list[int], bp: list[int], *, micro_batches: int, queries: int) -> Plan:
    """Return a plan whose stages take so long for a forward."""
    times = zo + bp
    stages = tuple(
        Stage(first=sum(times[:index]), last=sum(times[: index + 1]), role="zo" if index < len(zo) else "bp")
        for index in range(len(times))
    )
    return Plan(blocks=sum(times), stages=stages, micro_batches=micro_batches, queries=queries)


@pytest.mark.parametrize(
    ("zo", "bp", "micro_batches"),
    [
        ([1], [3], 1),
        ([2, 1], [2], 6),
        ([3], [2], 8),
        ([2, 2], [1, 1], 2),
        ([2, 2], [1, 1], 8),
        ([1, 2], [2, 2], 6),
        ([2], [1, 1, 1], 4),
        ([3], [2, 1], 8),
    ],
)
def test_the_papers_time_at_one_query_where_neither_zo_stages_nor_few_micro_batches_leave_gaps(
    zo: list[int], bp: list[int], micro_batches: int
) -> None:
    plan = two_roles(zo, bp, micro_batches=micro_batches, queries=1)

    assert makespan(hybridop_timeline(plan)) == paper_time(zo, bp, micro_batches, 1)


@pytest.mark.parametrize(
    ("queries", "published"), [(1, 23), (2, 27), (3, 31), (4, 35), (6, 43), (12, 67), (20, 99)]
)
def test_the_papers_time_has_no_term_for_waiting_on_zo_stages(queries: int, published: int) -> None:
    plan = two_roles([2, 2], [1, 1], micro_batches=4, queries=queries)

    assert plan == replace(TWO_ZO_TWO_BP, queries=queries)
    assert paper_time([2, 2], [1, 1], 4, queries) == published
    assert (makespan(hybridop_timeline(plan)) > published) == (queries > 1)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (1, 5), (2, 4), (4, 4), (6, 3)])
def test_equal_bp_stages_take_as_long_as_the_formula_of_1f1b(stages: int, micro_batches: int) -> None:
    plan = even_plan(blocks=2 * stages, stages=stages, micro_batches=micro_batches)

    assert makespan(hybridop_timeline(plan)) == 3 * 2 * (stages + micro_batches - 1)


def test_speed_divides_the_time() -> None:
    plan = Plan(blocks=3, stages=(Stage(first=0, last=3, speed=1.5),), micro_batches=1)

    assert makespan(hybridop_timeline(plan)) == 2 + 4


def test_order_on_a_small_pipeline() -> None:
    plan = even_plan(blocks=2, stages=2, zo_stages=1, micro_batches=2, queries=1, exit_queries=1)

    head, tail = texts(hybridop(plan))

    # Worked out by hand: at time 2 the tail has B(0) and F(1) to choose from, at 4 F(1) and P(0), and so on.
    assert head == "F0 F1 P0.0 P1.0 X0 X1 X0.0 X1.0"
    assert tail == "F0 B0 F1 B1 P0.0 P1.0"


def test_order_on_a_small_pipeline_with_the_boundary_estimator() -> None:
    plan = even_plan(
        blocks=3,
        stages=3,
        zo_stages=2,
        micro_batches=2,
        queries=3,
        exit_queries=1,
        estimator="boundary",
        queries_per_forward=2,
    )

    # Worked out by hand: stage 1 has nothing else to do at time 3; B(0) arrives at 5, B(1) at 8, each while it is busy.
    assert texts(hybridop(plan)) == (
        "F0 F1 P1.0 P1.2 P0.0 P0.2 X0.0 X1.0",
        "F0 F1 X0 P1.0 B0 P1.2 P0.0 B1 P0.2 X1 X0.0 X1.0",
        "F0 B0 F1 B1",
    )


def test_queries_that_ride_together_take_a_stage_and_a_link_as_long_as_one_after_the_other() -> None:
    first, *others = even_plan(blocks=3, stages=3, zo_stages=2).stages
    plan = Plan(
        blocks=3,
        stages=(replace(first, transfer=1.0), *others),
        micro_batches=1,
        queries=2,
        estimator="boundary",
        queries_per_forward=2,
    )

    times = {(timed.stage, timed.action.kind): (timed.start, timed.end) for timed in hybridop_timeline(plan)}

    assert times[0, Kind.PERTURBED] == (1, 3)
    assert times[1, Kind.FORWARD] == (2, 3)
    assert times[1, Kind.PERTURBED] == (5, 7)


def test_both_signs_of_a_central_difference_follow_each_other() -> None:
    plan = even_plan(
        blocks=1, stages=1, zo_stages=1, micro_batches=2, queries=1, exit_queries=1, difference="central"
    )

    assert texts(hybridop(plan)) == ("F0 F1 P0.0 P0.0- P1.0 P1.0- X0.0 X0.0- X1.0 X1.0-",)


@given(plan=plans(schedule="hybridop", most_micro_batches=4))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_stage_always_takes_the_most_urgent_action_at_hand(plan: Plan) -> None:
    timeline = hybridop_timeline(plan)
    execution = execute(plan, hybridop(plan))

    for timed in timeline:
        assert execution.times[timed.stage][timed.action] == (timed.start, timed.end)
    ends = {(timed.stage, timed.action): timed.end for timed in timeline}
    bp_stages = [index for index, stage in enumerate(plan.stages) if stage.role == "bp"]
    for stage in range(len(plan.stages)):
        own = [timed for timed in timeline if timed.stage == stage]
        limit = len(bp_stages) - bp_stages.index(stage) if stage in bp_stages else None
        for index, taken in enumerate(own):
            held = sum(
                (t.action.kind is Kind.FORWARD) - (t.action.kind is Kind.BACKWARD) for t in own[:index]
            )
            for passed_over in own[index + 1 :]:
                if passed_over.action.kind is Kind.FORWARD and limit is not None and held >= limit:
                    continue
                if (
                    plan.estimator == "boundary"
                    and stage == plan.exit_stage
                    and passed_over.end == taken.start
                ):
                    continue  # a gradient that takes no time, taken just before
                if "BFPX".index(passed_over.action.kind) < "BFPX".index(taken.action.kind):
                    assert _at_hand(plan, ends, passed_over) > taken.start


# Run in a package without its __init__, so that nothing but the pure rooms is imported.
BUILD_IN_A_FRESH_PROCESS = """
import sys, types
package = types.ModuleType("lightning_hybridop")
package.__path__ = [sys.argv[1]]
sys.modules["lightning_hybridop"] = package
from lightning_hybridop.planning.plan import load_plan
from lightning_hybridop.schedules import build_schedule
assert not {"torch", "lightning"} & sys.modules.keys()
print(build_schedule(load_plan(sys.argv[2])))
"""


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_is_the_same_in_every_process(hash_seed: str, tmp_path: Path) -> None:
    # Each rank builds the schedule for itself, so no order may come from a set.
    plan = replace(TWO_ZO_TWO_BP, queries=2, exit_queries=2, difference="central")
    save_plan(plan, tmp_path / "plan.yaml")
    package = str(Path(lightning_hybridop.__file__).parent)

    result = subprocess.run(
        [sys.executable, "-c", BUILD_IN_A_FRESH_PROCESS, package, str(tmp_path / "plan.yaml")],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert result.stdout.strip() == str(hybridop(plan))


def _at_hand(plan: Plan, ends: dict[tuple[int, Action], float], timed: TimedAction) -> float:
    """Return when all that an action waits for was there."""
    stage, action = timed.stage, timed.action
    own_forward = ends[stage, Action(kind=Kind.FORWARD, micro_batch=action.micro_batch)]
    if action.kind is Kind.BACKWARD:
        return max(own_forward, ends[stage + 1, action] if stage + 1 < len(plan.stages) else 0)
    if action.kind is Kind.EXIT and action.query is None:
        return own_forward
    arrival = ends[stage - 1, action] if stage > 0 else 0
    if action.kind is Kind.PERTURBED and plan.estimator == "boundary":
        actions = [a for on_stage, a in ends if on_stage == stage]
        queue = perturbed_order(actions, micro_batches=plan.micro_batches)
        place = queue.index(action)
        if place > 0:
            arrival = max(arrival, ends[stage, queue[place - 1]])
        if stage != plan.exit_stage and place >= 8:
            arrival = max(arrival, ends[stage + 1, queue[place - 8]])
        first = plan.micro_batches * (2 if plan.difference == "central" else 1)
        if stage == plan.exit_stage and place >= first:
            arrival = max(arrival, ends[stage, Action(kind=Kind.BACKWARD, micro_batch=action.micro_batch)])
    return arrival
