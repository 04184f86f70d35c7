"""Which file a stage's frozen weights lie in, and in which form."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from lightning_hybridop.pipeline.executors.cache import stage_folder
from lightning_hybridop.pipeline.executors.parameters import BlockParameters
from lightning_hybridop.pipeline.executors.quantisation import output_axis
from lightning_hybridop.pipeline.executors.weights_file import (
    WeightsFile,
    content_hash,
    open_weights,
    write_index,
    write_weights,
)
from lightning_hybridop.pipeline.stage import adapter_parameters

WEIGHTS = "weights.bin"


def stored_weights(
    blocks: Sequence[nn.Module],
    parameters: BlockParameters,
    dtype: str,
    weights: str | None,
    *,
    needs_vjp: bool,
) -> WeightsFile:
    """Return the file of the blocks' frozen tensors, having written it unless it is in the cache."""
    storage = "-".join(filter(None, (dtype, weights, "adjoint" if needs_vjp else None)))
    folder = stage_folder(content_hash(parameters.frozen), storage)
    found = open_weights(folder / WEIGHTS)
    if found is not None:
        return found
    written = write_stage_weights(folder, blocks, parameters, dtype, weights, needs_vjp=needs_vjp)
    write_index(written)
    return written


def write_stage_weights(
    folder: Path,
    blocks: Sequence[nn.Module],
    parameters: BlockParameters,
    dtype: str,
    weights: str | None,
    *,
    needs_vjp: bool,
) -> WeightsFile:
    """Write the blocks' frozen tensors to a folder and return the file."""
    # What an adapter holds keeps its precision, trained or not.
    adapters = {id(each) for block in blocks for each in adapter_parameters(block)}
    plain = {name: tensor for name, tensor in parameters.frozen.items() if id(tensor) not in adapters}
    return write_weights(
        folder / WEIGHTS,
        parameters.frozen,
        dtypes={name: getattr(torch, dtype) for name, tensor in plain.items() if _is_cast(tensor)},
        axes=_output_axes(blocks, parameters.names, plain) if weights == "int8" else {},
        transposed=needs_vjp,
    )


def _is_cast(tensor: Tensor) -> bool:
    """Tell whether a tensor is a weight; a buffer, such as a table of angles, keeps its precision."""
    return isinstance(tensor, nn.Parameter) and tensor.is_floating_point()


def _output_axes(
    blocks: Sequence[nn.Module], names: Sequence[Mapping[str, str]], plain: Mapping[str, Tensor]
) -> dict[str, int]:
    axes: dict[str, int] = {}
    for block, own in zip(blocks, names, strict=True):
        for name, module in block.named_modules():
            known, axis = own.get(f"{name}.weight"), output_axis(module)
            if axis is not None and known is not None and known in plain:
                axes[known] = axis
    return axes
