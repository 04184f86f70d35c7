"""1F1B, also called PipeDream-Flush (Narayanan et al., 2021)."""

from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.schedules.actions import Action, Schedule
from lightning_hybridop.schedules.dependencies import backwards, exit_forwards, forwards, perturbed_forwards


def one_forward_one_backward(plan: Plan) -> Schedule:
    """Return a warm-up of forwards, then one F and one B in turn, then P and X.

    A bp stage with `k` stages behind it keeps at most `k + 1` activations.
    """
    stages = len(plan.stages)
    return tuple(
        (
            *_alternated(forwards(plan), backwards(plan, stage), warm_up=stages - 1 - stage),
            *perturbed_forwards(plan),
            *exit_forwards(plan, stage),
        )
        for stage in range(stages)
    )


def _alternated(forward: list[Action], backward: list[Action], *, warm_up: int) -> list[Action]:
    if not backward:
        return forward
    ordered = forward[:warm_up]
    for index, action in enumerate(forward[warm_up:]):
        ordered += [action, backward[index]]
    return ordered + backward[len(forward[warm_up:]) :]
