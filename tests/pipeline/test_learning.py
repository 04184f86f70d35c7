"""A mini-batch of a pipeline of one zo stage, in a process group of this process alone."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybridop.estimation.directions import DirectionKey, direction
from lightning_hybridop.estimation.estimators import Directions
from lightning_hybridop.pipeline.anatomy import read_anatomy
from lightning_hybridop.pipeline.engine import Engine
from lightning_hybridop.pipeline.estimates import EstimatorSettings
from lightning_hybridop.pipeline.learning import MiniBatchResult, train_mini_batch
from lightning_hybridop.pipeline.replicas import Replicas
from lightning_hybridop.pipeline.stage import StageModel
from lightning_hybridop.pipeline.work import Steps
from lightning_hybridop.planning.plan import Plan, Stage
from tests.pipeline.plain import PlainModel, plain_step

EPSILON, SEED, STEP = 1e-2, 5, 9


@pytest.fixture(scope="module", autouse=True)
def _process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(
    model: nn.Module,
    step: Callable[[int], Tensor],
    *,
    weights: tuple[float, ...],
    directions: Directions = "microbatch",
    epsilon: float = EPSILON,
    **options: Any,
) -> MiniBatchResult:
    anatomy = read_anatomy(model)
    plan = Plan(
        blocks=anatomy.blocks,
        stages=(Stage(first=0, last=anatomy.blocks, role="zo"),),
        micro_batches=len(weights),
        **options,
    )
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    engine = Engine(
        model=StageModel(model, anatomy, first=0, last=anatomy.blocks),
        plan=plan,
        stage=0,
        parameters=parameters,
        zo_parameters=parameters,
        channels={},
        width=anatomy.width,
        boundary_dtypes=[torch.float32],
        device=torch.device("cpu"),
        clock_offset=0.0,
    )
    return train_mini_batch(
        engine,
        weights=weights,
        token_shapes=[(3, 5)] * len(weights),
        steps=Steps(base=step, perturbed=lambda m, _: step(m), early_exit=step),
        settings=EstimatorSettings(seed=SEED, epsilon=epsilon, directions=directions),
        step=STEP,
        replicas=Replicas(ranks=((0,),)),
        report=lambda: "what was logged",
    )


def scaled_step(model: nn.Module) -> Callable[[int], Tensor]:
    """Return a step whose loss differs between micro-batches: `m + 1` times the plain one."""
    return lambda micro_batch: (micro_batch + 1) * plain_step(model).loss


def losses_around_3(digits: int) -> Callable[[int], Tensor]:
    """Return a step whose loss is 3, and differs from that in the last binary digits when it is perturbed."""
    calls = iter(range(100))

    def step(_: int) -> Tensor:
        return torch.tensor(3.0 + (digits * 2.0**-22 if next(calls) > 0 else 0.0))

    return step


def moved_loss(key: DirectionKey, scale: float) -> float:
    """Return the plain loss with every parameter moved along a direction, computed on a model of its own."""
    model = PlainModel(blocks=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += scale * direction(key, name, parameter.shape)
        return float(plain_step(model).loss)


@pytest.mark.parametrize("difference", ["forward", "central"])
@pytest.mark.parametrize("directions", ["microbatch", "minibatch"])
def test_gradient_is_the_formulas(directions: Directions, difference: str) -> None:
    weights, queries = (0.25, 0.75), 2
    model = PlainModel(blocks=2)

    result = train(
        model,
        scaled_step(model),
        weights=weights,
        directions=directions,
        difference=difference,
        queries=queries,
        exit_queries=1,
    )

    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    untouched = DirectionKey(seed=0, step=0, micro_batch=None, query=0)
    for m, weight in enumerate(weights):
        # On a pipeline of one stage the early exit is the whole model, so it is one more query.
        for q in range(queries + 1):
            shared = directions == "minibatch"
            key = DirectionKey(seed=SEED, step=STEP, micro_batch=None if shared else m, query=q)
            minus, distance = (-EPSILON, 2 * EPSILON) if difference == "central" else (0.0, EPSILON)
            other = moved_loss(key, minus) if minus else moved_loss(untouched, 0.0)
            g = (m + 1) * (moved_loss(key, EPSILON) - other) / distance
            for name, gradient in expected.items():
                gradient += weight * g / (queries + 1) * direction(key, name, gradient.shape)
    assert result.gradients.keys() == expected.keys()
    for name, gradient in result.gradients.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-3, rtol=1e-4)
    assert result.loss == pytest.approx((0.25 + 0.75 * 2) * moved_loss(untouched, 0.0), abs=1e-6)
    assert result.report == ["what was logged"]
    assert result.estimate is not None
    assert result.estimate.dropped == 0


def test_directions_without_a_finite_loss_are_dropped_with_a_warning() -> None:
    model = PlainModel(blocks=2)
    calls = iter(range(100))

    def step(_: int) -> Tensor:
        # The first call is the base forward; the second is the first direction.
        return plain_step(model).loss * (math.nan if next(calls) == 1 else 1.0)

    with pytest.warns(UserWarning, match="1 of 3 directions gave a loss that is not finite and were dropped"):
        result = train(model, step, weights=(1.0,), queries=3)

    assert all(gradient.isfinite().all() for gradient in result.gradients.values())
    assert any(gradient.count_nonzero() for gradient in result.gradients.values())
    assert result.estimate is not None
    assert result.estimate.dropped == 1


def test_without_a_usable_direction_there_is_no_gradient() -> None:
    model = PlainModel(blocks=2)

    with pytest.warns(UserWarning, match="2 of 2 directions"):
        result = train(model, lambda _: plain_step(model).loss * math.nan, weights=(1.0,), queries=2)

    assert result.gradients == {}


@pytest.mark.parametrize("digits", [0, 1])
def test_signal_below_the_arithmetics_resolution_is_warned_about(digits: int) -> None:
    with pytest.warns(
        UserWarning, match="below what the arithmetic resolves.*use a larger epsilon or float32"
    ):
        train(PlainModel(blocks=1), losses_around_3(digits), weights=(1.0,), queries=3)


def test_signal_above_the_arithmetics_resolution_is_not_warned_about() -> None:
    train(PlainModel(blocks=1), losses_around_3(2), weights=(1.0,), queries=3)


def test_parameters_that_do_not_move_need_no_warning() -> None:
    train(PlainModel(blocks=1).requires_grad_(False), losses_around_3(0), weights=(1.0,), queries=3)


def test_micro_batch_without_labels_has_no_part_in_loss_and_gradient() -> None:
    model = PlainModel(blocks=2)

    def step(micro_batch: int) -> Tensor:
        return plain_step(model).loss * (math.nan if micro_batch == 1 else 1.0)

    result = train(model, step, weights=(1.0, 0.0), queries=2)

    assert math.isfinite(result.loss)
    assert all(gradient.isfinite().all() for gradient in result.gradients.values())
    assert result.estimate is not None
    assert {key.micro_batch for key, _ in result.estimate.coefficients} == {0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_learning_rate_0_leaves_parameters_bitwise_equal_over_300_steps(dtype: torch.dtype) -> None:
    model = PlainModel(blocks=1).to(dtype)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    for _ in range(300):
        result = train(model, lambda _: plain_step(model).loss, weights=(1.0,), epsilon=0.05)
        for name, parameter in model.named_parameters():
            parameter.grad = result.gradients[name]
            assert parameter.grad.dtype == dtype
        optimizer.step()

    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
