"""From what the stages measured in a mini-batch to the gradient of the zo stages."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_hybridop.estimation.directions import Distribution
from lightning_hybridop.estimation.estimators import RESOLUTION, Directions, Estimate, Losses, estimate
from lightning_hybridop.estimation.perturbation import accumulate_direction
from lightning_hybridop.planning.plan import Plan

Products = Mapping[tuple[int, int | None, int], Sequence[float]]
"""By (micro-batch, query, sign): what each row contributes to the change of the mini-batch's loss, to first order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorSettings:
    """How zo stages estimate: `epsilon` scales the direction, `resolution` is the arithmetic's machine epsilon.

    `dimensions` is the number of parameters that all zo stages perturb, if the estimate is to be shrunk, else None.
    """

    seed: int
    epsilon: float
    directions: Directions
    distribution: Distribution = "normal"
    dimensions: int | None = None
    resolution: float = RESOLUTION["float32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the stages have measured in one mini-batch, and all ranks know.

    `largest_movement` is the largest relative change of a hidden state behind the products.
    """

    base: Losses
    perturbed: Losses
    early_exit: Losses
    products: Products
    largest_movement: float


def estimate_of(
    measured: Measured,
    *,
    plan: Plan,
    weights: Sequence[float],
    rows: Sequence[int],
    settings: EstimatorSettings,
    step: int,
    running_exit_loss: float | None = None,
) -> Estimate:
    """Turn what was measured into an estimate, by the plan's estimator.

    `weights` and `rows` are those of the micro-batches.
    """
    units: Sequence[tuple[int, int]] = ()
    perturbed, base, unit_weights = measured.perturbed, measured.base, weights
    if plan.estimator == "boundary":
        if settings.directions == "row":
            units = [(m, row) for m, count in enumerate(rows) for row in range(count)]
            unit_weights = [weights[m] for m, _ in units]
        perturbed = _loss_changes(measured.products, weights=weights, units=units)
        base = dict.fromkeys(((unit, None, 1) for unit in range(len(unit_weights))), 0.0)
    baselines: dict[str, Losses] = {
        "exit": measured.early_exit,
        "full": measured.base,
        "running": dict.fromkeys(((m, None, 1) for m in range(len(weights))), running_exit_loss or 0.0),
    }
    return estimate(
        weights=unit_weights,
        base=base,
        perturbed=perturbed,
        exit_base=baselines[plan.exit_baseline],
        exit_perturbed=measured.early_exit,
        queries=plan.queries,
        exit_queries=plan.exit_queries,
        epsilon=settings.epsilon,
        directions=settings.directions,
        difference=plan.difference,
        seed=settings.seed,
        step=step,
        distribution=settings.distribution,
        rows=units,
        dimensions=settings.dimensions,
    )


def _loss_changes(
    products: Products,
    *,
    weights: Sequence[float],
    units: Sequence[tuple[int, int]],
) -> Losses:
    """Return how much each unit's own loss changes; without `units` those are the micro-batches.

    `G` is that of the mini-batch's loss, so a product has its micro-batch's weight in it.
    """
    changes: dict[tuple[int, int | None, int], float] = {}
    number_of = {unit: number for number, unit in enumerate(units)}
    for (micro_batch, query, sign), by_row in products.items():
        if weights[micro_batch] == 0.0:
            continue
        if not units:
            changes[micro_batch, query, sign] = math.fsum(by_row) / weights[micro_batch]
            continue
        for row, change in enumerate(by_row):
            changes[number_of[micro_batch, row], query, sign] = change / weights[micro_batch]
    return changes


def mean_exit_loss(losses: Losses) -> float | None:
    """Return the mean of the finite losses of perturbed forwards, None without any."""
    finite = [loss for (_, query, _), loss in losses.items() if query is not None and math.isfinite(loss)]
    return math.fsum(finite) / len(finite) if finite else None


def warn_of_lost_and_drowned(
    result: Estimate, measured: Measured, *, loss: float, settings: EstimatorSettings, moved: bool
) -> None:
    """Warn of lost and of drowned directions; `moved` tells whether this stage has parameters that should show."""
    if result.dropped:
        warnings.warn(
            f"{result.dropped} of {result.dropped + len(result.derivatives)} directions gave "
            f"{'an inner product' if measured.products else 'a loss'} that is not finite and were dropped; a smaller "
            "epsilon or learning rate helps if this goes on.",
            stacklevel=2,
        )
    elif measured.products:
        if measured.largest_movement < settings.resolution and (moved or measured.largest_movement > 0.0):
            warnings.warn(
                f"Perturbations move hidden states by at most {measured.largest_movement:.1e} of their size, below what "
                f"the arithmetic resolves ({settings.resolution:.1e}); use a larger epsilon or float32.",
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
