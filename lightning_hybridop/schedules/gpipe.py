"""GPipe: all forwards, then all backwards (Huang et al., 2019)."""

from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.schedules.actions import Schedule
from lightning_hybridop.schedules.dependencies import backwards, exit_forwards, forwards, perturbed_forwards


def gpipe(plan: Plan) -> Schedule:
    """Return F of all micro-batches, then P, then B in reverse, then X; keeps M activations on every bp stage."""
    return tuple(
        (
            *forwards(plan),
            *perturbed_forwards(plan),
            *reversed(backwards(plan, stage)),
            *exit_forwards(plan, stage),
        )
        for stage in range(len(plan.stages))
    )
