"""Programs: what the simulator runs. Tasks on devices, in a fixed order, waiting for one another and for links."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lightning_hybridop.planning.costs import (
    Assignment,
    LinkTimes,
    PipelineCosts,
    StageTimes,
    layout_bytes,
    layout_times,
    waiting_bytes,
)
from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.schedules import build_schedule
from lightning_hybridop.schedules.actions import Action, Kind, Schedule
from lightning_hybridop.schedules.dependencies import crossing, dependencies
from lightning_hybridop.simulation.held import held_and_released


class ProgramError(ValueError):
    """A program that makes no sense or never ends; the message names the device and the task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """What a task waits for: the end of the task of that number.

    With a `link`, (source device, target device), data crosses it first: it keeps that direction of the link busy for
    `transfer` seconds, after all data that was ready before, and arrives `latency` seconds later.
    """

    task: int
    link: tuple[int, int] | None = None
    transfer: float = 0.0
    latency: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """An action that keeps one device busy for `seconds`.

    It takes `holds` bytes of memory when it starts and gives `releases` bytes back when it ends.
    """

    device: int
    action: Action
    seconds: float
    after: tuple[Edge, ...] = ()
    holds: float = 0.0
    releases: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Communication in which several devices take part together, such as an all-reduce.

    It stands in the order of each of its devices, starts when all of them have come to it, and takes `seconds`. They
    wait in it, and are not busy.
    """

    name: str
    devices: tuple[int, ...]
    seconds: float
    after: tuple[Edge, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Named devices, each with the numbers of the tasks it runs, in that order and without preemption.

    `resident` are the bytes that each device holds from beginning to end.

    Raises:
        ProgramError: a task is missing in the order of its device or stands there twice, an edge leads to no task, or
            a duration or a size is negative.
    """

    devices: tuple[str, ...]
    tasks: tuple[Task | Collective, ...]
    order: tuple[tuple[int, ...], ...]
    resident: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.devices) == len(self.order) == len(self.resident):
            raise ProgramError(
                f"Found {len(self.devices)} devices, {len(self.order)} orders and {len(self.resident)} sizes of "
                "resident memory, expected as many of each."
            )
        standing = {(device, number) for device, order in enumerate(self.order) for number in order}
        places = 0
        for number, task in enumerate(self.tasks):
            where = devices_of(task)
            if not where:
                raise ProgramError(f"Task {number} has no device; give it at least one.")
            places += len(where)
            for device in where:
                if (device, number) not in standing:
                    raise ProgramError(f"Task {number} is missing in the order of its device {device}.")
            sizes = (task.holds, task.releases) if isinstance(task, Task) else ()
            for value in (
                task.seconds,
                *sizes,
                *(v for edge in task.after for v in (edge.transfer, edge.latency)),
            ):
                if not 0 <= value < math.inf:
                    raise ProgramError(
                        f"Task {number}: found {value}, expected a finite number of at least 0."
                    )
            for edge in task.after:
                if not 0 <= edge.task < len(self.tasks):
                    raise ProgramError(f"Task {number} waits for task {edge.task}, which does not exist.")
        if not places == len(standing) == sum(map(len, self.order)):
            raise ProgramError("An order names a task twice, or a task that belongs to another device.")


def devices_of(task: Task | Collective) -> tuple[int, ...]:
    """Return the devices in whose orders a task stands."""
    return (task.device,) if isinstance(task, Task) else task.devices


Numbers = Mapping[tuple[int, Action], int]
"""The task number of each (device, action)."""


def assemble(
    devices: Sequence[str],
    orders: Sequence[Sequence[Action]],
    describe: Callable[[int, Action, Numbers], Task],
    *,
    resident: Sequence[float],
    collectives: Sequence[Collective] = (),
) -> Program:
    """Return the program in which each device runs the actions of its order, then the collectives it takes part in.

    `describe(device, action, numbers)` gives the task of an action; the numbers of all others are known by then.
    """
    numbers: dict[tuple[int, Action], int] = {}
    for device, actions in enumerate(orders):
        for action in actions:
            numbers[device, action] = len(numbers)
    tasks: list[Task | Collective] = [describe(device, action, numbers) for device, action in numbers]
    order = [[numbers[device, action] for action in actions] for device, actions in enumerate(orders)]
    for collective in collectives:
        for device in collective.devices:
            order[device].append(len(tasks))
        tasks.append(collective)
    return Program(
        devices=tuple(devices), tasks=tuple(tasks), order=tuple(map(tuple, order)), resident=tuple(resident)
    )


def schedule_program(
    schedule: Schedule,
    plan: Plan,
    stages: Sequence[StageTimes],
    links: Sequence[LinkTimes],
    *,
    resident: Sequence[float],
    kept: Sequence[float],
    multiplied: float = 0.0,
    devices: Sequence[str] | None = None,
) -> Program:
    """Return the program of a schedule: one device per stage, `links[i]` between stages i and i + 1.

    `kept` are the bytes that one micro-batch takes on each stage, held from the start of F to the end of B where there
    is one, `multiplied` those of a hidden state that the boundary estimator multiplies; `resident` those of weights.
    Without names devices are called by their stages.
    """
    memory = [
        held_and_released(plan, stage, actions, kept=kept[stage], multiplied=multiplied)
        for stage, actions in enumerate(schedule)
    ]

    def describe(stage: int, action: Action, numbers: Numbers) -> Task:
        holds, releases = memory[stage].get(action, (0.0, 0.0))
        return Task(
            device=stage,
            action=action,
            seconds=action_seconds(stages[stage], action),
            after=tuple(
                _edge(numbers[needed], needed[0], stage, links, crossing(stage, action, needed[0]))
                for needed in dependencies(plan, stage, action)
            ),
            holds=holds,
            releases=releases,
        )

    names = devices or [f"stage {stage}" for stage in range(len(stages))]
    return assemble(names, schedule, describe, resident=resident)


def layout_program(costs: PipelineCosts, layout: Sequence[Assignment], plan: Plan) -> Program:
    """Return the program of the plan's schedule on the devices of a layout, with the times and sizes of `costs`."""
    stages, links = layout_times(costs, layout)
    held = layout_bytes(costs, layout)
    # What is on its way from a zo stage to the next one: as much at all times.
    sent = waiting_bytes(costs, exit_stage=False) if plan.estimator == "boundary" else 0.0
    on_its_way = [sent if index < (plan.exit_stage or 0) else 0.0 for index in range(len(layout))]
    return schedule_program(
        build_schedule(plan),
        plan,
        stages,
        links,
        resident=[stage.resident + size for stage, size in zip(held, on_its_way, strict=True)],
        kept=[stage.kept for stage in held],
        multiplied=costs.float32_bytes,
        devices=[costs.devices[part.device].name for part in layout],
    )


def action_seconds(stage: StageTimes, action: Action) -> float:
    """Return how long an action keeps a stage busy."""
    if action.kind is Kind.BACKWARD:
        return stage.backward
    if action.kind is Kind.EXIT:
        return stage.baseline_forward if action.query is None else stage.exit_forward
    return action.count * stage.forward


def _edge(task: int, source: int, target: int, links: Sequence[LinkTimes], hidden_states: int) -> Edge:
    """Return the edge between two stages' tasks; without hidden states to carry, the target only waits for the source."""
    if hidden_states == 0:
        return Edge(task=task)
    link = links[min(source, target)]
    seconds = hidden_states * (link.transfer if source < target else link.back)
    return Edge(task=task, link=(source, target), transfer=seconds, latency=link.latency)
