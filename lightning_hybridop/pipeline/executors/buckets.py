"""Static shapes: sequences are padded up to a few lengths, so that few graphs are compiled."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_hybridop.pipeline.executors.executor import ExecutorError

# Powers of two and what lies halfway between them.
DEFAULT_LENGTHS = (32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)


def bucket(length: int, lengths: Sequence[int]) -> int:
    """Return the length that a sequence is padded to: the smallest of `lengths` that holds it.

    Raises:
        ExecutorError: it is longer than all of them.
    """
    for each in sorted(lengths):
        if length <= each:
            return each
    raise ExecutorError(
        f"The batch has rows of {length} tokens, but the longest that this stage's executor is compiled for is "
        f"{max(lengths)}; cut the rows, or use executor=torch for this stage."
    )


def padded(tensor: Tensor, name: str, *, length: int, to: int) -> Tensor:
    """Return a tensor of the batch with the dimensions that run along the sequence padded from `length` to `to`.

    Behind a mask no real position sees a padding one. Everything else gets zeros: what it is does not matter then.
    """
    dims = _sequence_dims(tensor, name, length)
    if not dims or to == length:
        return tensor
    extra = to - length
    rank = tensor.dim()
    is_mask = "mask" in name or tensor.dtype == torch.bool
    hidden_from = _masking(tensor) if is_mask and rank - 1 in dims else 0
    for dim in sorted(dims, reverse=True):
        widths = [0, 0] * (rank - 1 - dim) + [0, extra]
        # A padding position may see all: a row of nothing but masked keys is undefined in many kernels.
        value = hidden_from if dim == rank - 1 else (1 if tensor.dtype == torch.bool else 0)
        tensor = pad(tensor, widths, value=value)
    return tensor


def _masking(tensor: Tensor) -> float:
    # Where a whole row has the lowest number, the keys of the row must still be told from padding.
    return float("-inf") if tensor.is_floating_point() else 0


def _sequence_dims(tensor: Tensor, name: str, length: int) -> tuple[int, ...]:
    """Return which dimensions of a tensor run along the sequence, judged by where its length is usual."""
    rank, last = tensor.dim(), tensor.dim() - 1
    runs = [size == length for size in tensor.shape]
    if rank == 0:
        return ()
    if (
        rank >= 3
        and runs[last]
        and runs[last - 1]
        and (rank > 3 or "mask" in name or tensor.dtype == torch.bool)
    ):
        return (last - 1, last)  # a mask of queries and keys
    if rank == 1:
        return (0,) if runs[0] else ()
    if runs[1] and (rank != 4 or not runs[last]):
        return (1,)  # [B, T, ...]
    if runs[last]:
        return (last,)  # a mask or bias of keys
    if rank == 4 and runs[2]:
        return (2,)  # [B, heads, T, ...]
    return (0,) if rank == 2 and runs[0] else ()
