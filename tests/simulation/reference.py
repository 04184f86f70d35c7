"""The simulator once more, slowly and in another way, and random programs for both."""

from hypothesis import strategies as st

from lightning_hybridop.schedules.actions import Action, Kind
from lightning_hybridop.simulation.program import Collective, Edge, Program, Task


def times_of(program: Program) -> tuple[list[float], list[float]]:
    """Return start and end of every task: recompute all of them from one another until nothing changes.

    Holds for tasks of positive duration: the earliest wrong time gets later or right in every round.
    """
    count = len(program.tasks)
    starts, ends = [0.0] * count, [task.seconds for task in program.tasks]
    for _ in range(2 * count + 2):
        arrivals = arrivals_of(program, ends)
        new = []
        for number, task in enumerate(program.tasks):
            gates = [arrivals[number, position] for position in range(len(task.after))]
            for order in program.order:
                if number in order and order.index(number) > 0:
                    gates.append(ends[order[order.index(number) - 1]])
            new.append(max(gates, default=0.0))
        if new == starts:
            return starts, ends
        starts = new
        ends = [start + task.seconds for start, task in zip(starts, program.tasks, strict=True)]
    raise AssertionError("never settles")


def arrivals_of(program: Program, ends: list[float]) -> dict[tuple[int, int], float]:
    """Return when the data of each edge, named by its task and its place there, arrives."""
    arrivals: dict[tuple[int, int], float] = {}
    queues: dict[tuple[int, int], list[tuple[float, int, int]]] = {}
    for number, task in enumerate(program.tasks):
        for position, edge in enumerate(task.after):
            arrivals[number, position] = ends[edge.task]
            if edge.link is not None:
                queues.setdefault(edge.link, []).append((ends[edge.task], number, position))
    for queue in queues.values():
        clock = 0.0
        for ready, number, position in sorted(queue):
            edge = program.tasks[number].after[position]
            clock = max(clock, ready) + edge.transfer
            arrivals[number, position] = clock + edge.latency
    return arrivals


def critical_path(program: Program) -> float:
    """Return the longest chain of tasks and arrivals, as if every device and link could do everything at once."""
    longest: dict[int, float] = {}

    def end(number: int) -> float:
        if number not in longest:
            task = program.tasks[number]
            before = [end(edge.task) + edge.transfer + edge.latency for edge in task.after]
            longest[number] = max(before, default=0.0) + task.seconds
        return longest[number]

    return max((end(number) for number in range(len(program.tasks))), default=0.0)


def most_memory(program: Program, device: int, starts: list[float], ends: list[float]) -> float:
    """Return the most bytes held on a device by a replay of all that happens there, in order of time."""
    events = []
    for number in program.order[device]:
        task = program.tasks[number]
        if isinstance(task, Task):
            events += [(starts[number], 1, task.holds), (ends[number], 0, -task.releases)]
    held = [program.resident[device]]
    for _, _, change in sorted(events):
        held.append(held[-1] + change)
    return max(held)


@st.composite
def programs(draw: st.DrawFn, *, most_tasks: int = 14) -> Program:
    """Draw a program that can finish: tasks and collectives with edges to earlier ones, numbered at random."""
    devices = draw(st.integers(1, 4))
    count = draw(st.integers(0, most_tasks))
    numbers = draw(st.permutations(range(count)))
    seconds = st.integers(1, 4).map(float)
    drawn: dict[int, Task | Collective] = {}
    order: list[list[int]] = [[] for _ in range(devices)]
    for place in range(count):
        after = []
        for before in draw(st.sets(st.integers(0, place - 1), max_size=3)) if place else ():
            link = draw(st.none() | st.tuples(st.integers(0, devices - 1), st.integers(0, devices - 1)))
            after.append(
                Edge(
                    task=numbers[before],
                    link=link,
                    transfer=float(draw(st.integers(0, 3))) if link else 0.0,
                    latency=float(draw(st.integers(0, 2))) if link else 0.0,
                )
            )
        members: tuple[int, ...]
        if draw(st.integers(0, 5)) == 0:
            members = tuple(sorted(draw(st.sets(st.integers(0, devices - 1), min_size=1))))
            drawn[numbers[place]] = Collective(
                name="all-reduce", devices=members, seconds=draw(seconds), after=tuple(after)
            )
        else:
            members = (draw(st.integers(0, devices - 1)),)
            drawn[numbers[place]] = Task(
                device=members[0],
                action=Action(kind=draw(st.sampled_from(Kind)), micro_batch=place),
                seconds=draw(seconds),
                after=tuple(after),
                holds=float(draw(st.integers(0, 3))),
                releases=float(draw(st.integers(0, 3))),
            )
        for device in members:
            order[device].append(numbers[place])
    return Program(
        devices=tuple(f"device-{device}" for device in range(devices)),
        tasks=tuple(drawn[number] for number in range(count)),
        order=tuple(map(tuple, order)),
        resident=tuple(float(draw(st.integers(0, 9))) for _ in range(devices)),
    )
