"""What a mini-batch consists of, what waits for what, and whether a schedule can run at all."""

from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.schedules.actions import Action, Kind, Schedule


class ScheduleError(ValueError):
    """A schedule that leaves work out, does it twice, or can never finish."""


def forwards(plan: Plan) -> list[Action]:
    """Return the base forwards of a mini-batch, in order of micro-batch; every stage runs them."""
    return [Action(kind=Kind.FORWARD, micro_batch=m) for m in range(plan.micro_batches)]


def perturbed_forwards(plan: Plan) -> list[Action]:
    """Return the perturbed forwards of a mini-batch; every stage runs them if any stage is zo."""
    if not plan.zo_stages:
        return []
    return [
        Action(kind=Kind.PERTURBED, micro_batch=m, query=query, sign=sign)
        for query in range(plan.queries)
        for m in range(plan.micro_batches)
        for sign in _signs(plan)
    ]


def exit_forwards(plan: Plan, stage: int) -> list[Action]:
    """Return the early-exit forwards of one stage: those up to the last zo stage, with the baseline on that one."""
    if plan.exit_stage is None or stage > plan.exit_stage or plan.exit_queries == 0:
        return []
    has_baseline = stage == plan.exit_stage and plan.difference == "forward" and plan.exit_baseline == "exit"
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
    """Return the backwards of one stage, in order of micro-batch; none unless it is a bp stage."""
    if plan.stages[stage].role != "bp":
        return []
    return [Action(kind=Kind.BACKWARD, micro_batch=m) for m in range(plan.micro_batches)]


def expected_actions(plan: Plan, stage: int) -> frozenset[Action]:
    """Return all the work that a stage has in one mini-batch."""
    return frozenset(
        forwards(plan) + perturbed_forwards(plan) + exit_forwards(plan, stage) + backwards(plan, stage)
    )


def dependencies(plan: Plan, stage: int, action: Action) -> tuple[tuple[int, Action], ...]:
    """Return the (stage, action) pairs that must have ended before `action` can start on `stage`."""
    if action.kind is Kind.BACKWARD:
        own = (stage, Action(kind=Kind.FORWARD, micro_batch=action.micro_batch))
        return (own,) if stage == len(plan.stages) - 1 else (own, (stage + 1, action))
    if action.kind is Kind.EXIT and action.query is None:
        return ((stage, Action(kind=Kind.FORWARD, micro_batch=action.micro_batch)),)
    return ((stage - 1, action),) if stage > 0 else ()


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
