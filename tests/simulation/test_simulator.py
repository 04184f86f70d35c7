import time
from dataclasses import replace

import pytest
from hypothesis import given, settings

from lightning_hybridop.planning.costs import LinkTimes, StageTimes
from lightning_hybridop.planning.plan import Plan, Stage, even_plan
from lightning_hybridop.schedules import build_schedule
from lightning_hybridop.schedules.actions import Action, Kind
from lightning_hybridop.schedules.timeline import busy_time, comu_ti
from lightning_hybridop.simulation.program import (
    Collective,
    Edge,
    Program,
    ProgramError,
    Task,
    schedule_program,
)
from lightning_hybridop.simulation.simulator import (
    DeviceFigures,
    Power,
    TimedCollective,
    Transfer,
    simulate,
)
from tests.simulation.reference import critical_path, most_memory, programs, times_of

FORWARD = Action(kind=Kind.FORWARD, micro_batch=0)


def program(tasks: list[Task | Collective], order: list[list[int]]) -> Program:
    return Program(
        devices=tuple(f"device-{index}" for index in range(len(order))),
        tasks=tuple(tasks),
        order=tuple(map(tuple, order)),
        resident=(0.0,) * len(order),
    )


def task(device: int, seconds: float, *after: Edge, **memory: float) -> Task:
    return Task(device=device, action=FORWARD, seconds=seconds, after=after, **memory)


@given(programs())
@settings(max_examples=300, deadline=None)
def test_equals_a_slow_computation_of_another_kind(given_program: Program) -> None:
    starts, ends = times_of(given_program)

    simulation = simulate(given_program)

    timed = sorted((t.stage, t.action.micro_batch, t.start, t.end) for t in simulation.timeline)
    expected = [
        (each.device, each.action.micro_batch, starts[number], ends[number])
        for number, each in enumerate(given_program.tasks)
        if isinstance(each, Task)
    ]
    assert timed == sorted(expected)
    together = [
        (each.devices, starts[number], ends[number])
        for number, each in enumerate(given_program.tasks)
        if isinstance(each, Collective)
    ]
    assert sorted((c.devices, c.start, c.end) for c in simulation.collectives) == sorted(together)
    assert simulation.makespan == max(ends, default=0.0)
    for device, figures in enumerate(simulation.devices):
        assert figures.memory == most_memory(given_program, device, starts, ends)


@given(programs())
@settings(max_examples=100, deadline=None)
def test_laws(given_program: Program) -> None:
    simulation = simulate(given_program)

    assert simulation.makespan >= critical_path(given_program)
    for device, figures in enumerate(simulation.devices):
        assert figures.busy == busy_time(simulation.timeline, device)
        assert figures.busy <= simulation.makespan
        assert figures.busy + figures.idle == pytest.approx(simulation.makespan)
    assert 0 <= simulation.comu_ti <= 1
    assert [t.start for t in simulation.timeline] == sorted(t.start for t in simulation.timeline)
    assert [t.start for t in simulation.transfers] == sorted(t.start for t in simulation.transfers)
    edges = [edge for each in given_program.tasks for edge in each.after if edge.link is not None]
    assert len(simulation.transfers) == len(edges)
    assert simulate(given_program) == simulation


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
ZO, BP = StageTimes(role="zo", forward=2), StageTimes(role="bp", forward=1, backward=2)
FREE = LinkTimes()


@pytest.mark.parametrize(
    ("queries", "expected"), [(1, 23), (2, 28), (3, 36), (4, 44), (6, 60), (12, 108), (20, 172)]
)
def test_makespan_with_two_zo_and_two_bp_stages(queries: int, expected: float) -> None:
    plan = replace(TWO_ZO_TWO_BP, queries=queries)
    found = schedule_program(
        build_schedule(plan), plan, [ZO, ZO, BP, BP], [FREE] * 3, resident=[0] * 4, kept=[1] * 4
    )

    simulation = simulate(found)

    assert simulation.makespan == expected
    assert simulation.comu_ti == comu_ti(simulation.timeline, 4)
    assert [device.memory for device in simulation.devices] == [0, 0, 2, 1]


@pytest.mark.parametrize(("forwards", "micro_batches", "expected"), [([3, 3, 1, 1], 4, 51), ([4, 4], 2, 36)])
def test_makespan_of_gpipe(forwards: list[float], micro_batches: int, expected: float) -> None:
    stages = [StageTimes(role="bp", forward=t, backward=2 * t) for t in forwards]
    plan = even_plan(
        blocks=len(stages), stages=len(stages), micro_batches=micro_batches, queries=0, schedule="gpipe"
    )
    links = [FREE] * (len(stages) - 1)
    found = schedule_program(
        build_schedule(plan), plan, stages, links, resident=[0] * len(stages), kept=[1] * len(stages)
    )

    assert simulate(found).makespan == expected


def test_a_link_carries_one_transfer_at_a_time_in_each_direction() -> None:
    # Tasks 0 and 1 end at 1 and 2, and each sends 3 seconds' worth to device 1; device 1 sends one the other way.
    there, back = (0, 1), (1, 0)
    simulation = simulate(
        program(
            [
                task(0, 1),
                task(0, 1),
                task(1, 1),
                task(1, 1, Edge(task=0, link=there, transfer=3, latency=0.5)),
                task(1, 1, Edge(task=1, link=there, transfer=3, latency=0.5)),
                task(0, 1, Edge(task=2, link=back, transfer=3, latency=0.5)),
            ],
            [[0, 1, 5], [2, 3, 4]],
        )
    )

    assert set(simulation.transfers) == {
        Transfer(task=3, link=there, start=1, end=4, arrival=4.5),
        Transfer(task=4, link=there, start=4, end=7, arrival=7.5),
        Transfer(task=5, link=back, start=1, end=4, arrival=4.5),
    }
    assert simulation.makespan == 8.5


