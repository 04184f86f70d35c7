"""Back-pressure: how far a stage may send ahead of its neighbours without any stage waiting for ever.

A stage announces the receives of its next few actions. What it was sent is taken once it has announced it; until then it
lies with the sender, who waits before it sends more than a window of messages that are not taken.
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache

from lightning_hybridop.planning.plan import PERTURBED_AHEAD as PERTURBED_AHEAD
from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.schedules import build_schedule
from lightning_hybridop.schedules.actions import Action, Kind, Schedule

RECEIVES_AHEAD = 4
"""How many actions ahead of its own a stage announces receives: enough for a transfer to run beside the computation, few
enough to bound the buffers of a stage that lags behind."""

SENDS_AHEAD = 8
"""How many messages of one link wait with their sender at most, if the schedule can do with so few."""


def source_of(plan: Plan, stage: int, action: Action) -> int | None:
    """Return the stage whose tensor an action reads; None if it reads none."""
    if action.kind is Kind.BACKWARD:
        return None if stage == len(plan.stages) - 1 else stage + 1
    if stage == 0 or (action.kind is Kind.EXIT and action.query is None):
        return None
    return stage - 1


def keeps_few_underway(plan: Plan, stage: int, action: Action) -> bool:
    """Tell whether `action` waits until the next stage has taken what it was sent `PERTURBED_AHEAD` such actions before."""
    return plan.estimator == "boundary" and stage != plan.exit_stage and action.kind is Kind.PERTURBED


@lru_cache(maxsize=256)
def sends_ahead(plan: Plan) -> int:
    """Return the window of the plan's schedule: `SENDS_AHEAD`, doubled until every stage comes to its end."""
    schedule = build_schedule(plan)
    window = SENDS_AHEAD
    # At the latest a window of all messages of a link ends this: nobody waits then.
    while not runs_to_its_end(schedule, plan, window=window):
        window *= 2
    return window


def runs_to_its_end(schedule: Schedule, plan: Plan, *, window: int) -> bool:
    """Tell whether every stage runs all its actions in order with this window on every link.

    Stages only wait for what others have done for good, so that in whatever order they go on the outcome is the same.
    """
    stages = range(len(schedule))
    place = [{action: number for number, action in enumerate(actions)} for actions in schedule]
    announced = [-1 for _ in stages]
    arrived: set[tuple[int, Action]] = set()

    def run(stage: int) -> Iterator[bool]:
        """Yield False where the stage has to wait, True behind each action."""
        sent: dict[int, list[Action]] = defaultdict(list)
        perturbed: list[Action] = []
        for number, action in enumerate(schedule[stage]):
            if keeps_few_underway(plan, stage, action):
                if len(perturbed) >= PERTURBED_AHEAD:
                    while place[stage + 1][perturbed[-PERTURBED_AHEAD]] > announced[stage + 1]:
                        yield False
                perturbed.append(action)
            announced[stage] = number + RECEIVES_AHEAD
            if source_of(plan, stage, action) is not None:
                while (stage, action) not in arrived:
                    yield False
            target = stage - 1 if action.kind is Kind.BACKWARD else stage + 1
            if target in stages and action in place[target] and source_of(plan, target, action) == stage:
                if len(sent[target]) >= window:
                    while place[target][sent[target][-window]] > announced[target]:
                        yield False
                sent[target].append(action)
                arrived.add((target, action))
            yield True

    running = {stage: run(stage) for stage in stages}
    while running:
        advanced = False
        for stage, steps in list(running.items()):
            while (went_on := next(steps, None)) is not False:
                advanced = True
                if went_on is None:
                    del running[stage]
                    break
        if not advanced:
            return False
    return True
