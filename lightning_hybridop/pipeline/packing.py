"""Nested batches taken apart into JSON and bytes, and put together again: what processes send instead of pickles."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_hybridop.pipeline.batches import BatchError

_PLAIN = (str, int, float, bool, type(None))


def pack(value: Any) -> bytes:
    """Return `value` as bytes: dicts, lists and tuples of tensors, strings, numbers and None, nested at will.

    Raises:
        BatchError: there is something else in it.
    """
    tensors: list[Tensor] = []
    described = _describe(value, tensors)
    shapes = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    header = json.dumps([described, shapes]).encode()
    parts = [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
    return b"".join([len(header).to_bytes(8, "little"), header, *parts])


def unpack(packed: bytes | bytearray) -> Any:
    """Return what `pack` was given; mappings of any kind come back as dicts, tensors on the CPU."""
    start = 8 + int.from_bytes(packed[:8], "little")
    described, shapes = json.loads(packed[8:start])
    tensors = []
    for name, shape in shapes:
        dtype = getattr(torch, name)
        empty = torch.empty(shape, dtype=dtype)
        stop = start + empty.numel() * empty.element_size()
        if stop > start:
            # A copy: tensors of one message must not keep each other's memory.
            empty = torch.frombuffer(bytearray(packed[start:stop]), dtype=dtype).view(shape)
        tensors.append(empty)
        start = stop
    return _restore(described, tensors)


def can_be_packed(value: Any) -> bool:
    """Tell whether `pack` takes `value`."""
    try:
        _describe(value, [])
    except BatchError:
        return False
    return True


def _describe(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value.detach().to("cpu").contiguous())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Mapping):
        return {"mapping": [[_plain(key), _describe(item, tensors)] for key, item in value.items()]}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_describe(item, tensors) for item in value]}
    return {"value": _plain(value)}


def _plain(value: Any) -> Any:
    if type(value) not in _PLAIN:
        raise BatchError(
            f"A {type(value).__name__} cannot be sent to other processes; use dicts, lists and tuples of tensors, "
            "strings and numbers."
        )
    return value


def _restore(described: Any, tensors: list[Tensor]) -> Any:
    ((kind, content),) = described.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "mapping":
        return {key: _restore(item, tensors) for key, item in content}
    if kind in ("list", "tuple"):
        items = [_restore(item, tensors) for item in content]
        return tuple(items) if kind == "tuple" else items
    return content