def test_what_is_ready_at_the_same_time_goes_in_order_of_the_waiting_tasks() -> None:
    link = (0, 1)
    simulation = simulate(
        program(
            [
                task(1, 1, Edge(task=2, link=link, transfer=2)),
                task(1, 1, Edge(task=2, link=link, transfer=5)),
                task(0, 1),
            ],
            [[2], [1, 0]],
        )
    )

    # Task 0 comes behind task 1 on its device, but its data goes first.
    assert [(transfer.task, transfer.start) for transfer in simulation.transfers] == [(0, 1), (1, 3)]
    assert simulation.makespan == 10


def test_so_does_what_comes_from_different_tasks() -> None:
    link = (0, 2)
    simulation = simulate(
        program(
            [
                task(0, 1),
                task(1, 1),
                task(2, 1, Edge(task=1, link=link, transfer=2)),
                task(2, 1, Edge(task=0, link=link, transfer=5)),
            ],
            [[0], [1], [2, 3]],
        )
    )

    assert [(transfer.task, transfer.start) for transfer in simulation.transfers] == [(2, 1), (3, 3)]


def test_sending_does_not_block_the_sender() -> None:
    simulation = simulate(
        program([task(0, 1), task(0, 1), task(1, 1, Edge(task=0, link=(0, 1), transfer=50))], [[0, 1], [2]])
    )

    assert [t.end for t in simulation.timeline if t.stage == 0] == [1, 2]


def test_a_collective_waits_for_all_and_keeps_no_one_busy() -> None:
    simulation = simulate(
        program(
            [task(0, 1), task(1, 4), Collective(name="all-reduce", devices=(0, 1), seconds=3), task(0, 1)],
            [[0, 2, 3], [1, 2]],
        )
    )

    assert simulation.collectives == (TimedCollective(name="all-reduce", devices=(0, 1), start=4, end=7),)
    assert [(device.busy, device.idle) for device in simulation.devices] == [(2, 6), (4, 4)]
    assert simulation.makespan == 8
    assert simulation.comu_ti == 6 / 16


def test_the_makespan_includes_a_collective_at_the_end() -> None:
    simulation = simulate(
        program([task(0, 1), Collective(name="all-reduce", devices=(0,), seconds=3)], [[0, 1]])
    )

    assert simulation.makespan == 4


def test_memory_is_taken_at_the_start_and_given_back_at_the_end() -> None:
    found = program(
        [task(0, 1, holds=5), task(0, 1, holds=4, releases=9), task(0, 1, holds=7, releases=7)], [[0, 1, 2]]
    )
    with_weights = replace(found, resident=(100.0,))

    assert simulate(with_weights).devices[0].memory == 109


def test_energy() -> None:
    found = program([task(0, 1), task(1, 4)], [[0], [1]])

    known = simulate(found, power=[Power(busy_w=10, idle_w=2), Power(busy_w=20, idle_w=5)])
    bound = simulate(found, power=[Power(busy_w=10), Power(busy_w=20, idle_w=5)])
    unknown = simulate(found, power=[None, Power(busy_w=20, idle_w=5)])

    assert (known.energy, known.energy_is_bound) == (1 * 10 + 3 * 2 + 4 * 20, False)
    assert (bound.energy, bound.energy_is_bound) == (4 * 10 + 4 * 20, True)
    assert (unknown.energy, unknown.energy_is_bound) == (None, False)
    assert [device.energy for device in unknown.devices] == [None, 80]
    assert simulate(found).devices[0] == DeviceFigures(name="device-0", busy=1, idle=3, memory=0)


def test_tasks_that_wait_in_a_circle_are_named() -> None:
    found = program(
        [task(0, 1, Edge(task=3)), task(0, 1), task(1, 1, Edge(task=1)), task(1, 1)], [[0, 1], [2, 3]]
    )

    with pytest.raises(
        ProgramError,
        match=r"^Device device-0 waits for ever to run task 0 \(F of micro-batch 0\): task 3 on device-1 never ends; "
        r"change the order of its tasks\.$",
    ):
        simulate(found)


def test_collectives_in_different_orders_are_named() -> None:
    first, second = (Collective(name=name, devices=(0, 1), seconds=1) for name in ("first", "second"))

    with pytest.raises(ProgramError, match=r"task 0 \(first\): its other devices never come to it"):
        simulate(program([first, second], [[0, 1], [1, 0]]))


def test_nothing_to_do() -> None:
    simulation = simulate(program([], [[], []]))

    assert (simulation.makespan, simulation.comu_ti, simulation.timeline) == (0, 0, ())


def test_700_tasks_take_milliseconds() -> None:
    plan = even_plan(blocks=6, stages=6, zo_stages=3, micro_batches=8, queries=13)
    stages = [ZO] * 3 + [BP] * 3
    links = [LinkTimes(transfer=0.1, latency=0.01)] * 5
    found = schedule_program(build_schedule(plan), plan, stages, links, resident=[0] * 6, kept=[1] * 6)
    assert len(found.tasks) == 6 * 8 * 14 + 3 * 8

    fastest = min(_seconds_of(found) for _ in range(5))

    # 3 to 6 ms; the limit leaves room for a machine that is busy with other things.
    assert fastest < 0.05


def _seconds_of(found: Program) -> float:
    start = time.perf_counter()
    simulate(found)
    return time.perf_counter() - start
