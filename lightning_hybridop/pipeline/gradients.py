"""Between backward and step: gradients of all stages, clipping per role, learning rates per role."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer


@contextmanager
def gradients_of_all_stages(
    owned: Sequence[Mapping[str, nn.Parameter]], stage: int, rank_of_stage: Sequence[int]
) -> Iterator[None]:
    """Inside the block every rank holds the gradients of all stages, afterwards those of its own `stage`. Collective.

    `owned` are the trainable parameters of each stage, of all of which every rank has a copy.
    """
    others = [(i, list(parameters.values())) for i, parameters in enumerate(owned) if i != stage]
    for source, parameters in sorted([*others, (stage, list(owned[stage].values()))]):
        has_gradient = torch.tensor(
            [parameter.grad is not None for parameter in parameters], dtype=torch.uint8
        )
        dist.broadcast(has_gradient, rank_of_stage[source])
        with_gradient = [p for p, flag in zip(parameters, has_gradient.tolist(), strict=True) if flag]
        for dtype in sorted({parameter.dtype for parameter in with_gradient}, key=str):
            group = [parameter for parameter in with_gradient if parameter.dtype == dtype]
            if source == stage:
                flat = torch.cat([p.grad.reshape(-1).cpu() for p in group if p.grad is not None])
            else:
                flat = torch.empty(sum(parameter.numel() for parameter in group), dtype=dtype)
            # As bytes: Gloo's collectives know neither bfloat16 nor int16.
            dist.broadcast(flat.view(torch.uint8), rank_of_stage[source])
            if source != stage:
                for parameter, part in zip(group, torch.split(flat, [p.numel() for p in group]), strict=True):
                    parameter.grad = part.view_as(parameter).to(parameter.device, copy=True)
    try:
        yield
    finally:
        # An optimizer moves what has a gradient.
        for _, parameters in others:
            for parameter in parameters:
                parameter.grad = None


def install_gradients(
    parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor], *, share: float
) -> None:
    """Add a mini-batch's gradients, times its share of the optimizer's step, to those of the parameters of these names."""
    for name, gradient in gradients.items():
        parameter = parameters[name]
        installed = gradient * share
        parameter.grad = installed if parameter.grad is None else parameter.grad + installed


def square_of_norm(gradients: Sequence[Tensor]) -> float:
    """Return the sum of squares over all gradients, accumulated in float32 or wider; 0 without any."""
    norms = [
        torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
        for gradient in gradients
    ]
    return math.fsum(float(norm) ** 2 for norm in norms)


def clip_to_norm(gradients: Sequence[Tensor], *, limit: float, norm: float) -> None:
    """Scale gradients in place so that `norm`, of which they may be a part, comes to at most `limit`."""
    factor = min(1.0, limit / (norm + 1e-6))
    for gradient in gradients:
        gradient.mul_(factor)


def clip_to_value(gradients: Sequence[Tensor], *, limit: float) -> None:
    """Clamp every element of the gradients in place to at most `limit` in magnitude."""
    for gradient in gradients:
        gradient.clamp_(-limit, limit)


@contextmanager
def scaled_learning_rates(optimizer: Optimizer, scale: float) -> Iterator[None]:
    """Inside the block all learning rates are multiplied by `scale`; schedulers and checkpoints never see that.

    A rate that a hook sets inside the block is meant to stay, and does.
    """
    groups = [group for group in optimizer.param_groups if "lr" in group]
    rates = [group["lr"] for group in groups]
    scaled = [rate * scale for rate in rates]
    for group, rate in zip(groups, scaled, strict=True):
        group["lr"] = rate
    try:
        yield
    finally:
        for group, rate, temporary in zip(groups, rates, scaled, strict=True):
            if group["lr"] is temporary:
                group["lr"] = rate
