"""How tensors travel between stages: bytes of one message, and back. Pure functions.

A format is a dtype of torch's. In int8, which is no dtype of hidden states, it means integers with a scale for each row of
the last dimension, that is for each token.
"""

import math

import torch
from torch import Tensor

from lightning_hybridop.pipeline.raw_bytes import as_bytes

_INT8_STEPS = 127
_SCALE_BYTES = 4


def encoded_bytes(shape: tuple[int, ...], form: torch.dtype) -> int:
    """Return the size in bytes of a message with a tensor of this shape in this format."""
    elements = math.prod(shape)
    scales = _rows(shape) * _SCALE_BYTES if form == torch.int8 else 0
    return scales + elements * form.itemsize


def encode(tensor: Tensor, form: torch.dtype) -> Tensor:
    """Return one contiguous uint8 buffer in host memory, of `encoded_bytes`, for a floating-point tensor.

    float16 saturates: finite values beyond its range become the largest ones that it has. int8 rounds to the nearest of 255
    steps between the largest magnitude of a row and its negative; a row of zeros stays exact, and a row with a value that
    is not finite arrives as NaN, so that a loss computed from it is not finite either.
    """
    # Before any arithmetic: a device may lack the dtype.
    tensor = tensor.detach().cpu()
    if form == torch.int8:
        return _quantised(tensor)
    if form == torch.float16 and tensor.dtype != torch.float16:
        # bfloat16 has no 65504: clamped in it, values become 65536, which float16 has not.
        tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        largest = torch.finfo(torch.float16).max
        tensor = torch.where(tensor.isinf(), tensor, tensor.clamp(-largest, largest))
    return as_bytes(tensor.to(form))


def decode(message: Tensor, shape: tuple[int, ...], form: torch.dtype) -> Tensor:
    """Return the tensor of this shape that was encoded in this format; one that came as int8 is float32."""
    if form != torch.int8:
        return message.view(form).view(shape)
    scales = message[: _rows(shape) * _SCALE_BYTES].view(torch.float32)
    steps = message[_rows(shape) * _SCALE_BYTES :].view(torch.int8).view(shape)
    return steps.float() * scales.view(*shape[:-1], 1)


def _quantised(tensor: Tensor) -> Tensor:
    """Return the rows' scales in float32, and behind them all elements in int8."""
    values = tensor.float()
    # amax of a row with a NaN is NaN, and so is 0 * inf: either spoils the whole row, and nothing else.
    scales = values.abs().amax(dim=-1, keepdim=True) / _INT8_STEPS
    usable = (scales > 0) & scales.isfinite()
    steps = torch.where(usable, values / torch.where(usable, scales, 1.0), 0.0)
    steps = steps.round().clamp(-_INT8_STEPS, _INT8_STEPS).to(torch.int8)
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    parts = (scales.contiguous().reshape(-1), steps.contiguous().reshape(-1))
    return torch.cat([part.view(torch.uint8) for part in parts])


def _rows(shape: tuple[int, ...]) -> int:
    return math.prod(shape[:-1])
