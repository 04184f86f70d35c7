"""HybridOP with the zo stages at the head: back-propagation first, perturbed forwards in the gaps."""

import heapq

from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.schedules.actions import Action, Kind, Schedule
from lightning_hybridop.schedules.dependencies import crossing, dependencies, expected_actions
from lightning_hybridop.schedules.timeline import TimedAction, Timeline

_MOST_URGENT_FIRST = (Kind.BACKWARD, Kind.FORWARD, Kind.PERTURBED, Kind.EXIT)


def hybridop(plan: Plan) -> Schedule:
    """Return the order in which every stage would run if it always took the most urgent action at hand.

    Priority B > F > P > X, no preemption; actions and transfers take the relative times of the plan's stages.
    """
    timeline = hybridop_timeline(plan)
    return tuple(
        tuple(timed.action for timed in timeline if timed.stage == stage) for stage in range(len(plan.stages))
    )


def hybridop_timeline(plan: Plan) -> Timeline:
    """Return the event simulation behind `hybridop`, in units of one block's forward at speed 1, ordered by start.

    A transfer keeps its direction of the link busy until it arrives; others queue behind it. The bp stage `i` (from the
    first one) holds at most `|D_G| - i` micro-batches between forward and backward, which is the memory that the paper's
    model grants it. With the boundary estimator what a zo stage does with a gradient takes no time.
    """
    stages = range(len(plan.stages))
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
    link_free: dict[tuple[int, int], float] = {}
    # When, whether something arrives (rather than ends), at which stage, its rank among all, and what.
    events: list[tuple[float, bool, int, tuple[str, int, int, int], Action]] = []
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
            end = now + _duration(plan, stage, action)
            idle.remove(stage)
            timeline.append(TimedAction(stage=stage, action=action, start=now, end=end))
            heapq.heappush(events, (end, False, stage, (kind.value, *_rank(action)), action))
        if not events:
            return tuple(timeline)
        now = events[0][0]
        while events and events[0][0] == now:
            _, arrives, stage, _, action = heapq.heappop(events)
            if arrives:
                unlocked = [(stage, action)]
            else:
                idle.add(stage)
                unlocked = []
                for target, later in unlocks.get((stage, action), ()):
                    transfer = plan.stages[min(stage, target)].transfer * crossing(target, later, stage)
                    if transfer == 0.0:
                        unlocked.append((target, later))
                        continue
                    arrival = max(now, link_free.get((stage, target), 0.0)) + transfer
                    link_free[stage, target] = arrival
                    heapq.heappush(events, (arrival, True, target, (later.kind.value, *_rank(later)), later))
            for target, later in unlocked:
                missing[target, later] -= 1
                if missing[target, later] == 0:
                    heapq.heappush(ready[target][later.kind], (_rank(later), later))


def _duration(plan: Plan, stage: int, action: Action) -> float:
    if action.kind is not Kind.BACKWARD:
        return plan.stages[stage].forward_time * action.count
    if plan.stages[stage].role == "zo" and plan.estimator == "boundary":
        return 0.0
    return plan.stages[stage].forward_time * plan.stages[stage].backward


def _rank(action: Action) -> tuple[int, int, int]:
    """Return what orders a stage's actions of one kind: unique, so that every host builds the same schedule."""
    return (-1 if action.query is None else action.query, action.micro_batch, -action.sign)
