"""HybridOP with the zo stages at the head: back-propagation first, perturbed forwards in the gaps."""

import heapq

from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.schedules.actions import Action, Kind, Schedule
from lightning_hybridop.schedules.dependencies import dependencies, expected_actions
from lightning_hybridop.schedules.timeline import TimedAction, Timeline

_MOST_URGENT_FIRST = (Kind.BACKWARD, Kind.FORWARD, Kind.PERTURBED, Kind.EXIT)


def hybridop(plan: Plan) -> Schedule:
    """Return the order in which every stage would run if it always took the most urgent action at hand.

    Priority B > F > P > X, no preemption, no transfer time; a forward takes `blocks / speed`, a backward twice that.
    """
    timeline = hybridop_timeline(plan)
    return tuple(
        tuple(timed.action for timed in timeline if timed.stage == stage) for stage in range(len(plan.stages))
    )


def hybridop_timeline(plan: Plan) -> Timeline:
    """Return the event simulation behind `hybridop`, in units of one block's forward at speed 1, ordered by start.

    The bp stage `i` (from the first one) holds at most `|D_G| - i` micro-batches between forward and backward, which
    is the memory that the paper's model grants it.
    """
    stages = range(len(plan.stages))
    duration = [(stage.last - stage.first) / stage.speed for stage in plan.stages]
    room = [
        len(stages) - stage if plan.stages[stage].role == "bp" else plan.micro_batches for stage in stages
    ]
    ready: list[dict[Kind, list[tuple[tuple[int, int, int], Action]]]] = [
        {kind: [] for kind in _MOST_URGENT_FIRST} for _ in stages
    ]
    missing: dict[tuple[int, Action], int] = {}
    unlocks: dict[tuple[int, Action], list[tuple[int, Action]]] = {}
    for stage in stages:
        for action in expected_actions(plan, stage):
            before = dependencies(plan, stage, action)
            missing[stage, action] = len(before)
            for needed in before:
                unlocks.setdefault(needed, []).append((stage, action))
            if not before:
                heapq.heappush(ready[stage][action.kind], (_rank(action), action))
    idle = set(stages)
    events: list[tuple[float, int, Action]] = []
    timeline: list[TimedAction] = []
    now = 0.0
    while True:
        for stage in sorted(idle):
            for kind in _MOST_URGENT_FIRST:
                if ready[stage][kind] and (kind is not Kind.FORWARD or room[stage] > 0):
                    break
            else:
                continue
            _, action = heapq.heappop(ready[stage][kind])
            if plan.stages[stage].role == "bp":
                room[stage] += (kind is Kind.BACKWARD) - (kind is Kind.FORWARD)
            end = now + duration[stage] * (2 if kind is Kind.BACKWARD else 1)
            idle.remove(stage)
            timeline.append(TimedAction(stage=stage, action=action, start=now, end=end))
            heapq.heappush(events, (end, stage, action))
        if not events:
            return tuple(timeline)
        now = events[0][0]
        while events and events[0][0] == now:
            _, stage, action = heapq.heappop(events)
            idle.add(stage)
            for later in unlocks.get((stage, action), ()):
                missing[later] -= 1
                if missing[later] == 0:
                    heapq.heappush(ready[later[0]][later[1].kind], (_rank(later[1]), later[1]))


def _rank(action: Action) -> tuple[int, int, int]:
    """Return what orders a stage's actions of one kind: unique, so that every host builds the same schedule."""
    return (-1 if action.query is None else action.query, action.micro_batch, -action.sign)
