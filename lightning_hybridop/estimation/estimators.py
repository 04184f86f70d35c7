"""The loss-difference estimator: losses of perturbed forwards in, one coefficient per direction out.

`grad = sum_m w_m / n_m * sum_q g_(m,q) * z_(m,q)` with the directional derivative
`g(z) = (L(theta + eps z) - L(theta)) / eps` (forward difference), or
`g(z) = (L(theta + eps z) - L(theta - eps z)) / (2 eps)` (central difference).
Full-model queries and early-exit queries count alike: `n_m` is the number of both that were usable.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_hybridop.estimation.directions import DirectionKey

Directions = Literal["microbatch", "minibatch"]
Difference = Literal["forward", "central"]

# One measured loss: (micro-batch, query or None for the unperturbed one, sign) -> loss
Losses = Mapping[tuple[int, int | None, int], float]

# Machine epsilon of the arithmetic (torch.finfo), and the step that balances it against curvature.
RESOLUTION = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10, "float64": 2.0**-52}
DEFAULT_EPSILON = {"float32": 1e-3, "bfloat16": 3e-2, "float16": 1e-2, "float64": 1e-5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A gradient estimate as scalars: `gradient = sum coefficient * z(key)`.

    `derivatives` holds `g` of every usable direction, `dropped` counts directions whose loss was not finite, and
    `largest_difference` is the largest `|L(theta + eps z) - baseline|` seen (0 without directions).
    """

    coefficients: tuple[tuple[DirectionKey, float], ...]
    derivatives: tuple[tuple[DirectionKey, float], ...]
    dropped: int
    largest_difference: float


def query_key(*, seed: int, step: int, directions: Directions, micro_batch: int, query: int) -> DirectionKey:
    """Return the key of the direction that a query of a micro-batch uses."""
    shared = directions == "minibatch"
    return DirectionKey(seed=seed, step=step, micro_batch=None if shared else micro_batch, query=query)


def difference_quotient(
    losses: Losses, baselines: Losses, *, micro_batch: int, query: int, epsilon: float, difference: Difference
) -> tuple[float, float]:
    """Return `(g, L(theta + eps z) - L(other))` of one direction; not finite when a loss is missing or not finite."""
    plus = losses.get((micro_batch, query, 1), math.nan)
    if difference == "central":
        gap = plus - losses.get((micro_batch, query, -1), math.nan)
        return gap / (2 * epsilon), gap
    gap = plus - baselines.get((micro_batch, None, 1), math.nan)
    return gap / epsilon, gap


def estimate(
    *,
    weights: Sequence[float],
    base: Losses,
    perturbed: Losses,
    exit_base: Losses,
    exit_perturbed: Losses,
    queries: int,
    exit_queries: int,
    epsilon: float,
    directions: Directions,
    difference: Difference,
    seed: int,
    step: int,
) -> Estimate:
    """Turn the losses of one mini-batch into coefficients of its directions.

    `weights` are the micro-batch weights (sum 1); a micro-batch of weight 0 is left out. `exit_base` is what
    early-exit losses are compared with: the unperturbed exit loss, or `base` for the paper's baseline. Early-exit
    query `q` uses direction `queries + q`. A direction whose loss is not finite is dropped: for its micro-batch,
    or as a whole when all micro-batches share it.
    """
    active = [micro_batch for micro_batch, weight in enumerate(weights) if weight > 0.0]
    shared = directions == "minibatch"
    sources = [(perturbed, base, query) for query in range(queries)]
    sources += [(exit_perturbed, exit_base, query) for query in range(exit_queries)]
    measured: dict[tuple[int, int], tuple[float, float]] = {}
    for micro_batch in active:
        for index, (losses, baselines, query) in enumerate(sources):
            measured[micro_batch, index] = difference_quotient(
                losses,
                baselines,
                micro_batch=micro_batch,
                query=query,
                epsilon=epsilon,
                difference=difference,
            )
    lost = {position for position, (derivative, _) in measured.items() if not math.isfinite(derivative)}
    if shared:
        lost_queries = {index for _, index in lost}
        lost = {position for position in measured if position[1] in lost_queries}

    coefficients: dict[DirectionKey, float] = {}
    derivatives: dict[DirectionKey, float] = {}
    for micro_batch in active:
        usable = [index for index in range(len(sources)) if (micro_batch, index) not in lost]
        for index in usable:
            key = query_key(seed=seed, step=step, directions=directions, micro_batch=micro_batch, query=index)
            derivative = measured[micro_batch, index][0]
            weight = weights[micro_batch]
            coefficients[key] = coefficients.get(key, 0.0) + weight * derivative / len(usable)
            derivatives[key] = derivatives.get(key, 0.0) + (weight * derivative if shared else derivative)
    kept = [abs(gap) for position, (_, gap) in measured.items() if position not in lost]
    return Estimate(
        coefficients=tuple(coefficients.items()),
        derivatives=tuple(derivatives.items()),
        dropped=len({index for _, index in lost}) if shared else len(lost),
        largest_difference=max(kept, default=0.0),
    )
