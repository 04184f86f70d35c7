"""An independent reading of what a schedule must do: a brute-force executor with mailboxes, and random legal plans."""

from dataclasses import dataclass, field

from hypothesis import strategies as st

from lightning_hybridop.planning.plan import Plan, ScheduleName, Stage
from lightning_hybridop.schedules.actions import Action, Kind, Schedule

Message = tuple[str, int, int | None, int]


class StuckError(AssertionError):
    """A stage waits for a message that never comes."""


@dataclass
class Execution:
    """What happened: the (start, end) of every action of every stage, and the most activations each stage held."""

    times: list[dict[Action, tuple[float, float]]]
    most_held: list[int]
    unread: list[tuple[int, Message]] = field(default_factory=list)

    @property
    def makespan(self) -> float:
        return max((end for stage in self.times for _, end in stage.values()), default=0.0)


def execute(plan: Plan, schedule: Schedule) -> Execution:
    """Run every stage's actions strictly in order, as soon as the messages they read have arrived.

    Every stage sends the hidden states it computes to the next stage, a bp stage the gradient to the bp stage before.
    Sends do not block and take no time.
    """
    stages = len(schedule)
    arrived: list[dict[Message, float]] = [{} for _ in range(stages)]
    times: list[dict[Action, tuple[float, float]]] = [{} for _ in range(stages)]
    inputs: list[set[int]] = [set() for _ in range(stages)]
    activations: list[set[int]] = [set() for _ in range(stages)]
    most_held = [0] * stages
    clock = [0.0] * stages
    position = [0] * stages
    exit_at = max((index for index, stage in enumerate(plan.stages) if stage.role == "zo"), default=-1)
    while any(position[stage] < len(schedule[stage]) for stage in range(stages)):
        before = list(position)
        for stage in range(stages):
            if position[stage] == len(schedule[stage]):
                continue
            action = schedule[stage][position[stage]]
            message = (str(action.kind), action.micro_batch, action.query, action.sign)
            role = plan.stages[stage].role
            forward_time = (plan.stages[stage].last - plan.stages[stage].first) / plan.stages[stage].speed
            start, took = clock[stage], forward_time
            if action.kind is Kind.BACKWARD:
                assert role == "bp"
                assert action.micro_batch in activations[stage], (
                    "a backward without its forward's activations"
                )
                took = 2 * forward_time
                if stage < stages - 1:
                    if message not in arrived[stage]:
                        continue
                    start = max(start, arrived[stage].pop(message))
                activations[stage].remove(action.micro_batch)
                if stage > 0 and plan.stages[stage - 1].role == "bp":
                    arrived[stage - 1][message] = start + took
            elif action.kind is Kind.EXIT and action.query is None:
                assert stage == exit_at
                assert action.micro_batch in inputs[stage], (
                    "the exit baseline reuses the input of the base forward"
                )
            else:
                if stage > 0:
                    if message not in arrived[stage]:
                        continue
                    start = max(start, arrived[stage].pop(message))
                if action.kind is Kind.FORWARD:
                    inputs[stage].add(action.micro_batch)
                    if role == "bp":
                        activations[stage].add(action.micro_batch)
                        most_held[stage] = max(most_held[stage], len(activations[stage]))
                leaves = exit_at if action.kind is Kind.EXIT else stages - 1
                if stage < leaves:
                    arrived[stage + 1][message] = start + took
            assert action not in times[stage], "the same action twice"
            times[stage][action] = (start, start + took)
            clock[stage] = start + took
            position[stage] += 1
        if position == before:
            raise StuckError(f"Stages stand at {position}.")
    unread = [(stage, message) for stage in range(stages) for message in arrived[stage]]
    return Execution(times=times, most_held=most_held, unread=unread)


def work_of(plan: Plan, stage: int) -> list[tuple[str, int, int | None, int]]:
    """Return all that a stage has to do in one mini-batch, sorted by its text."""
    roles = [stage.role for stage in plan.stages]
    signs = [+1, -1] if plan.difference == "central" else [+1]
    work: list[tuple[str, int, int | None, int]] = []
    for m in range(plan.micro_batches):
        work.append(("F", m, None, 1))
        if roles[stage] == "bp":
            work.append(("B", m, None, 1))
        if "zo" not in roles:
            continue
        exit_at = len(roles) - 1 - roles[::-1].index("zo")
        work += [("P", m, query, sign) for query in range(plan.queries) for sign in signs]
        if stage <= exit_at:
            work += [("X", m, query, sign) for query in range(plan.exit_queries) for sign in signs]
        if stage == exit_at and plan.exit_queries and signs == [+1] and plan.exit_baseline == "exit":
            work.append(("X", m, None, 1))
    return sorted(work, key=str)


def texts(schedule: Schedule) -> tuple[str, ...]:
    """Return every stage's actions in short: kind, micro-batch, query, and `-` for the second sign."""
    return tuple(" ".join(_text(action) for action in actions) for actions in schedule)


def _text(action: Action) -> str:
    query = "" if action.query is None else f".{action.query}"
    return f"{action.kind}{action.micro_batch}{query}{'-' if action.sign < 0 else ''}"


@st.composite
def plans(draw: st.DrawFn, *, schedule: ScheduleName, most_micro_batches: int = 6) -> Plan:
    """Draw a legal plan: 1 to 6 stages of uneven size and speed, zo and frozen stages in any order before bp stages."""
    head = draw(st.lists(st.sampled_from(["zo", "frozen"]), max_size=6))
    tail = draw(st.integers(0 if head else 1, 6 - len(head)))
    stages: list[Stage] = []
    for role in [*head, *["bp"] * tail]:
        first = stages[-1].last if stages else 0
        size, speed = draw(st.integers(1, 3)), draw(st.sampled_from([0.5, 1, 1.5, 4]))
        stages.append(Stage(first=first, last=first + size, role=role, speed=speed))  # type: ignore[arg-type]
    return Plan(
        blocks=stages[-1].last,
        stages=tuple(stages),
        micro_batches=draw(st.integers(1, most_micro_batches)),
        queries=draw(st.integers(0, 4)),
        exit_queries=draw(st.integers(0, 3)) if "zo" in head else 0,
        schedule=schedule,
        difference=draw(st.sampled_from(["forward", "central"])),
        exit_baseline=draw(st.sampled_from(["exit", "full"])),
    )
