"""What a mini-batch consists of, what waits for what, and whether a schedule can run at all."""

from lightning_hybridop.planning.plan import PERTURBED_AHEAD as PERTURBED_AHEAD
from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.schedules.actions import Action, Kind, Schedule


class ScheduleError(ValueError):
    """A schedule that leaves work out, does it twice, or can never finish."""


def forwards(plan: Plan) -> list[Action]:
    """Return the base forwards of a mini-batch, in order of micro-batch; every stage runs them."""
    return [Action(kind=Kind.FORWARD, micro_batch=m) for m in range(plan.micro_batches)]


def perturbed_forwards(plan: Plan, stage: int) -> list[Action]:
    """Return the perturbed forwards of one stage: all stages have them, or those up to the last zo one, or none.

    They are in order of query, micro-batch and sign. With the boundary estimator all stages run them in this order
    instead: by micro-batch, group of queries that ride together and sign, but the last groups, as many as there are
    micro-batches, come first. These wait for their gradients, so that little is left to do when the last one arrives.
    """
    if plan.exit_stage is None or plan.estimator == "adjoint":
        return []
    if plan.estimator == "boundary":
        return [_in_place(plan, place) for place in range(_places(plan))] if stage <= plan.exit_stage else []
    return [
        Action(kind=Kind.PERTURBED, micro_batch=m, query=query, sign=sign)
        for query in range(plan.queries)
        for m in range(plan.micro_batches)
        for sign in _signs(plan)
    ]


def waits_for_gradient(plan: Plan, action: Action) -> bool:
    """Tell whether the last zo stage makes a perturbed hidden state before it has the gradient of its micro-batch."""
    return _place(plan, action) < plan.micro_batches * len(_signs(plan))


def exit_forwards(plan: Plan, stage: int) -> list[Action]:
    """Return the early-exit forwards of one stage: those up to the last zo stage, with the baseline on that one."""
    if plan.exit_stage is None or stage > plan.exit_stage or plan.exit_queries == 0:
        return []
    has_baseline = stage == plan.exit_stage and plan.difference != "central" and plan.exit_baseline == "exit"
    baseline = (
        [Action(kind=Kind.EXIT, micro_batch=m) for m in range(plan.micro_batches)] if has_baseline else []
    )
    return baseline + [
        Action(kind=Kind.EXIT, micro_batch=m, query=query, sign=sign)
        for query in range(plan.exit_queries)
        for m in range(plan.micro_batches)
        for sign in _signs(plan)
    ]


def backwards(plan: Plan, stage: int) -> list[Action]:
    """Return the backwards of one stage, in order of micro-batch.

    bp stages have them, and so has every zo stage with the adjoint estimator, the last zo stage with that at the boundary.
    """
    role = plan.stages[stage].role
    takes_gradient = plan.estimator == "adjoint" or (
        plan.estimator == "boundary" and stage == plan.exit_stage
    )
    if role == "frozen" or (role == "zo" and not takes_gradient):
        return []
    return [Action(kind=Kind.BACKWARD, micro_batch=m) for m in range(plan.micro_batches)]


def expected_actions(plan: Plan, stage: int) -> frozenset[Action]:
    """Return all the work that a stage has in one mini-batch."""
    return frozenset(
        forwards(plan) + perturbed_forwards(plan, stage) + exit_forwards(plan, stage) + backwards(plan, stage)
    )


