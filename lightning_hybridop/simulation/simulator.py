"""The simulator: runs a program in simulated time."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hybridop.schedules.timeline import TimedAction, Timeline
from lightning_hybridop.simulation.program import Collective, Program, ProgramError, Task, devices_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """What a device draws while it is busy and while it is idle, in W; None where the latter is unknown."""

    busy_w: float
    idle_w: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Data on its way to task number `task`: the link is busy from `start` to `end`, the data is there at `arrival`."""

    task: int
    link: tuple[int, int]
    start: float
    end: float
    arrival: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCollective:
    """A collective of several devices from `start`, when the last one came to it, to `end`."""

    name: str
    devices: tuple[int, ...]
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigures:
    """One device in one mini-batch: seconds busy and idle, the most bytes held at a time, and energy in J.

    Waiting in a collective is idle. Energy is None where the power is unknown; where only the idle power is, the
    busy power counts for the whole makespan and `energy_is_bound` says that the energy is an upper bound.
    """

    name: str
    busy: float
    idle: float
    memory: float
    energy: float | None = None
    energy_is_bound: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What a program does: its actions (`stage` is the number of the device), transfers and collectives, by start.

    `makespan` is in seconds and includes collectives; `comu_ti` is busy time over all devices / (devices x makespan).
    """

    timeline: Timeline
    transfers: tuple[Transfer, ...]
    collectives: tuple[TimedCollective, ...]
    devices: tuple[DeviceFigures, ...]
    makespan: float

    @property
    def comu_ti(self) -> float:
        """Compute utilisation; 0 for an empty program."""
        if self.makespan == 0.0:
            return 0.0
        return sum(device.busy for device in self.devices) / (len(self.devices) * self.makespan)

    @property
    def energy(self) -> float | None:
        """Energy of all devices in J; None where that of any is unknown."""
        known = [device.energy for device in self.devices if device.energy is not None]
        return sum(known) if len(known) == len(self.devices) else None

    @property
    def energy_is_bound(self) -> bool:
        """Whether the energy is an upper bound, because the idle power of a device is unknown."""
        return any(device.energy_is_bound for device in self.devices)


def simulate(program: Program, *, power: Sequence[Power | None] | None = None) -> Simulation:
    """Run a program: each device takes its tasks in order, each as soon as the device is free and its data is there.

    Sending does not block the sender. A link carries one transfer at a time in each direction, in the order in which
    data becomes ready, then of the numbers of the tasks that wait for it. `power` is that of each device.

    Raises:
        ProgramError: tasks wait for one another in a circle.
    """
    starts, ends, transfers = _run(program)
    timeline, collectives = [], []
    for number in sorted(range(len(starts)), key=lambda number: (starts[number], number)):
        task, start, end = program.tasks[number], starts[number], ends[number]
        if isinstance(task, Task):
            timeline.append(TimedAction(stage=task.device, action=task.action, start=start, end=end))
        else:
            collectives.append(TimedCollective(name=task.name, devices=task.devices, start=start, end=end))
    makespan = max(ends, default=0.0)
    return Simulation(
        timeline=tuple(timeline),
        transfers=tuple(transfers),
        collectives=tuple(collectives),
        devices=tuple(
            _figures(program, device, makespan, power[device] if power else None)
            for device in range(len(program.devices))
        ),
        makespan=makespan,
    )


def _run(program: Program) -> tuple[list[float], list[float], list[Transfer]]:
    """Return the start and the end of every task, and the transfers in the order in which they start."""
    tasks, order = program.tasks, program.order
    # A task waits for its data and for each of its devices to come to it.
    missing = [len(task.after) + len(devices_of(task)) for task in tasks]
    starts = [0.0] * len(tasks)
    ends = [-1.0] * len(tasks)
    waiting: list[list[tuple[int, int]]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for position, edge in enumerate(task.after):
            waiting[edge.task].append((number, position))
    positions = [0] * len(order)
    link_free: dict[tuple[int, int], float] = {}
    events: list[tuple[float, int]] = []
    transfers: list[Transfer] = []

    def ready(number: int, time: float) -> None:
        """One of the things that a task waits for is there."""
        missing[number] -= 1
        if time > starts[number]:
            starts[number] = time
        if missing[number] == 0:
            heapq.heappush(events, (starts[number] + tasks[number].seconds, number))

    for numbers in order:
        if numbers:
            ready(numbers[0], 0.0)
    while events:
        now = events[0][0]
        requests: list[tuple[int, int]] = []
        while events and events[0][0] == now:
            _, done = heapq.heappop(events)
            ends[done] = now
            requests += waiting[done]
            for device in devices_of(tasks[done]):
                positions[device] += 1
                if positions[device] < len(order[device]):
                    ready(order[device][positions[device]], now)
        for number, position in sorted(requests):
            edge = tasks[number].after[position]
            if edge.link is None:
                ready(number, now)
                continue
            start = max(now, link_free.get(edge.link, 0.0))
            end = start + edge.transfer
            link_free[edge.link] = end
            arrival = end + edge.latency
            transfers.append(Transfer(task=number, link=edge.link, start=start, end=end, arrival=arrival))
            ready(number, arrival)
    for device, numbers in enumerate(order):
        if positions[device] < len(numbers):
            raise ProgramError(_stuck(program, device, numbers[positions[device]], ends))
    return starts, ends, sorted(transfers, key=lambda transfer: transfer.start)


def _stuck(program: Program, device: int, number: int, ends: Sequence[float]) -> str:
    task = program.tasks[number]
    what = (
        task.name
        if isinstance(task, Collective)
        else f"{task.action.kind} of micro-batch {task.action.micro_batch}"
    )
    never = next((edge.task for edge in task.after if ends[edge.task] < 0), None)
    if never is None:
        cause = "its other devices never come to it"
    else:
        names = ", ".join(program.devices[other] for other in devices_of(program.tasks[never]))
        cause = f"task {never} on {names} never ends"
    return (
        f"Device {program.devices[device]} waits for ever to run task {number} ({what}): {cause}; change the order of "
        "its tasks."
    )


def _figures(program: Program, device: int, makespan: float, power: Power | None) -> DeviceFigures:
    held = most = program.resident[device]
    busy = 0.0
    for number in program.order[device]:
        task = program.tasks[number]
        if isinstance(task, Task):
            busy += task.seconds
            held += task.holds
            most = max(most, held)
            held -= task.releases
    idle = makespan - busy
    energy, bound = None, False
    if power is not None:
        bound = power.idle_w is None
        energy = power.busy_w * busy + (power.busy_w if power.idle_w is None else power.idle_w) * idle
    return DeviceFigures(
        name=program.devices[device],
        busy=busy,
        idle=idle,
        memory=most,
        energy=energy,
        energy_is_bound=bound,
    )
