"""Tensors as the bytes that they consist of: Gloo's collectives know neither bfloat16 nor int16, and no other devices."""

import torch
from torch import Tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor of any shape and dtype as a vector of uint8 in host memory, in order of rows."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    # A single element counts as contiguous whatever its stride, which its bytes would take over.
    packed = flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
    return packed.view(torch.uint8)
