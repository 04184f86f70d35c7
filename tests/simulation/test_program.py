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
from lightning_hybridop.planning.plan import Plan, Stage
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
    stages = [
        StageTimes(role=s.role, forward=t, backward=2 * t, exit_forward=t, baseline_forward=t)
        for s, t in zip(plan.stages, forwards, strict=True)
    ]
    count = len(stages)
    expected = execute(plan, schedule)

    program = schedule_program(
        schedule, plan, stages, [LinkTimes()] * (count - 1), resident=[10] * count, kept=[1] * count
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
