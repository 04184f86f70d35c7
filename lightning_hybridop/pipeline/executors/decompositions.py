"""Which operators a traced graph is made of: small ones that every inference runtime has."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.nn.functional import pad

aten = torch.ops.aten

# Core operators that are themselves made of smaller ones.
_FURTHER = (
    aten.gelu,
    aten.gelu_backward,
    aten.native_layer_norm,
    aten.native_layer_norm_backward,
    aten.native_group_norm,
    aten.silu,
    aten.silu_backward,
    aten.stack,
    aten.rsub,
    aten.threshold_backward,
    aten.tanh_backward,
    aten.sigmoid_backward,
    aten.hardtanh,
    aten.leaky_relu,
    aten.elu,
    aten.softplus,
    aten.masked_fill,
    aten._softmax_backward_data,
    aten.native_dropout,
    aten.tril,
    aten.triu,
)


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return how operators are decomposed; the gradient of a slice is padding."""
    table = dict(core_aten_decompositions())
    table.update(get_decompositions(list(_FURTHER)))
    table[aten.addmm.default] = _product_and_bias
    table[aten.var_mean.correction] = _variance_and_mean
    table[aten.var.correction] = _variance
    table[aten.split_with_sizes.default] = _split
    table[aten.slice_backward.default] = _slice_backward
    table[aten.select_backward.default] = _select_backward
    return table


def _product_and_bias(
    bias: Tensor, first: Tensor, second: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    product = first @ second
    return (bias if beta == 1 else bias * beta) + (product if alpha == 1 else product * alpha)


def _variance_and_mean(
    values: Tensor, dim: list[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims = list(range(values.dim())) if dim is None else dim
    mean = values.mean(dims, keepdim=True)
    count = math.prod(values.shape[each] for each in dims)
    deviations = (values - mean) ** 2
    variance = deviations.sum(dims, keepdim=keepdim) / (count - (1 if correction is None else correction))
    return variance, mean if keepdim else values.mean(dims)


def _variance(
    values: Tensor, dim: list[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    return _variance_and_mean(values, dim, correction=correction, keepdim=keepdim)[0]


def _split(values: Tensor, sizes: list[int], dim: int = 0) -> list[Tensor]:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [values.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True)]


def _slice_backward(gradient: Tensor, sizes: list[int], dim: int, start: int, end: int, step: int) -> Tensor:
    size = sizes[dim]
    if step > 1:
        # Zeros behind each entry, then cut to where the next slice would begin.
        moved = gradient.movedim(dim, -1)
        spread = pad(moved.unsqueeze(-1), (0, step - 1)).flatten(-2)
        end = start + spread.shape[-1]
        gradient = spread[..., : min(end, size) - start].movedim(-1, dim)
    return _between_zeros(gradient, dim, start, size)


def _select_backward(gradient: Tensor, sizes: list[int], dim: int, index: int) -> Tensor:
    dim %= len(sizes)
    return _between_zeros(gradient.unsqueeze(dim), dim, index % sizes[dim], sizes[dim])


def _between_zeros(part: Tensor, dim: int, start: int, size: int) -> Tensor:
    """Return zeros of `size` along `dim` with `part` in them from `start` on."""
    dim %= part.dim()
    before, after = start, size - start - part.shape[dim]
    widths = [0, 0] * (part.dim() - 1 - dim) + [before, after]
    return pad(part, widths) if before or after else part.clone()
