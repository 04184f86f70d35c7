"""What actions keep in memory: activations until their backward, hidden states until an estimator has used them."""

from collections.abc import Mapping, Sequence

from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.schedules.actions import Action, Kind
from lightning_hybridop.schedules.dependencies import backwards


def held_and_released(
    plan: Plan, stage: int, actions: Sequence[Action], *, kept: float, multiplied: float = 0.0
) -> Mapping[Action, tuple[float, float]]:
    """Return the bytes that each action takes when it starts and gives back when it ends, in the order of a stage.

    A stage that goes back keeps `kept` bytes of a micro-batch from F to B. With the boundary estimator the last zo stage
    keeps them until the micro-batch's last P has been multiplied with its gradient; that, and each perturbed hidden state,
    takes `multiplied` bytes, and those of before B wait for it.
    """
    if not backwards(plan, stage):
        return {}
    if plan.estimator != "boundary" or plan.stages[stage].role == "bp":
        return {
            action: (kept, 0.0) if action.kind is Kind.FORWARD else (0.0, kept)
            for action in actions
            if action.kind in (Kind.FORWARD, Kind.BACKWARD)
        }
    uses = [action for action in actions if action.kind in (Kind.PERTURBED, Kind.BACKWARD)]
    last_use = {action.micro_batch: action for action in uses}
    perturbed = {action.micro_batch for action in uses if action.kind is Kind.PERTURBED}
    waiting = dict.fromkeys(last_use, 0.0)
    arrived: set[int] = set()
    memory: dict[Action, tuple[float, float]] = {}
    for action in actions:
        micro_batch, holds, releases = action.micro_batch, 0.0, 0.0
        if micro_batch not in perturbed or action.kind is Kind.EXIT:
            continue
        if action.kind is Kind.FORWARD:
            holds = kept
        elif action.kind is Kind.BACKWARD:
            arrived.add(micro_batch)
            holds, releases = multiplied, waiting[micro_batch]
        else:
            holds = action.count * multiplied
            if micro_batch in arrived:
                releases = holds
            else:
                waiting[micro_batch] += holds
        if action == last_use[micro_batch]:
            releases += kept + multiplied
        memory[action] = (holds, releases)
    return memory
