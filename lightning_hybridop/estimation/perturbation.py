"""Parameters moved along a direction for one forward, and put back exactly."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_hybridop.estimation.directions import DirectionKey, direction


@contextmanager
def perturbed(parameters: Mapping[str, nn.Parameter], key: DirectionKey, scale: float) -> Iterator[None]:
    """Inside the block every parameter holds `theta + scale * z`; afterwards its own storage, untouched.

    The sum is formed in float32 or wider and rounded once to the parameter's dtype. Because the original storage
    is set aside instead of being subtracted from, parameters stay bitwise equal in every dtype.
    """
    originals = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            original = originals[name]
            z = direction(key, name, original.shape).to(original.device)
            wide = torch.promote_types(original.dtype, torch.float32)
            parameter.data = torch.add(original.to(wide), z.to(wide), alpha=scale).to(original.dtype)
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = originals[name]


def accumulate_direction(gradients: Mapping[str, Tensor], key: DirectionKey, coefficient: float) -> None:
    """Add `coefficient * z` of one direction to float32 `gradients`, in place."""
    for name, gradient in gradients.items():
        gradient.add_(direction(key, name, gradient.shape).to(gradient.device), alpha=coefficient)
