"""An independent reading of what a schedule must do: a brute-force executor with mailboxes, and random legal plans."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from lightning_hybridop.planning.plan import Estimator, Plan, ScheduleName, Stage
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


def nominal(plan: Plan, stage: int, action: Action) -> float:
    """Return how long an action takes by the plan; a zo stage that only multiplies with a gradient needs no time."""
    forward = (plan.stages[stage].last - plan.stages[stage].first) / plan.stages[stage].speed
    if action.kind is Kind.BACKWARD:
        return 0.0 if plan.estimator == "boundary" and plan.stages[stage].role == "zo" else 2 * forward
    return forward * action.count


def execute(
    plan: Plan, schedule: Schedule, took: Callable[[Plan, int, Action], float] = nominal
) -> Execution:
    """Run every stage's actions strictly in order, as soon as the messages they read have arrived.

    Every stage sends the hidden states it computes to the next stage, one that goes back a gradient to the one before if
    that has a use for it. Sends do not block and take no time, but with the boundary estimator a perturbed forward waits
    until the next stage is done with the eighth one before it.
    """
    stages = len(schedule)
    roles = [stage.role for stage in plan.stages]
    arrived: list[dict[Message, float]] = [{} for _ in range(stages)]
    times: list[dict[Action, tuple[float, float]]] = [{} for _ in range(stages)]
    inputs: list[set[int]] = [set() for _ in range(stages)]
    activations: list[set[int]] = [set() for _ in range(stages)]
    most_held = [0] * stages
    clock = [0.0] * stages
    position = [0] * stages
    exit_at = max((index for index, role in enumerate(roles) if role == "zo"), default=-1)
    goes_back = [role == "bp" or (role == "zo" and plan.estimator == "adjoint") for role in roles]
    multiplies_at = exit_at if plan.estimator == "boundary" else -1
    ends_at = {Kind.EXIT: exit_at, Kind.PERTURBED: stages - 1, Kind.FORWARD: stages - 1}
    if plan.estimator == "boundary":
        ends_at[Kind.PERTURBED] = exit_at
    queue = perturbed_order(schedule[exit_at], micro_batches=plan.micro_batches) if exit_at >= 0 else []
    while any(position[stage] < len(schedule[stage]) for stage in range(stages)):
        before = list(position)
        for stage in range(stages):
            if position[stage] == len(schedule[stage]):
                continue
            action = schedule[stage][position[stage]]
            message = (str(action.kind), action.micro_batch, action.query, action.sign)
            start, seconds = clock[stage], took(plan, stage, action)
            if action.kind is Kind.PERTURBED and plan.estimator == "boundary" and stage < exit_at:
                place = queue.index(action) - 8
                if place >= 0:
                    if queue[place] not in times[stage + 1]:
                        continue
                    start = max(start, times[stage + 1][queue[place]][1])
            if action.kind is Kind.BACKWARD:
                forwarded = inputs[stage] if stage == multiplies_at else activations[stage]
                assert action.micro_batch in forwarded, "a backward without its forward's activations"
                if stage < stages - 1 and message not in arrived[stage]:
                    continue
                start = max(start, arrived[stage].pop(message, 0.0))
                activations[stage].discard(action.micro_batch)
                if stage > 0 and (goes_back[stage - 1] or stage - 1 == multiplies_at):
                    arrived[stage - 1][message] = start + seconds
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
                    if goes_back[stage]:
                        activations[stage].add(action.micro_batch)
                        most_held[stage] = max(most_held[stage], len(activations[stage]))
                if stage < ends_at[action.kind]:
                    arrived[stage + 1][message] = start + seconds
            assert action not in times[stage], "the same action twice"
            times[stage][action] = (start, start + seconds)
            clock[stage] = start + seconds
            position[stage] += 1
        if position == before:
            raise StuckError(f"Stages stand at {position}.")
    unread = [(stage, message) for stage in range(stages) for message in arrived[stage]]
    return Execution(times=times, most_held=most_held, unread=unread)


def perturbed_order(actions: Sequence[Action], *, micro_batches: int) -> list[Action]:
    """Return the perturbed forwards among the actions as the boundary estimator runs them.

    By micro-batch and query, but as many queries (or groups of them) as there are micro-batches are taken from the end
    and come first.
    """
    perturbed = [action for action in actions if action.kind is Kind.PERTURBED]
    perturbed.sort(key=lambda action: (action.micro_batch, action.query, -action.sign))
    first = micro_batches * len({action.sign for action in perturbed})
    return perturbed[len(perturbed) - first :] + perturbed[: len(perturbed) - first]


Work = tuple[str, int, int | None, int, int]


def work_of(plan: Plan, stage: int) -> list[Work]:
    """Return all that a stage has to do in one mini-batch, sorted by its text: kind, micro-batch, query, sign, count."""
    roles = [stage.role for stage in plan.stages]
    signs = [+1, -1] if plan.difference == "central" else [+1]
    exit_at = len(roles) - 1 - roles[::-1].index("zo") if "zo" in roles else -1
    last_perturbed = {"loss": len(roles) - 1, "boundary": exit_at, "adjoint": -1}[plan.estimator]
    together = plan.queries_per_forward
    work: list[Work] = []
    for m in range(plan.micro_batches):
        work.append(("F", m, None, 1, 1))
        takes_gradient = {
            "loss": [],
            "boundary": [exit_at],
            "adjoint": [i for i, r in enumerate(roles) if r == "zo"],
        }
        if roles[stage] == "bp" or stage in takes_gradient[plan.estimator]:
            work.append(("B", m, None, 1, 1))
        if "zo" not in roles:
            continue
        if stage <= last_perturbed:
            for first in range(0, plan.queries, together):
                work += [("P", m, first, sign, min(together, plan.queries - first)) for sign in signs]
        if stage <= exit_at:
            work += [("X", m, query, sign, 1) for query in range(plan.exit_queries) for sign in signs]
        if stage == exit_at and plan.exit_queries and signs == [+1] and plan.exit_baseline == "exit":
            work.append(("X", m, None, 1, 1))
    return sorted(work, key=str)


def texts(schedule: Schedule) -> tuple[str, ...]:
    """Return every stage's actions in short: kind, micro-batch, query, and `-` for the second sign."""
    return tuple(" ".join(_text(action) for action in actions) for actions in schedule)


