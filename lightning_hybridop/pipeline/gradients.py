"""What differs between roles when gradients are applied: their norm and their learning rate."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer


def square_of_norm(gradients: Sequence[Tensor]) -> float:
    """Return the sum of squares over all gradients, accumulated in float32; 0 without any."""
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return float(torch.stack(norms).square().sum()) if norms else 0.0


def clip_to_norm(gradients: Sequence[Tensor], *, limit: float, norm: float) -> None:
    """Scale gradients in place so that `norm`, of which they may be a part, comes to at most `limit`."""
    factor = min(1.0, limit / (norm + 1e-6))
    for gradient in gradients:
        gradient.mul_(factor)


@contextmanager
def scaled_learning_rates(optimizer: Optimizer, scale: float) -> Iterator[None]:
    """Inside the block all learning rates are multiplied by `scale`; schedulers and checkpoints never see that.

    A rate that a hook sets inside the block is meant to stay, and does.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    scaled = [rate * scale for rate in rates]
    for group, rate in zip(optimizer.param_groups, scaled, strict=True):
        group["lr"] = rate
    try:
        yield
    finally:
        for group, rate, temporary in zip(optimizer.param_groups, rates, scaled, strict=True):
            if group["lr"] is temporary:
                group["lr"] = rate
