import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hybridop.estimation.directions import DirectionKey, Distribution, direction
from lightning_hybridop.estimation.estimators import (
    DEFAULT_EPSILON,
    RESOLUTION,
    Difference,
    Directions,
    Estimate,
    Losses,
    estimate,
    query_key,
    query_sign,
    running_mean,
    shrinkage,
)
from lightning_hybridop.estimation.perturbation import perturbed

SHAPE = torch.Size([5])
SEED, STEP, EPSILON = 3, 11, 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The losses of one mini-batch and how to read them: the arguments of `estimate`."""

    weights: tuple[float, ...]
    base: Losses
    perturbed: Losses
    exit_base: Losses
    exit_perturbed: Losses
    queries: int
    exit_queries: int
    directions: Directions = "microbatch"
    difference: Difference = "forward"
    epsilon: float = EPSILON
    seed: int = SEED
    step: int = STEP

    def estimate(self) -> Estimate:
        """Return what the code under test makes of it."""
        return estimate(**{name: getattr(self, name) for name in self.__slots__})


def measured(*, weights: tuple[float, ...], queries: int, exit_queries: int = 0, **options: Any) -> Measured:
    """Return random losses for every direction, both signs and all baselines."""
    draw = random.Random(0)
    batches = range(len(weights))

    def losses(count: int) -> dict[tuple[int, int | None, int], float]:
        return {(m, q, sign): draw.uniform(1, 3) for m, q, sign in product(batches, range(count), (1, -1))}

    def unperturbed() -> dict[tuple[int, int | None, int], float]:
        return {(m, None, 1): draw.uniform(1, 3) for m in batches}

    return Measured(
        weights=weights,
        base=unperturbed(),
        perturbed=losses(queries),
        exit_base=unperturbed(),
        exit_perturbed=losses(exit_queries),
        queries=queries,
        exit_queries=exit_queries,
        **options,
    )


def z_of(measured: Measured, micro_batch: int, query: int) -> Tensor:
    shared = measured.directions == "minibatch"
    key = DirectionKey(seed=SEED, step=STEP, micro_batch=None if shared else micro_batch, query=query)
    return direction(key, "p", SHAPE).double()


def gradient_of(result: Estimate) -> Tensor:
    total = torch.zeros(SHAPE, dtype=torch.float64)
    for key, coefficient in result.coefficients:
        total += coefficient * direction(key, "p", SHAPE).double()
    return total


def gradient_by_the_formula(measured: Measured) -> Tensor:
    """`sum_m w_m / (Q + Q') * (sum_q g(z_q) z_q + sum_q' g'(z_(Q+q')) z_(Q+q'))`, written out."""
    total = torch.zeros(SHAPE, dtype=torch.float64)
    count = measured.queries + measured.exit_queries
    for m, weight in enumerate(measured.weights):
        for q in range(count):
            if q < measured.queries:
                plus, minus = measured.perturbed[m, q, 1], measured.perturbed[m, q, -1]
                unperturbed = measured.base[m, None, 1]
            else:
                exit_query = q - measured.queries
                plus = measured.exit_perturbed[m, exit_query, 1]
                minus = measured.exit_perturbed[m, exit_query, -1]
                unperturbed = measured.exit_base[m, None, 1]
            if measured.difference == "forward":
                g = (plus - unperturbed) / EPSILON
            else:
                g = (plus - minus) / (2 * EPSILON)
            total += weight * g / count * z_of(measured, m, q)
    return total


@pytest.mark.parametrize("baseline", ["exit", "full"])
@pytest.mark.parametrize("difference", ["forward", "central"])
@pytest.mark.parametrize("directions", ["microbatch", "minibatch"])
@pytest.mark.parametrize(
    "weights", [(1.0,), (0.25, 0.75), (0.5, 0.0, 0.5), (1 / 33, 1 / 33, 1 / 33, 30 / 33)], ids=len
)
@pytest.mark.parametrize(("queries", "exit_queries"), [(1, 0), (3, 0), (2, 2), (0, 3)])
def test_estimate_is_the_formula(
    weights: tuple[float, ...],
    queries: int,
    exit_queries: int,
    directions: Directions,
    difference: Difference,
    baseline: str,
) -> None:
    case = measured(
        weights=weights,
        queries=queries,
        exit_queries=exit_queries,
        directions=directions,
        difference=difference,
    )
    if baseline == "full":
        case = replace(case, exit_base=case.base)

    result = case.estimate()

    torch.testing.assert_close(gradient_of(result), gradient_by_the_formula(case), atol=1e-10, rtol=1e-10)
    assert result.dropped == 0
    active = sum(weight > 0 for weight in weights) if directions == "microbatch" else 1
    assert len(result.coefficients) == len(result.derivatives) == active * (queries + exit_queries)


def test_derivatives_are_those_of_the_directions() -> None:
    case = measured(weights=(0.25, 0.75), queries=2)
    g = {
        (m, q): (case.perturbed[m, q, 1] - case.base[m, None, 1]) / EPSILON
        for m, q in product(range(2), range(2))
    }

    own = {(key.micro_batch, key.query): value for key, value in case.estimate().derivatives}
    shared = {key.query: value for key, value in replace(case, directions="minibatch").estimate().derivatives}

    assert own == pytest.approx(g)
    assert shared == pytest.approx({q: 0.25 * g[0, q] + 0.75 * g[1, q] for q in range(2)})


def test_largest_difference_is_over_all_micro_batches() -> None:
    case = measured(weights=(0.5, 0.5), queries=3)
    gaps = [abs(case.perturbed[m, q, 1] - case.base[m, None, 1]) for m, q in product(range(2), range(3))]

    assert case.estimate().largest_difference == max(gaps)


def test_keys_of_directions() -> None:
    arguments = {"seed": 1, "step": 2, "micro_batch": 3, "query": 4}

    assert query_key(directions="microbatch", **arguments) == DirectionKey(**arguments)
    assert query_key(directions="minibatch", **arguments) == DirectionKey(
        **{**arguments, "micro_batch": None}
    )


def test_without_directions_there_is_no_estimate() -> None:
    result = measured(weights=(0.5, 0.5), queries=0).estimate()

    assert result == Estimate(coefficients=(), derivatives=(), dropped=0, largest_difference=0.0)


@pytest.mark.parametrize(("dtype", "resolution"), RESOLUTION.items())
def test_resolutions_are_torchs(dtype: str, resolution: float) -> None:
    number = getattr(torch, dtype)
    # An integer stands for a share of the largest one of its row.
    expected = torch.finfo(number).eps if number.is_floating_point else 1 / (torch.iinfo(number).max + 1)
    assert resolution == expected
    assert DEFAULT_EPSILON[dtype] > resolution


# Losses that are not finite.


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("difference", ["forward", "central"])
def test_lost_direction_is_dropped_for_its_micro_batch(loss: float, difference: Difference) -> None:
    case = measured(weights=(0.25, 0.75), queries=3, difference=difference)
    poisoned = replace(case, perturbed={**case.perturbed, (1, 0, 1): loss})
    kept = {key: value for key, value in case.estimate().coefficients if key.micro_batch == 0}

    result = poisoned.estimate()

    assert result.dropped == 1
    assert math.isfinite(result.largest_difference)
    own = dict(result.coefficients)
    assert {key: own[key] for key in kept} == kept
    # The others of micro-batch 1 are averaged over two instead of three.
    whole = dict(case.estimate().coefficients)
    others = {key: value for key, value in own.items() if key.micro_batch == 1}
    assert {key.query for key in others} == {1, 2}
    assert others == pytest.approx({key: whole[key] * 3 / 2 for key in others})


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_lost_direction_is_dropped_as_a_whole_when_micro_batches_share_it(loss: float) -> None:
    case = measured(weights=(0.25, 0.75), queries=3, directions="minibatch")
    poisoned = replace(case, perturbed={**case.perturbed, (1, 0, 1): loss})

    result = poisoned.estimate()

    assert result.dropped == 1
    whole = dict(case.estimate().coefficients)
    assert {key.query for key, _ in result.coefficients} == {1, 2}
    assert dict(result.coefficients) == pytest.approx(
        {k: v * 3 / 2 for k, v in whole.items() if k.query != 0}
    )


def test_second_half_of_a_central_difference_counts() -> None:
    case = measured(weights=(1.0,), queries=2, difference="central")
    poisoned = replace(case, perturbed={**case.perturbed, (0, 1, -1): math.nan})

    assert poisoned.estimate().dropped == 1
    assert replace(poisoned, difference="forward").estimate().dropped == 0


def test_missing_loss_drops_its_direction() -> None:
    case = measured(weights=(1.0,), queries=2)
    incomplete = {key: loss for key, loss in case.perturbed.items() if key[1] != 0}

    assert replace(case, perturbed=incomplete).estimate().dropped == 1


@pytest.mark.parametrize(("directions", "dropped"), [("microbatch", 2), ("minibatch", 2)])
def test_lost_base_loss_drops_all_its_directions(directions: Directions, dropped: int) -> None:
    case = measured(weights=(0.25, 0.75), queries=2, directions=directions)

    result = replace(case, base={**case.base, (1, None, 1): math.nan}).estimate()

    assert result.dropped == dropped
    assert {key.micro_batch for key, _ in result.coefficients} == (
        {0} if directions == "microbatch" else set()
    )


@pytest.mark.parametrize("directions", ["microbatch", "minibatch"])
def test_micro_batch_of_weight_0_may_have_no_loss(directions: Directions) -> None:
    case = measured(weights=(0.4, 0.0, 0.6), queries=2, exit_queries=1, directions=directions)
    nothing = dict.fromkeys([(1, None, 1), *((1, q, sign) for q in range(2) for sign in (1, -1))], math.nan)
    poisoned = replace(
        case,
        **{
            field: {**getattr(case, field), **{k: v for k, v in nothing.items() if k in getattr(case, field)}}
            for field in ("base", "perturbed", "exit_base", "exit_perturbed")
        },
    )

    assert poisoned.estimate() == case.estimate()
    assert all(math.isfinite(value) for _, value in poisoned.estimate().coefficients)


# What the estimator is worth: its moments, over many steps.


def estimates(
    *, loss: Callable[[Tensor], Tensor], point: Tensor, queries: int, repetitions: int, difference: Difference
) -> Tensor:
    """Return the gradient estimates [repetitions, D] at `point` of a function of one parameter."""
    parameter = nn.Parameter(point.clone())
    rows = []
    for step in range(repetitions):
        losses: dict[tuple[int, int | None, int], float] = {}
        for query in range(queries):
            key = query_key(seed=SEED, step=step, directions="microbatch", micro_batch=0, query=query)
            for sign in (1, -1) if difference == "central" else (1,):
                with perturbed({"p": parameter}, key, sign * EPSILON):
                    losses[0, query, sign] = float(loss(parameter.detach()))
        result = estimate(
            weights=[1.0],
            base={(0, None, 1): float(loss(point))},
            perturbed=losses,
            exit_base={},
            exit_perturbed={},
            queries=queries,
            exit_queries=0,
            epsilon=EPSILON,
            directions="microbatch",
            difference=difference,
            seed=SEED,
            step=step,
        )
        row = torch.zeros_like(point)
        for key, coefficient in result.coefficients:
            row += coefficient * direction(key, "p", point.shape)
        rows.append(row)
    return torch.stack(rows)


DIMENSIONS, REPETITIONS = 24, 800


def linear() -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
    """Return a linear function, a point and its gradient there; a forward difference of it is exact."""
    generator = torch.Generator().manual_seed(0)
    slope = torch.randn(DIMENSIONS, generator=generator, dtype=torch.float64)
    return lambda point: slope @ point + 3, torch.ones(DIMENSIONS, dtype=torch.float64), slope


def quadratic() -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
    """Return a quadratic function, a point and its gradient there; a central difference of it is exact."""
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(DIMENSIONS, DIMENSIONS, generator=generator, dtype=torch.float64)
    curvature = factor @ factor.T / DIMENSIONS
    point = torch.randn(DIMENSIONS, generator=generator, dtype=torch.float64)
    return lambda at: at @ curvature @ at / 2, point, curvature @ point


@pytest.mark.parametrize(
    ("function", "difference"), [(linear, "forward"), (quadratic, "central")], ids=["linear", "quadratic"]
)
@pytest.mark.parametrize("queries", [1, 3])
def test_estimate_is_unbiased_and_as_long_as_the_mathematics_says(
    function: Callable[[], tuple[Callable[[Tensor], Tensor], Tensor, Tensor]],
    difference: Difference,
    queries: int,
) -> None:
    loss, point, gradient = function()
    drawn = estimates(loss=loss, point=point, queries=queries, repetitions=REPETITIONS, difference=difference)

    # Unbiased: within five standard errors in every coordinate.
    error = (drawn.mean(dim=0) - gradient).abs()
    assert (error < 5 * drawn.std(dim=0) / REPETITIONS**0.5).all()
    # E||grad||^2 for directions of length sqrt(d) is (d + n - 1)/n ||g||^2; for Gaussian ones, whose own length
    # varies, it is (d + n + 1)/n ||g||^2: E[(g z)^2 ||z||^2] = (d + 2) ||g||^2.
    squared = drawn.square().sum(dim=1)
    expected = (DIMENSIONS + queries + 1) / queries * gradient.square().sum()
    assert abs(squared.mean() - expected) < 5 * squared.std() / REPETITIONS**0.5
    # Far from the true gradient's own length.
    assert squared.mean() > 4 * gradient.square().sum()


def test_cosine_to_the_true_gradient() -> None:
    loss, point, gradient = linear()
    for queries in (1, 4):
        drawn = estimates(loss=loss, point=point, queries=queries, repetitions=300, difference="forward")
        cosine = torch.nn.functional.cosine_similarity(drawn, gradient[None]).mean()
        assert float(cosine) == pytest.approx((queries / (DIMENSIONS + queries)) ** 0.5, rel=0.25)


# Antithetic pairs, rows, shrinkage.


def test_antithetic_pairs_are_the_central_difference_at_half_the_queries() -> None:
    pairs = measured(weights=(0.25, 0.75), queries=4, difference="antithetic")
    # Query 2k + 1 measured what a central difference's second half does.
    central = replace(
        pairs,
        queries=2,
        difference="central",
        perturbed={
            (m, query, sign): pairs.perturbed[m, 2 * query + (sign == -1), 1]
            for m, query, sign in product(range(2), range(2), (1, -1))
        },
    )
    found, expected = pairs.estimate(), central.estimate()

    doubled = {replace(key, query=2 * key.query): value for key, value in expected.coefficients}
    assert dict(found.coefficients) == pytest.approx(doubled)
    assert [value for _, value in found.derivatives] == pytest.approx(
        [value for _, value in expected.derivatives]
    )


def test_an_odd_query_of_an_antithetic_pair_walks_backwards() -> None:
    assert [query_sign(query, "antithetic") for query in range(4)] == [1, -1, 1, -1]
    assert {query_sign(query, difference) for query in range(4) for difference in ("forward", "central")} == {
        1
    }


def test_rows_have_directions_of_their_own_and_the_weight_of_their_micro_batch() -> None:
    rows = [(0, 0), (0, 1), (1, 0)]
    case = measured(weights=(0.25, 0.25, 0.75), queries=2)
    arguments = {name: getattr(case, name) for name in case.__slots__}

    result = estimate(**{**arguments, "directions": "row"}, rows=rows)

    own = {(key.micro_batch, key.row, key.query): coefficient for key, coefficient in result.coefficients}
    by_unit = {(key.micro_batch, key.query): value for key, value in case.estimate().coefficients}
    assert own == pytest.approx({(*rows[unit], query): value for (unit, query), value in by_unit.items()})


@pytest.mark.parametrize("distribution", ["normal", "rademacher"])
def test_shrinkage_brings_an_estimate_as_near_to_the_gradient_as_scaling_can(
    distribution: Distribution,
) -> None:
    dimensions, directions, trials = 6, 4, 6000
    gradient = torch.linspace(-1, 2, dimensions, dtype=torch.float64)
    keys = [
        DirectionKey(seed=0, step=trial, micro_batch=None, query=query, distribution=distribution)
        for trial in range(trials)
        for query in range(directions)
    ]
    z = torch.stack([direction(key, "p", torch.Size([dimensions])).double() for key in keys])
    estimates = ((z @ gradient)[:, None] * z).reshape(trials, directions, dimensions).mean(dim=1)
    best = float((estimates @ gradient).mean() / estimates.square().sum(dim=1).mean())

    factor = shrinkage(directions=directions, dimensions=dimensions, distribution=distribution)

    assert factor == pytest.approx(best, rel=0.03)
    assert shrinkage(directions=3, dimensions=0, distribution=distribution) <= 1.0


def test_an_estimate_is_shrunk_by_its_number_of_directions() -> None:
    case = measured(weights=(0.5, 0.5), queries=2)
    arguments = {name: getattr(case, name) for name in case.__slots__}

    shrunk = estimate(**arguments, dimensions=10)

    whole = dict(case.estimate().coefficients)
    assert dict(shrunk.coefficients) == pytest.approx({key: value * 4 / 15 for key, value in whole.items()})


def test_a_running_mean_starts_with_its_first_value_and_keeps_it_without_another() -> None:
    assert running_mean(None, None) is None
    assert running_mean(None, 2.0) == 2.0
    assert running_mean(2.0, None) == 2.0
    assert running_mean(2.0, 3.0) == pytest.approx(2.1)