def _text(action: Action) -> str:
    query = "" if action.query is None else f".{action.query}"
    return f"{action.kind}{action.micro_batch}{query}{'-' if action.sign < 0 else ''}"


@st.composite
def plans(
    draw: st.DrawFn,
    *,
    schedule: ScheduleName,
    most_micro_batches: int = 6,
    estimators: Sequence[Estimator] = ("loss", "boundary", "adjoint"),
) -> Plan:
    """Draw a legal plan: 1 to 6 stages of uneven size and speed, zo and frozen stages in any order before bp stages.

    The boundary and the adjoint estimator have frozen stages before all zo stages, and a bp stage behind these.
    """
    estimator = draw(st.sampled_from(estimators))
    head = draw(st.lists(st.sampled_from(["zo", "frozen"]), max_size=6 if estimator == "loss" else 5))
    has_zo = "zo" in head
    if estimator != "loss" and has_zo:
        head = sorted(head)
    needs_bp = not head or (estimator != "loss" and has_zo)
    tail = draw(st.integers(1 if needs_bp else 0, 6 - len(head)))
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
        exit_queries=draw(st.integers(0, 3)) if has_zo and estimator != "adjoint" else 0,
        estimator=estimator,
        queries_per_forward=draw(st.integers(1, 3)) if estimator == "boundary" else 1,
        schedule=schedule,
        difference=draw(st.sampled_from(["forward", "central", "antithetic"])),
        exit_baseline=draw(st.sampled_from(["exit", "full", "running"])),
    )