def dependencies(plan: Plan, stage: int, action: Action) -> tuple[tuple[int, Action], ...]:
    """Return the (stage, action) pairs that must have ended before `action` can start on `stage`.

    Most are what it reads. With the boundary estimator each perturbed forward also waits for the one before it, on the
    last zo stage for the gradient of its micro-batch (but for those that come first), and on an earlier stage until the
    next one has taken what it was sent `PERTURBED_AHEAD` perturbed forwards before. This bounds what waits in memory.
    """
    own_forward = (stage, Action(kind=Kind.FORWARD, micro_batch=action.micro_batch))
    if action.kind is Kind.BACKWARD:
        return (own_forward,) if stage == len(plan.stages) - 1 else (own_forward, (stage + 1, action))
    if action.kind is Kind.EXIT and action.query is None:
        return (own_forward,)
    needed = [(stage - 1, action)] if stage > 0 else []
    if action.kind is Kind.PERTURBED and plan.estimator == "boundary":
        place = _place(plan, action)
        if place > 0:
            needed.append((stage, _in_place(plan, place - 1)))
        if stage == plan.exit_stage:
            needed.append(own_forward)
            if not waits_for_gradient(plan, action):
                needed.append((stage, Action(kind=Kind.BACKWARD, micro_batch=action.micro_batch)))
        elif place >= PERTURBED_AHEAD:
            needed.append((stage + 1, _in_place(plan, place - PERTURBED_AHEAD)))
    return tuple(needed)


def crossing(stage: int, action: Action, source: int) -> int:
    """Return how many hidden states or gradients `action` on `stage` is sent from the stage `source` that it waits for.

    None from a stage that only has to take what it was sent before.
    """
    if source == stage or (source > stage and action.kind is not Kind.BACKWARD):
        return 0
    return action.count


def check_schedule(schedule: Schedule, plan: Plan) -> None:
    """Check that a schedule does all work once and can be executed in order.

    Raises:
        ScheduleError: naming the stage and the action.
    """
    if len(schedule) != len(plan.stages):
        raise ScheduleError(
            f"The schedule has {len(schedule)} lists of actions, but the plan has {len(plan.stages)} stages; build it "
            "from this plan."
        )
    for stage, actions in enumerate(schedule):
        expected = expected_actions(plan, stage)
        if len(actions) != len(set(actions)):
            double = next(action for index, action in enumerate(actions) if action in actions[:index])
            raise ScheduleError(f"Stage {stage} runs {double} twice.")
        if set(actions) != expected:
            odd = min(set(actions) ^ expected, key=repr)
            raise ScheduleError(f"Stage {stage} {'lacks' if odd in expected else 'has no use for'} {odd}.")
    done: set[tuple[int, Action]] = set()
    positions = [0] * len(schedule)
    advanced = True
    while advanced:
        advanced = False
        for stage, actions in enumerate(schedule):
            while positions[stage] < len(actions) and all(
                needed in done for needed in dependencies(plan, stage, actions[positions[stage]])
            ):
                done.add((stage, actions[positions[stage]]))
                positions[stage] += 1
                advanced = True
    for stage, actions in enumerate(schedule):
        if positions[stage] < len(actions):
            raise ScheduleError(f"Stage {stage} waits for ever to run {actions[positions[stage]]}.")


def _signs(plan: Plan) -> tuple[int, ...]:
    return (1, -1) if plan.difference == "central" else (1,)


# The boundary estimator's order of perturbed forwards, as arithmetic: schedules ask for thousands of places.


def _groups(plan: Plan) -> int:
    """Return how many perturbed forwards of one sign a micro-batch has."""
    return -(-plan.queries // plan.queries_per_forward)


def _places(plan: Plan) -> int:
    return _groups(plan) * plan.micro_batches * len(_signs(plan))


def _in_place(plan: Plan, place: int) -> Action:
    """Return the perturbed forward that stands in a place."""
    signs, groups = _signs(plan), _groups(plan)
    turn, sign = divmod(place, len(signs))
    micro_batch, group = divmod((turn - plan.micro_batches) % (groups * plan.micro_batches), groups)
    query = group * plan.queries_per_forward
    count = min(plan.queries_per_forward, plan.queries - query)
    return Action(kind=Kind.PERTURBED, micro_batch=micro_batch, query=query, sign=signs[sign], count=count)


def _place(plan: Plan, action: Action) -> int:
    """Return the place of a perturbed forward."""
    assert action.query is not None
    signs, groups = _signs(plan), _groups(plan)
    turn = action.micro_batch * groups + action.query // plan.queries_per_forward + plan.micro_batches
    return turn % (groups * plan.micro_batches) * len(signs) + signs.index(action.sign)
