"""GPipe: all forwards, then all backwards (Huang et al., 2019)."""

from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.schedules.actions import Action, Schedule
from lightning_hybridop.schedules.dependencies import backwards, exit_forwards, forwards, perturbed_forwards


def gpipe(plan: Plan) -> Schedule:
    """Return F of all micro-batches, then P, then B in reverse, then X; keeps M activations on every bp stage.

    With the boundary estimator B comes before P, which waits for it.
    """
    return tuple(
        (*forwards(plan), *_perturbed_and_back(plan, stage), *exit_forwards(plan, stage))
        for stage in range(len(plan.stages))
    )


def _perturbed_and_back(plan: Plan, stage: int) -> list[Action]:
    back = backwards(plan, stage)[::-1]
    perturbed = perturbed_forwards(plan, stage)
    return back + perturbed if plan.estimator == "boundary" else perturbed + back
