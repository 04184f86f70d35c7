"""The words that pictures, traces and tables share, so that one stage has one name everywhere."""

from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.schedules.actions import Action, Kind

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


def action_label(action: Action) -> str:
    """Return a short name of an action: `F 3` (micro-batch 3), `P 3 q1` (query 1 of it), `P 3 q1 −` (minus direction)."""
    query = "" if action.query is None else f" q{action.query}"
    return f"{action.kind.value} {action.micro_batch}{query}{' −' if action.sign < 0 else ''}"
