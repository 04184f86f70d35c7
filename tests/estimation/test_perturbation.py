import hashlib
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from lightning_hybridop.estimation.directions import DirectionKey, direction
from lightning_hybridop.estimation.perturbation import accumulate_direction, perturbed

KEY = DirectionKey(seed=0, step=0, micro_batch=None, query=0)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (4, 3), "b": (7,), "c": ()}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in shapes.items()
    }


def bits(parameter: Tensor) -> bytes:
    return parameter.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("raises", [False, True], ids=["", "body raises"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parameters_are_bitwise_the_same_after_300_rounds(dtype: torch.dtype, raises: bool) -> None:
    moved = parameters(dtype)
    before = {name: bits(parameter) for name, parameter in moved.items()}
    storage = {name: parameter.data_ptr() for name, parameter in moved.items()}

    for query in range(300):
        key = DirectionKey(seed=0, step=0, micro_batch=1, query=query)
        with suppress(ArithmeticError), perturbed(moved, key, 0.03):
            assert all(bits(parameter) != before[name] for name, parameter in moved.items() if parameter.ndim)
            if raises:
                raise ArithmeticError

    assert {name: bits(parameter) for name, parameter in moved.items()} == before
    assert {name: parameter.data_ptr() for name, parameter in moved.items()} == storage


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-3, -0.5])
def test_inside_parameters_hold_the_sum_rounded_once(dtype: torch.dtype, scale: float) -> None:
    moved = parameters(dtype)
    expected = {
        name: parameter.detach().double() + scale * direction(KEY, name, parameter.shape).double()
        for name, parameter in moved.items()
    }

    with perturbed(moved, KEY, scale):
        for name, parameter in moved.items():
            assert parameter.dtype == dtype
            # Half a unit in the last place, and what a float32 sum is off by before that.
            resolution = torch.finfo(dtype).eps / 2 + (0 if dtype == torch.float64 else 2.0**-22)
            error = (parameter.detach().double() - expected[name]).abs()
            assert (error <= resolution * (expected[name].abs() + abs(scale) * 5)).all()


def test_small_perturbation_of_float64_is_not_rounded_to_float32() -> None:
    parameter = nn.Parameter(torch.ones(100, dtype=torch.float64))

    with perturbed({"p": parameter}, KEY, 1e-9):
        difference = (parameter.detach() - 1) / 1e-9

    torch.testing.assert_close(difference, direction(KEY, "p", parameter.shape).double(), atol=1e-6, rtol=0.0)


def test_only_the_given_parameters_move_and_gradients_stay() -> None:
    module = nn.Linear(3, 2)
    module(torch.ones(1, 3)).sum().backward()
    bias, gradient = bits(module.bias), module.weight.grad

    with perturbed({"weight": module.weight}, KEY, 1.0):
        assert bits(module.bias) == bias
        assert module.weight.grad is gradient
        assert module.weight.requires_grad


def test_replayed_direction_is_the_one_that_perturbed() -> None:
    moved = {name: nn.Parameter(torch.zeros(2, 3)) for name in ("a", "b", "c")}
    replayed = {name: torch.zeros(2, 3) for name in reversed(moved)}

    with perturbed(moved, KEY, 1.0):
        perturbing = {name: hashlib.sha256(bits(parameter)).hexdigest() for name, parameter in moved.items()}
    torch.manual_seed(7)  # whatever happens between the two
    accumulate_direction(replayed, KEY, 1.0)

    assert {name: hashlib.sha256(bits(z)).hexdigest() for name, z in replayed.items()} == perturbing
    assert len(set(perturbing.values())) == 3


def test_directions_accumulate() -> None:
    other = DirectionKey(seed=0, step=0, micro_batch=None, query=1)
    gradients = {"a": torch.ones(2, 3)}

    accumulate_direction(gradients, KEY, 2.0)
    accumulate_direction(gradients, other, -0.5)

    shape = torch.Size([2, 3])
    expected = 1 + 2.0 * direction(KEY, "a", shape) - 0.5 * direction(other, "a", shape)
    torch.testing.assert_close(gradients["a"], expected)
