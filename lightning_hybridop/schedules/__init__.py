"""Schedules as data: pure functions from a plan to every stage's ordered actions."""

from collections.abc import Callable, Mapping
from functools import lru_cache

from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.schedules.actions import Schedule
from lightning_hybridop.schedules.dependencies import check_schedule
from lightning_hybridop.schedules.gpipe import gpipe
from lightning_hybridop.schedules.hybridop import hybridop
from lightning_hybridop.schedules.one_forward_one_backward import one_forward_one_backward

SCHEDULES: Mapping[str, Callable[[Plan], Schedule]] = {
    "hybridop": hybridop,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
}


@lru_cache(maxsize=256)
def build_schedule(plan: Plan) -> Schedule:
    """Return the checked schedule that the plan names."""
    schedule = SCHEDULES[plan.schedule](plan)
    check_schedule(schedule, plan)
    return schedule
