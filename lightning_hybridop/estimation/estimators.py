"""Zeroth-order estimators: losses of perturbed forwards in, one coefficient per direction out.

`grad = sum_m w_m / n_m * sum_q g_(m,q) * z_(m,q)` with the directional derivative
`g(z) = (L(theta + eps z) - L(theta)) / eps` (forward difference), or
`g(z) = (L(theta + eps z) - L(theta - eps z)) / (2 eps)` (central difference).
Full-model queries and early-exit queries count alike: `n_m` is the number of both that were usable.

The boundary estimator has `<G, h(theta + eps z) - h(theta)>` in the place of `L(theta + eps z) - L(theta)`: the change
of the loss to first order, known on the last zo stage. It is the same formula with a baseline of 0.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_hybridop.estimation.directions import DirectionKey, Distribution

Directions = Literal["microbatch", "minibatch", "row"]
Difference = Literal["forward", "central", "antithetic"]

# One measured loss: (unit, query or None for the unperturbed one, sign) -> loss. A unit is what draws directions of its
# own: a micro-batch, or with `directions="row"` a row of one.
Losses = Mapping[tuple[int, int | None, int], float]

# Machine epsilon of the arithmetic (torch.finfo), and the step that balances it against curvature. Hidden states that
# travel as int8 are rounded to 1/127 of their row's largest value.
RESOLUTION = {
    "float32": 2.0**-23,
    "bfloat16": 2.0**-7,
    "float16": 2.0**-10,
    "float64": 2.0**-52,
    "int8": 2.0**-7,
}
DEFAULT_EPSILON = {"float32": 1e-3, "bfloat16": 3e-2, "float16": 1e-2, "float64": 1e-5, "int8": 3e-2}


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


def running_mean(mean: float | None, value: float | None) -> float | None:
    """Return a running mean with one more value in it, which counts a tenth; the value itself where there is none yet."""
    if mean is None or value is None:
        return value if mean is None else mean
    return 0.9 * mean + 0.1 * value


def query_key(
    *,
    seed: int,
    step: int,
    directions: Directions,
    micro_batch: int,
    query: int,
    row: int | None = None,
    difference: Difference = "forward",
    distribution: Distribution = "normal",
) -> DirectionKey:
    """Return the key of the direction along which a query of a micro-batch, or of a row of it, moves.

    With antithetic pairs queries 2k and 2k + 1 share one: see `query_sign`.
    """
    return DirectionKey(
        seed=seed,
        step=step,
        micro_batch=None if directions == "minibatch" else micro_batch,
        query=query - query % 2 if difference == "antithetic" else query,
        row=row,
        distribution=distribution,
    )


def query_sign(query: int, difference: Difference) -> int:
    """Return -1 for the second query of an antithetic pair, which walks its direction backwards, else 1."""
    return -1 if difference == "antithetic" and query % 2 else 1


def shrinkage(*, directions: int, dimensions: int, distribution: Distribution) -> float:
    """Return the factor by which a mean over `directions` estimates comes nearest to the gradient in mean square.

    `E||estimate||^2 = (d + n + 1) / n ||gradient||^2` for normal directions and `(d + n - 1) / n` for those of fixed
    length; the factor is the inverse.
    """
    excess = 1 if distribution == "normal" else -1
    return directions / max(directions, dimensions + directions + excess)


def difference_quotient(
    losses: Losses, baselines: Losses, *, unit: int, query: int, epsilon: float, difference: Difference
) -> tuple[float, float]:
    """Return `(g, L(theta + eps z) - L(other))` of one direction; not finite when a loss is missing or not finite."""
    plus = losses.get((unit, query, 1), math.nan)
    if difference == "central":
        gap = plus - losses.get((unit, query, -1), math.nan)
        return gap / (2 * epsilon), gap
    gap = plus - baselines.get((unit, None, 1), math.nan)
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
    distribution: Distribution = "normal",
    rows: Sequence[tuple[int, int]] = (),
    dimensions: int | None = None,
) -> Estimate:
    """Turn the losses of one mini-batch into coefficients of its directions.

    `weights` are those of the units, the micro-batches (sum 1); with `directions="row"` the units are rows, `rows` says
    of which micro-batch and which row of it, and each has the weight of its micro-batch. A unit of weight 0 is left
    out. `exit_base` is what early-exit losses are compared with: the unperturbed exit loss, or `base` for the paper's
    baseline. Early-exit query `q` uses direction `queries + q`. A direction whose loss is not finite is dropped: for
    its unit, or as a whole when all micro-batches share it. With `dimensions`, the number of parameters that are
    perturbed, the estimate is shrunk (see `shrinkage`).
    """
    active = [unit for unit, weight in enumerate(weights) if weight > 0.0]
    shared = directions == "minibatch"
    sources = [(perturbed, base, query) for query in range(queries)]
    sources += [(exit_perturbed, exit_base, query) for query in range(exit_queries)]
    measured: dict[tuple[int, int], tuple[float, float]] = {}
    for unit in active:
        for index, (losses, baselines, query) in enumerate(sources):
            measured[unit, index] = difference_quotient(
                losses, baselines, unit=unit, query=query, epsilon=epsilon, difference=difference
            )
    lost = {position for position, (derivative, _) in measured.items() if not math.isfinite(derivative)}
    if shared:
        lost_queries = {index for _, index in lost}
        lost = {position for position in measured if position[1] in lost_queries}

    coefficients: dict[DirectionKey, float] = {}
    derivatives: dict[DirectionKey, float] = {}
    for unit in active:
        usable = [index for index in range(len(sources)) if (unit, index) not in lost]
        micro_batch, row = rows[unit] if rows else (unit, None)
        keys = [
            query_key(
                seed=seed,
                step=step,
                directions=directions,
                micro_batch=micro_batch,
                query=index,
                row=row,
                difference=difference,
                distribution=distribution,
            )
            for index in usable
        ]
        times = Counter(keys)
        for key, index in zip(keys, usable, strict=True):
            derivative = query_sign(index, difference) * measured[unit, index][0]
            coefficients[key] = coefficients.get(key, 0.0) + weights[unit] * derivative / len(usable)
            # An antithetic pair measures one derivative twice.
            share = (weights[unit] if shared else 1.0) / times[key]
            derivatives[key] = derivatives.get(key, 0.0) + share * derivative
    if dimensions is not None and coefficients:
        factor = shrinkage(directions=len(coefficients), dimensions=dimensions, distribution=distribution)
        coefficients = {key: factor * coefficient for key, coefficient in coefficients.items()}
    kept = [abs(gap) for position, (_, gap) in measured.items() if position not in lost]
    return Estimate(
        coefficients=tuple(coefficients.items()),
        derivatives=tuple(derivatives.items()),
        dropped=len({index for _, index in lost}) if shared else len(lost),
        largest_difference=max(kept, default=0.0),
    )
