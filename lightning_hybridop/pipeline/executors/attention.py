"""Scaled dot-product attention in elementary operators, exact also where a row of the mask is empty."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Takes every probability to exactly 0, and is finite in float16 as well, unlike the lowest float32.
_NOTHING = -3.0e4


class PlainAttention(TorchFunctionMode):
    """Inside the block `torch.nn.functional.scaled_dot_product_attention` is made of elementary operators."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: Any = None
    ) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            return _attention(*arguments, **(keywords or {}))
        return function(*arguments, **(keywords or {}))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p > 0.0:
        raise ValueError("attention dropout cannot be traced")  # refused before by name
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = _repeated(key, repeats), _repeated(value, repeats)
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is None:
        return torch.softmax(scores, dim=-1) @ value
    if attn_mask.dtype == torch.bool:
        allowed = attn_mask
        addend = torch.where(allowed, 0.0, _NOTHING)
    else:
        allowed = attn_mask != float("-inf")
        addend = torch.where(allowed, attn_mask, _NOTHING)
    output = torch.softmax(scores + addend.to(scores.dtype), dim=-1) @ value
    # A row that may see nothing gets zeros, as torch gives it.
    return output * allowed.to(output.dtype).amax(dim=-1, keepdim=True)


def _repeated(heads: Tensor, repeats: int) -> Tensor:
    *rows, count, length, width = heads.shape
    return (
        heads.unsqueeze(-3)
        .expand(*rows, count, repeats, length, width)
        .reshape(*rows, count * repeats, length, width)
    )
