"""The tensors that a stage's blocks hold: adapters, which are inputs of their graph, and frozen weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockParameters:
    """Every parameter and buffer of some blocks, each under one name.

    `adapters` are the trainable parameters, `frozen` everything else. `names` gives, for each block, the name here of
    each of its tensors by the block's own: one tensor may have several of those, within a block or in several blocks.
    """

    adapters: Mapping[str, nn.Parameter]
    frozen: Mapping[str, Tensor]
    names: tuple[Mapping[str, str], ...]


def block_parameters(blocks: Sequence[nn.Module], *, first: int) -> BlockParameters:
    """Return the tensors of `blocks`, the first of which is the model's block number `first`."""
    known: dict[int, str] = {}
    adapters: dict[str, nn.Parameter] = {}
    frozen: dict[str, Tensor] = {}
    names: list[dict[str, str]] = []
    for index, block in enumerate(blocks):
        own: dict[str, str] = {}
        tensors = [
            *block.named_parameters(remove_duplicate=False),
            *block.named_buffers(remove_duplicate=False),
        ]
        for name, tensor in tensors:
            own[name] = known.setdefault(id(tensor), f"{first + index}.{name}")
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                adapters[own[name]] = tensor
            else:
                frozen[own[name]] = tensor
        names.append(own)
    return BlockParameters(adapters=adapters, frozen=frozen, names=tuple(names))
