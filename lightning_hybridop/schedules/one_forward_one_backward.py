"""1F1B, also called PipeDream-Flush (Narayanan et al., 2021)."""

from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.schedules.actions import Action, Schedule
from lightning_hybridop.schedules.dependencies import (
    backwards,
    exit_forwards,
    forwards,
    perturbed_forwards,
    waits_for_gradient,
)


def one_forward_one_backward(plan: Plan) -> Schedule:
    """Return a warm-up of forwards, then one F and one B in turn, then P and X.

    A stage with `k` stages behind it keeps at most `k + 1` activations, if it back-propagates. With the boundary
    estimator the last zo stage does not wait for the gradient of one micro-batch before the forward of another.
    """
    stages = range(len(plan.stages))
    return tuple((*_passes(plan, stage), *exit_forwards(plan, stage)) for stage in stages)


def _passes(plan: Plan, stage: int) -> list[Action]:
    forward, backward = forwards(plan), backwards(plan, stage)
    perturbed = perturbed_forwards(plan, stage)
    if plan.estimator != "boundary" or stage != plan.exit_stage:
        return [*_alternated(forward, backward, warm_up=len(plan.stages) - 1 - stage), *perturbed]
    passes = forward + [action for action in perturbed if waits_for_gradient(plan, action)]
    for gradient in backward:
        passes.append(gradient)
        passes += [
            action
            for action in perturbed
            if action.micro_batch == gradient.micro_batch and not waits_for_gradient(plan, action)
        ]
    return passes


def _alternated(forward: list[Action], backward: list[Action], *, warm_up: int) -> list[Action]:
    if not backward:
        return forward
    ordered = forward[:warm_up]
    for index, action in enumerate(forward[warm_up:]):
        ordered += [action, backward[index]]
    return ordered + backward[len(forward[warm_up:]) :]
