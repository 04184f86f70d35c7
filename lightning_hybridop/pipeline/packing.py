"""Nested batches taken apart into JSON and bytes, and put together again: what processes send instead of pickles."""

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_hybridop.pipeline.batches import BatchError
from lightning_hybridop.pipeline.raw_bytes import as_bytes

_PLAIN = (str, int, float, bool, type(None))

_NAMES: dict[torch.dtype, str] = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.uint16, torch.uint32, torch.uint64),
    )
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in _NAMES.items()}
"""The dtypes that are sent, by their names."""

MOST_BYTES = 2**36
"""No message between processes is longer."""


def pack(value: Any) -> bytes:
    """Return `value` as bytes: dicts, lists and tuples of tensors, strings, numbers and None, nested at will.

    Raises:
        BatchError: there is something else in it.
    """
    tensors: list[Tensor] = []
    described = _describe(value, tensors)
    shapes = [[_NAMES[tensor.dtype], list(tensor.shape)] for tensor in tensors]
    header = json.dumps([described, shapes]).encode()
    tensors = [tensor.to("cpu").contiguous() for tensor in tensors]
    parts = [as_bytes(tensor).numpy().tobytes() for tensor in tensors]
    return b"".join([len(header).to_bytes(8, "little"), header, *parts])


def unpack(packed: bytes | bytearray) -> Any:
    """Return what `pack` was given; mappings of any kind come back as dicts, tensors on the CPU.

    Whatever the bytes are, nothing is run, and no more memory is taken than they fill.

    Raises:
        BatchError: `pack` did not make them.
    """
    try:
        start = 8 + int.from_bytes(packed[:8], "little")
        if len(packed) < 8 or start > len(packed):
            raise ValueError(f"a header of {start} bytes")
        described, shapes = json.loads(packed[8:start])
        tensors = []
        for name, shape in shapes:
            dtype = DTYPES[name]
            stop = start + _elements(shape) * dtype.itemsize
            if stop > len(packed):
                raise ValueError(f"a tensor of shape {shape}")
            # A copy: tensors of one message must not keep each other's memory.
            content = bytearray(packed[start:stop])
            tensors.append(
                torch.frombuffer(content, dtype=dtype).view(shape)
                if content
                else torch.empty(shape, dtype=dtype)
            )
            start = stop
        if start != len(packed):
            raise ValueError(f"{len(packed) - start} bytes too many")
        return _restore(described, tensors)
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        RuntimeError,
        RecursionError,
    ) as error:
        raise BatchError(
            f"{len(packed)} bytes were received that are no packed batch ({type(error).__name__}: {error}); somebody else "
            "than this run's processes may reach its ports."
        ) from error


def checked_length(length: Tensor) -> int:
    """Return how many bytes a message of one number announces; BatchError for more than any has."""
    announced = int(length)
    if not 0 <= announced <= MOST_BYTES:
        raise BatchError(
            f"A message of {announced} bytes was announced, more than the {MOST_BYTES} that any can have; somebody else than "
            "this run's processes may reach its ports."
        )
    return announced


def can_be_packed(value: Any, *, exactly: bool = False) -> bool:
    """Tell whether `pack` takes `value`; with `exactly`, whether it also comes back with all its types."""
    try:
        _describe(value, [], exactly=exactly)
    except (BatchError, RecursionError):
        return False
    return True


def _elements(shape: Any) -> int:
    """Return how many elements a shape has; ValueError for anything else than a list of sizes."""
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 2**48 for size in shape):
        raise ValueError(f"a shape of {shape!r:.60}")
    return math.prod(shape)


def _describe(value: Any, tensors: list[Tensor], *, exactly: bool = False) -> Any:
    if isinstance(value, Tensor):
        if value.dtype not in _NAMES or value.layout != torch.strided:
            raise BatchError(f"A tensor of {value.dtype}, {value.layout} cannot be sent to other processes.")
        if exactly and (type(value) is not Tensor or value.requires_grad):
            raise BatchError(f"A {type(value).__name__} would come back as a plain tensor.")
        tensors.append(value.detach())
        return {"tensor": len(tensors) - 1}
    if type(value) is dict or (isinstance(value, Mapping) and not exactly):
        return {
            "mapping": [
                [_plain(key), _describe(item, tensors, exactly=exactly)] for key, item in value.items()
            ]
        }
    if type(value) in (list, tuple):
        return {type(value).__name__: [_describe(item, tensors, exactly=exactly) for item in value]}
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
        if type(content) is not int or content < 0:
            raise ValueError(f"a tensor of number {content!r:.60}")
        return tensors[content]
    if kind == "mapping":
        return {key: _restore(item, tensors) for key, item in content}
    if kind in ("list", "tuple"):
        items = [_restore(item, tensors) for item in content]
        return tuple(items) if kind == "tuple" else items
    if kind != "value" or type(content) not in _PLAIN:
        raise ValueError(f"a {kind!r:.60}")
    return content
