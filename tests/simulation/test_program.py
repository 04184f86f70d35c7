from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_hybridop.planning.costs import (
    Assignment,
    DeviceCosts,
    LinkTimes,
    PipelineCosts,
    StageTimes,
    layout_memory,
)
from lightning_hybridop.planning.plan import Plan, ScheduleName, Stage
from lightning_hybridop.planning.planner import layout_plan
from lightning_hybridop.schedules import build_schedule
from lightning_hybridop.schedules.actions import Action, Kind
from lightning_hybridop.simulation.program import (
    Collective,
    Edge,
    Program,
    ProgramError,
    Task,
    layout_program,
    schedule_program,
)
from lightning_hybridop.simulation.simulator import simulate
from tests.schedules.executor import execute, plans

ACTION = Action(kind=Kind.FORWARD, micro_batch=0)
GOOD = Program(
    devices=("a", "b"),
    tasks=(
        Task(device=0, action=ACTION, seconds=1),
        Task(device=1, action=ACTION, seconds=1, after=(Edge(task=0),)),
        Collective(name="all-reduce", devices=(0, 1), seconds=1),
    ),
    order=((0, 2), (1, 2)),
    resident=(0.0, 0.0),
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"order": ((0, 2),)}, "Found 2 devices, 1 orders and 2 sizes"),
        ({"order": ((0,), (1, 2))}, "Task 2 is missing in the order of its device 0."),
        ({"order": ((1, 2), (0, 2))}, "Task 0 is missing in the order of its device 0."),
        ({"order": ((0, 0, 2), (1, 2))}, "An order names a task twice"),
        ({"order": ((0, 1, 2), (1, 2))}, "or a task that belongs to another device."),
        ({"tasks": (replace(GOOD.tasks[0], seconds=-1), *GOOD.tasks[1:])}, "Task 0: found -1"),
        ({"tasks": (replace(GOOD.tasks[0], holds=float("nan")), *GOOD.tasks[1:])}, "Task 0: found nan"),
        ({"tasks": (replace(GOOD.tasks[0], after=(Edge(task=9),)), *GOOD.tasks[1:])}, "waits for task 9"),
        (
            {"tasks": (replace(GOOD.tasks[0], after=(Edge(task=1, latency=-2),)), *GOOD.tasks[1:])},
            "Task 0: found -2",
        ),
    ],
)
def test_a_program_that_makes_no_sense_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        replace(GOOD, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["hybridop", "gpipe", "1f1b"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_schedule_runs_as_when_executed_with_mailboxes(name: str, data: st.DataObject) -> None:
    plan = data.draw(plans(schedule=name))  # type: ignore[arg-type]
    schedule = build_schedule(plan)
    forwards = [(stage.last - stage.first) / stage.speed for stage in plan.stages]
    multiplies = [plan.estimator == "boundary" and stage.role == "zo" for stage in plan.stages]
    stages = [
        StageTimes(role=s.role, forward=t, backward=0 if m else 2 * t, exit_forward=t, baseline_forward=t)
        for s, t, m in zip(plan.stages, forwards, multiplies, strict=True)
    ]
    count = len(stages)
    expected = execute(plan, schedule)

    program = schedule_program(
        schedule,
        plan,
        stages,
        [LinkTimes()] * (count - 1),
        resident=[10] * count,
        kept=[0 if m else 1 for m in multiplies],
    )
    simulation = simulate(program)

    for timed in simulation.timeline:
        assert expected.times[timed.stage][timed.action] == (timed.start, timed.end)
    assert sum(map(len, expected.times)) == len(simulation.timeline)
    assert [device.memory - 10 for device in simulation.devices] == expected.most_held
    assert program.devices == tuple(f"stage {index}" for index in range(count))


def test_each_kind_of_action_takes_its_own_time_and_crosses_the_link_it_needs() -> None:
    plan = Plan(
        blocks=3,
        stages=(
            Stage(first=0, last=1, role="zo"),
            Stage(first=1, last=2, role="zo"),
            Stage(first=2, last=3),
        ),
        micro_batches=1,
        queries=1,
        exit_queries=1,
    )
    stages = [
        StageTimes(role="zo", forward=1, exit_forward=2),
        StageTimes(role="zo", forward=3, exit_forward=4, baseline_forward=5),
        StageTimes(role="bp", forward=6, backward=7),
    ]
    links = [LinkTimes(transfer=0.25, latency=0.5), LinkTimes(transfer=0.75, latency=1)]

    program = schedule_program(build_schedule(plan), plan, stages, links, resident=[0, 0, 0], kept=[1, 1, 1])

    seconds = {
        (t.device, str(t.action.kind), t.action.query): t.seconds
        for t in program.tasks
        if isinstance(t, Task)
    }
    assert seconds == {
        (0, "F", None): 1,
        (0, "P", 0): 1,
        (0, "X", 0): 2,
        (1, "F", None): 3,
        (1, "P", 0): 3,
        (1, "X", 0): 4,
        (1, "X", None): 5,
        (2, "F", None): 6,
        (2, "P", 0): 6,
        (2, "B", None): 7,
    }
    crossings = [
        (edge.link, edge.transfer, edge.latency) for task in program.tasks for edge in task.after if edge.link
    ]
    assert sorted(crossings) == [((0, 1), 0.25, 0.5)] * 3 + [((1, 2), 0.75, 1)] * 2


def test_gradients_cross_the_link_the_other_way() -> None:
    plan = Plan(blocks=2, stages=(Stage(first=0, last=1), Stage(first=1, last=2)), micro_batches=1, queries=0)
    stage = StageTimes(role="bp", forward=1, backward=2)

    program = schedule_program(
        build_schedule(plan),
        plan,
        [stage, stage],
        [LinkTimes(transfer=3, latency=4)],
        resident=[0, 0],
        kept=[1, 1],
    )

    assert sorted(edge.link for task in program.tasks for edge in task.after if edge.link) == [(0, 1), (1, 0)]
    assert simulate(program).makespan == 1 + 7 + 1 + 2 + 7 + 2


def device(name: str, *, zo: bool, speed: float = 1.0, blocks: int = 4) -> DeviceCosts:
    return DeviceCosts(
        name=name,
        zo=zo,
        forward=(1 / speed,) * blocks,
        backward=(2 / speed,) * blocks,
        resident=(100.0,) * blocks,
        kept=(10.0,) * blocks,
        embedding_resident=1000.0,
        head_forward=0.5 / speed,
        head_backward=1 / speed,
        head_resident=1000.0,
        head_kept=50.0,
    )


@pytest.mark.parametrize(("micro_batches", "exact"), [(1, True), (2, False), (6, True)])
@pytest.mark.parametrize("exit_queries", [0, 2])
def test_a_layout_takes_the_memory_that_the_planner_grants_it(
    micro_batches: int, exact: bool, exit_queries: int
) -> None:
    costs = PipelineCosts(
        devices=(device("npu", zo=True), device("gpu-0", zo=False), device("gpu-1", zo=False)),
        links=((LinkTimes(),) * 3,) * 3,
        micro_batches=micro_batches,
        queries=2,
        exit_queries=exit_queries,
    )
    layout = tuple(
        Assignment(device=index, first=first, last=last)
        for index, (first, last) in enumerate([(0, 1), (1, 3), (3, 4)])
    )
    plan = Plan(
        blocks=4,
        stages=(Stage(first=0, last=1, role="zo"), Stage(first=1, last=3), Stage(first=3, last=4)),
        micro_batches=micro_batches,
        queries=2,
        exit_queries=exit_queries,
    )

    program = layout_program(costs, layout, plan)
    memory = tuple(figures.memory for figures in simulate(program).devices)

    assert program.devices == ("npu", "gpu-0", "gpu-1")
    granted = layout_memory(costs, layout)
    assert all(need <= limit for need, limit in zip(memory, granted, strict=True))
    if exact:
        assert memory == granted


@pytest.mark.parametrize(("queries", "together"), [(1, 1), (5, 1), (7, 3), (0, 1)])
@pytest.mark.parametrize("schedule", ["hybridop", "gpipe", "1f1b"])
def test_zo_stages_take_the_memory_that_the_planner_grants_an_estimator(
    queries: int, together: int, schedule: ScheduleName
) -> None:
    costs = PipelineCosts(
        devices=(device("npu-0", zo=True), device("npu-1", zo=True), device("gpu", zo=False)),
        links=((LinkTimes(transfer=0.5),) * 3,) * 3,
        micro_batches=4,
        queries=queries,
        estimator="boundary",
        queries_per_forward=together,
        hidden_bytes=2.0,
        float32_bytes=4.0,
    )
    layout = tuple(Assignment(device=index, first=index, last=index + 1 + (index == 2)) for index in range(3))
    plan = replace(layout_plan(costs, layout), schedule=schedule)
    adjoint = replace(costs, estimator="adjoint", queries_per_forward=1)

    first, last, _ = (figures.memory for figures in simulate(layout_program(costs, layout, plan)).devices)
    granted = layout_memory(costs, layout)

    # 8 perturbed forwards on their way to the next stage; there, 4 unperturbed hidden states, 4 gradients, and 4
    # perturbed ones (or groups of them) that wait.
    group = min(queries, together)
    assert granted[:2] == ((1100 + 8 * group * 2, 100 + 4 * (2 + 4 + group * 4)) if queries else (1100, 100))
    assert first == granted[0]
    # Never all of it at a time: gradients are let go of, and perturbed hidden states stop waiting.
    assert 0.5 * granted[1] < last <= granted[1]
    # With adjoints, what came in with each micro-batch.
    held = simulate(layout_program(adjoint, layout, layout_plan(adjoint, layout))).devices
    assert layout_memory(adjoint, layout)[:2] == (1108, 108) == (held[0].memory, held[1].memory)


def test_queries_that_ride_together_take_as_long_and_send_as_much_as_one_after_the_other() -> None:
    plan = Plan(
        blocks=3,
        stages=(Stage(first=0, last=1, role="zo"), Stage(first=1, last=2, role="zo"), Stage(first=2, last=3)),
        micro_batches=1,
        queries=3,
        estimator="boundary",
        queries_per_forward=2,
    )
    stages = [StageTimes(role=stage.role, forward=1, backward=0) for stage in plan.stages]
    links = [LinkTimes(transfer=0.25, latency=0.5)] * 2

    program = schedule_program(build_schedule(plan), plan, stages, links, resident=[0] * 3, kept=[0] * 3)

    perturbed = [t for t in program.tasks if isinstance(t, Task) and t.action.kind is Kind.PERTURBED]
    assert sorted((t.device, t.action.query, t.seconds) for t in perturbed) == [
        (0, 0, 2),
        (0, 2, 1),
        (1, 0, 2),
        (1, 2, 1),
    ]
    crossings = [(t.action.query, e.transfer, e.latency) for t in perturbed for e in t.after if e.link]
    assert sorted(crossings) == [(0, 0.5, 0.5), (2, 0.25, 0.5)]
