"""The words that pictures, traces and tables share, so that one stage has one name everywhere."""

from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.schedules.actions import Action, Kind
from lightning_hybridop.schedules.timeline import Timeline

KIND_NAMES = {
    Kind.FORWARD: "base forward",
    Kind.BACKWARD: "backward",
    Kind.PERTURBED: "perturbed forward",
    Kind.EXIT: "early-exit forward",
}


def stage_label(plan: Plan, stage: int) -> str:
    """Return the name of a stage, for example `stage 0 · zo · blocks 0-7`, with its device's name if it has one."""
    blocks = plan.stages[stage].block_range
    noun = "blocks" if "-" in blocks else "block"
    name = plan.stages[stage].name or f"stage {stage}"
    return f"{name} · {plan.stages[stage].role} · {noun} {blocks}"


def query_label(action: Action) -> str:
    """Return the query of an action, `1`, or the first and last of those that ride together, `1-3`; empty without one."""
    if action.query is None:
        return ""
    last = action.query + action.count - 1
    return str(action.query) if action.count == 1 else f"{action.query}-{last}"


def action_label(action: Action) -> str:
    """Return a short name of an action: `F 3` (micro-batch 3), `P 3 q1` (query 1 of it), `P 3 q1 −` (minus direction)."""
    query = f" q{query_label(action)}" if query_label(action) else ""
    return f"{action.kind.value} {action.micro_batch}{query}{' −' if action.sign < 0 else ''}"


def drawn_actions(timeline: Timeline) -> Timeline:
    """Return the actions that have a bar: not a simulated B of a zo stage, which takes no time."""
    return tuple(
        timed for timed in timeline if timed.action.kind is not Kind.BACKWARD or timed.end > timed.start
    )


def estimator_label(plan: Plan) -> str:
    """Return what is done on zo stages: `Q = 2`, with the estimator if it is not the paper's."""
    if plan.estimator == "adjoint":
        return "estimator adjoint"
    return f"Q = {plan.queries}" + ("" if plan.estimator == "loss" else f" · estimator {plan.estimator}")
