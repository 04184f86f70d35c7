"""One training mini-batch on one stage: run the schedule, share the losses, form the stage's gradient."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybridop.estimation.estimators import RESOLUTION, Directions, Estimate, Losses, estimate
from lightning_hybridop.estimation.perturbation import accumulate_direction
from lightning_hybridop.pipeline.engine import Engine, Perturbation, Steps
from lightning_hybridop.pipeline.exchange import broadcast_json
from lightning_hybridop.schedules import build_schedule
from lightning_hybridop.schedules.actions import Action
from lightning_hybridop.schedules.timeline import TimedAction


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorSettings:
    """How zo stages estimate: `epsilon` scales the direction, `resolution` is the arithmetic's machine epsilon."""

    seed: int
    epsilon: float
    directions: Directions
    resolution: float = RESOLUTION["float32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatchResult:
    """What a rank has after a mini-batch: the full loss, its own gradients by parameter name, and what it measured.

    `report` is what the last stage wanted all ranks to know. `estimate` is None without a zo stage.
    """

    loss: float
    gradients: Mapping[str, Tensor]
    estimate: Estimate | None
    report: Any
    actions: Sequence[tuple[Action, ...]]
    timeline: tuple[TimedAction, ...]


def train_mini_batch(
    engine: Engine,
    *,
    weights: Sequence[float],
    token_shapes: Sequence[tuple[int, int]],
    steps: Steps,
    settings: EstimatorSettings,
    step: int,
    rank_of_stage: Sequence[int],
    report: Callable[[], Any],
) -> MiniBatchResult:
    """Run one mini-batch of `len(weights)` micro-batches through the pipeline. Collective.

    `report` is called on the last stage after its last action. All ranks return the same loss: the mean of the
    micro-batch losses by weight.
    """
    plan = replace(engine.plan, micro_batches=len(weights))
    schedule = build_schedule(plan)
    perturbation = Perturbation(
        seed=settings.seed, step=step, epsilon=settings.epsilon, directions=settings.directions
    )
    outcome = engine.train(
        schedule[engine.stage],
        steps=steps,
        token_shapes=token_shapes,
        weights=weights,
        perturbation=perturbation,
    )
    message = (_encode(outcome.base), _encode(outcome.perturbed), report() if engine.is_last else None)
    base_list, perturbed_list, shared_report = broadcast_json(message, source=rank_of_stage[-1])
    base = _decode(base_list)
    loss = math.fsum(weight * base[m, None, 1] for m, weight in enumerate(weights) if weight > 0.0)
    gradients: Mapping[str, Tensor] = outcome.gradients
    result: Estimate | None = None
    if plan.zo_stages:
        early_exit: Losses = {}
        if plan.exit_stage is not None and plan.exit_queries > 0:
            source = rank_of_stage[plan.exit_stage]
            early_exit = _decode(broadcast_json(_encode(outcome.early_exit), source=source))
        result = estimate(
            weights=weights,
            base=base,
            perturbed=_decode(perturbed_list),
            exit_base=early_exit if plan.exit_baseline == "exit" else base,
            exit_perturbed=early_exit,
            queries=plan.queries,
            exit_queries=plan.exit_queries,
            epsilon=settings.epsilon,
            directions=settings.directions,
            difference=plan.difference,
            seed=settings.seed,
            step=step,
        )
        _warn_about(result, loss=loss, settings=settings, moved=len(engine.zo_parameters) > 0)
        if plan.stages[engine.stage].role == "zo":
            gradients = estimated_gradients(engine.zo_parameters, result)
    return MiniBatchResult(
        loss=loss,
        gradients=gradients,
        estimate=result,
        report=shared_report,
        actions=schedule,
        timeline=tuple(outcome.timeline),
    )


def estimated_gradients(parameters: Mapping[str, nn.Parameter], result: Estimate) -> dict[str, Tensor]:
    """Replay the directions of an estimate and return the gradient of every parameter in its own dtype.

    Without a single usable direction there is no gradient, and the optimizer leaves the parameters alone.
    """
    if not result.coefficients:
        return {}
    gradients = {
        name: torch.zeros_like(parameter, dtype=torch.float32) for name, parameter in parameters.items()
    }
    for key, coefficient in result.coefficients:
        accumulate_direction(gradients, key, coefficient)
    return {name: gradient.to(parameters[name].dtype) for name, gradient in gradients.items()}


def _warn_about(result: Estimate, *, loss: float, settings: EstimatorSettings, moved: bool) -> None:
    """Warn of lost and of drowned directions; `moved` tells whether this stage has parameters that should show."""
    if result.dropped:
        warnings.warn(
            f"{result.dropped} of {result.dropped + len(result.derivatives)} directions gave a loss that is not "
            "finite and were dropped; a smaller epsilon or learning rate helps if this goes on.",
            stacklevel=2,
        )
    elif (
        result.derivatives
        and result.largest_difference < settings.resolution * abs(loss)
        and (moved or result.largest_difference > 0.0)
    ):
        warnings.warn(
            f"Perturbed losses differ by at most {result.largest_difference:.1e} from a loss of {loss:.3g}, below what "
            f"the arithmetic resolves ({settings.resolution * abs(loss):.1e}); use a larger epsilon or float32.",
            stacklevel=2,
        )


def _encode(losses: Losses) -> list[list[float | int | None]]:
    return [[micro_batch, query, sign, loss] for (micro_batch, query, sign), loss in losses.items()]


def _decode(rows: Sequence[Sequence[Any]]) -> dict[tuple[int, int | None, int], float]:
    return {(row[0], row[1], row[2]): row[3] for row in rows}
