"""The schedule of validation, test and prediction."""

from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.schedules.actions import Schedule
from lightning_hybridop.schedules.dependencies import forwards


def forward_only(plan: Plan) -> Schedule:
    """Return base forwards alone, on every stage."""
    return tuple(tuple(forwards(plan)) for _ in plan.stages)
