"""Groups of rows in one forward, each moved along a direction of its own over the shared frozen weights.

A LoRA factor gets a leading dimension of groups, and its product becomes a batched one. So every row can have its own
direction, and several queries of a micro-batch can ride in one forward.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn

from lightning_hybridop.estimation.directions import DirectionKey, direction


class GroupingError(ValueError):
    """A parameter that cannot have a value for each group of rows."""


def factor_layers(module: nn.Module, names: Sequence[str]) -> dict[str, nn.Linear]:
    """Return the `nn.Linear` of each named parameter, all of which must be factors of plain LoRA or rsLoRA.

    Raises:
        GroupingError: naming the first parameter that is not.
    """
    layers: dict[str, nn.Linear] = {}
    for name, layer in module.named_modules():
        # DoRA and other variants do more with their factors than to multiply by them.
        if not isinstance(layer, LoraLinear) or layer.lora_variant:
            continue
        for kind in ("lora_A", "lora_B"):
            for adapter, factor in getattr(layer, kind).items():
                if isinstance(factor, nn.Linear):
                    layers[f"{name}.{kind}.{adapter}.weight"] = factor
    for name in names:
        if name not in layers:
            raise GroupingError(
                f"{name} is not a factor of plain LoRA on a linear layer, which directions of single rows and several "
                "queries in one forward need."
            )
    return {name: layers[name] for name in names}


@contextmanager
def perturbed_in_groups(
    factors: Mapping[str, nn.Linear],
    moves: Sequence[tuple[DirectionKey, float]],
    *,
    rows: int,
    length: int,
) -> Iterator[None]:
    """Inside the block the rows, in `len(moves)` equal groups in order, meet `theta + scale * z(key)`, one for each move.

    `factors` are the layers of the parameters by name. The parameters themselves are not touched. Raises GroupingError
    for a layer that does not see the tokens [rows, length] in this order, as one behind a router of experts.
    """
    with ExitStack() as stack:
        for name, layer in factors.items():
            weight = layer.weight.detach()
            wide = torch.promote_types(weight.dtype, torch.float32)
            original = weight.to(wide)
            drawn = (direction(key, name, weight.shape).to(weight.device, wide) for key, _ in moves)
            moved = [torch.add(original, z, alpha=scale) for z, (_, scale) in zip(drawn, moves, strict=True)]
            stack.enter_context(multiplying_by_group(layer, torch.stack(moved).to(weight.dtype)))
            layer.forward = partial(_checked, layer.forward, name, rows, length)  # type: ignore[method-assign]
        yield


@contextmanager
def multiplying_by_group(layer: nn.Linear, weight_GOI: Tensor) -> Iterator[None]:
    """Inside the block a linear layer multiplies each of G equal groups of its input's tokens by a matrix of its own.

    They are its `grouped_weight`, for those that do not call it but do its arithmetic.
    """
    earlier: dict[str, Any] = {
        name: vars(layer)[name] for name in ("forward", "grouped_weight") if name in vars(layer)
    }
    layer.forward = partial(_forward, layer)  # type: ignore[method-assign]
    # Not a tensor attribute that torch would look after.
    object.__setattr__(layer, "grouped_weight", weight_GOI)
    try:
        yield
    finally:
        del layer.forward, layer.grouped_weight
        vars(layer).update(earlier)


def _checked(
    forward: Callable[[Tensor], Tensor], name: str, rows: int, length: int, input_TI: Tensor
) -> Tensor:
    shape = input_TI.shape[:-1]
    if shape.numel() != rows * length or shape[0] not in (rows, rows * length):
        raise GroupingError(
            f"{name} is called with tokens of shape {tuple(shape)}, where {rows} rows of {length} were expected, so it cannot "
            "have directions for single rows, nor for several queries in one forward; use directions='microbatch' and "
            "queries_per_forward=1."
        )
    return forward(input_TI)


def _forward(layer: nn.Linear, input_TI: Tensor) -> Tensor:
    output = grouped_product(input_TI, vars(layer)["grouped_weight"])
    return output if layer.bias is None else output + layer.bias


def grouped_product(input_TI: Tensor, weight_GOI: Tensor) -> Tensor:
    """Return `input @ weight^T` [..., O], where the input's tokens [..., I] fall into G equal groups in their order."""
    groups, outputs, inputs = weight_GOI.shape
    product = input_TI.reshape(groups, -1, inputs) @ weight_GOI.transpose(1, 2)
    return product.reshape(*input_TI.shape[:-1], outputs)
