"""Weights as int8 with one scale for each output channel, symmetric around zero."""

import torch
from torch import Tensor, nn


def quantised(weight: Tensor, *, axis: int) -> tuple[Tensor, Tensor]:
    """Return a 2-D weight as int8 and its float32 scales, one for each entry along `axis`."""
    wide = weight.float()
    scale = (wide.abs().amax(dim=1 - axis) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide / scale.unsqueeze(1 - axis)).round().clamp(-127, 127).to(torch.int8), scale


def dequantised(weight: Tensor, scale: Tensor, *, axis: int) -> Tensor:
    """Return the float32 weight that an int8 one and its scales stand for."""
    return weight.float() * scale.unsqueeze(1 - axis)


def output_axis(module: nn.Module) -> int | None:
    """Return the dimension of output channels of a linear layer's weight, None of a module that is not one."""
    if isinstance(module, nn.Linear):
        return 0
    # GPT-2's linear layers hold their weight the other way round.
    return 1 if type(module).__name__ == "Conv1D" else None
