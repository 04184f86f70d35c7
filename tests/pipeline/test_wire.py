"""How tensors travel: sizes, rounding, saturation, and values that are not finite."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybridop.pipeline.wire import decode, encode, encoded_bytes

SHAPE = (2, 3, 5)


def travelled(tensor: torch.Tensor, form: torch.dtype) -> torch.Tensor:
    shape = tuple(tensor.shape)
    message = encode(tensor, form)
    assert message.dtype == torch.uint8 and message.ndim == 1 and message.is_contiguous()
    assert message.numel() == encoded_bytes(shape, form)
    return decode(message, shape, form)


@pytest.mark.parametrize(
    ("form", "size"),
    [(torch.float32, 120), (torch.bfloat16, 60), (torch.float16, 60), (torch.int8, 30 + 6 * 4)],
)
def test_a_message_is_as_long_as_its_format_says(form: torch.dtype, size: int) -> None:
    assert encoded_bytes(SHAPE, form) == size
    assert encode(torch.randn(SHAPE), form).numel() == size


@pytest.mark.parametrize("form", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_arrives_as_a_cast_would_make_it(form: torch.dtype) -> None:
    tensor = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).transpose(0, 1)  # not contiguous
    assert torch.equal(travelled(tensor, form), tensor.to(form))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_float16_saturates_where_a_cast_would_overflow(dtype: torch.dtype) -> None:
    far = 1e300 if dtype == torch.float64 else 1e38
    tensor = torch.tensor([[far, -65536.0, 3.0, math.inf, -math.inf, math.nan]], dtype=dtype)
    arrived = travelled(tensor, torch.float16)
    largest = torch.finfo(torch.float16).max
    assert arrived[0, :3].tolist() == [largest, -largest, 3.0]
    assert arrived[0, 3:5].tolist() == [math.inf, -math.inf]
    assert math.isnan(arrived[0, 5])


def test_int8_rounds_each_row_to_the_nearest_of_its_steps() -> None:
    tensor = torch.randn(4, 7, 33, generator=torch.Generator().manual_seed(1))
    tensor[0, 0] *= 1e-6
    tensor[1, 2] *= 1e6
    tensor[2, 3, 5] = 1e4  # one value far out, as language models have them
    arrived = travelled(tensor, torch.int8)
    steps = tensor.abs().amax(-1, keepdim=True) / 127
    expected = (tensor.double() / steps.double()).round() * steps.double()
    torch.testing.assert_close(arrived.double(), expected, rtol=1e-6, atol=0.0)
    assert bool(((arrived - tensor).abs() <= steps * 0.5001).all())
    # The largest value of a row is met exactly, up to float32's own rounding.
    largest = tensor.abs().amax(-1)
    torch.testing.assert_close(arrived.abs().amax(-1), largest, rtol=3e-7, atol=0.0)


def test_int8_keeps_rows_of_zeros_and_of_the_smallest_numbers_finite() -> None:
    tensor = torch.zeros(3, 4)
    tensor[1] = 1e-44
    tensor[2, 0] = 3e38
    arrived = travelled(tensor, torch.int8)
    assert torch.equal(arrived[0], torch.zeros(4))
    assert bool(arrived.isfinite().all())
    assert bool((arrived[1].abs() <= 2e-44).all())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_spoils_its_row_in_int8_and_no_other(value: float) -> None:
    tensor = torch.ones(2, 4)
    tensor[1, 2] = value
    arrived = travelled(tensor, torch.int8)
    assert torch.equal(arrived[0], torch.ones(4))
    assert bool(arrived[1].isnan().all())


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=6, max_size=6),
    form=st.sampled_from([torch.bfloat16, torch.float16, torch.int8]),
)
def test_no_finite_value_arrives_far_off(values: list[float], form: torch.dtype) -> None:
    tensor = torch.tensor(values).view(2, 3)
    arrived = travelled(tensor, form).float()
    if form == torch.int8:
        allowed = tensor.abs().amax(-1, keepdim=True).double() * (0.5 / 127) * 1.0001 + 1e-44
    else:
        resolution = torch.finfo(form)
        allowed = tensor.abs().double() * resolution.eps + resolution.tiny
        tensor = tensor.clamp(-resolution.max, resolution.max)
    # bfloat16 rounds the very largest numbers of float32 up to infinity, as a cast does.
    kept = arrived.isfinite()
    assert bool(((arrived.double() - tensor.double()).abs() <= allowed)[kept].all())
