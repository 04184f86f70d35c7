"""The frozen weights of a stage in one file, which every graph of the stage reads."""

import dataclasses
import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_hybridop.pipeline.executors.quantisation import dequantised, quantised

# Where a tensor may be mapped into memory by itself.
_PAGE = 4096

TRANSPOSED = ".transposed"
"""Ends the name of the transposed copy of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where in the file a tensor lies. With `scale`, the name of another one, it holds int8: value times scale.

    `axis` is the dimension that the scale runs along.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int
    scale: str | None = None
    axis: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFile:
    """A written file and what lies in it, by name."""

    path: Path
    tensors: Mapping[str, StoredTensor]

    def read(self, name: str) -> Tensor:
        """Return a tensor as float32 if it has a floating point, else in its own dtype; mapped, not copied, if it can be."""
        stored = self.tensors[name]
        mapped = np.memmap(self.path, mode="r", dtype=np.uint8, offset=stored.offset, shape=(stored.length,))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            flat = torch.from_numpy(np.asarray(mapped))
        tensor = flat.view(getattr(torch, stored.dtype)).view(stored.shape)
        if stored.scale is not None:
            assert stored.axis is not None
            return dequantised(tensor, self.read(stored.scale), axis=stored.axis)
        return tensor.float() if tensor.is_floating_point() else tensor


def content_hash(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of the names, shapes, dtypes and values of tensors."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()[:24]


def write_weights(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    dtypes: Mapping[str, torch.dtype],
    axes: Mapping[str, int],
    transposed: bool,
) -> WeightsFile:
    """Write tensors, whole or not at all, and return the file.

    Those in `dtypes` are cast to that one; those in `axes` are written as int8, one scale for each entry along the
    axis, which is the one of output channels. With `transposed` a square matrix is also written the other way round.
    """
    stored: dict[str, StoredTensor] = {}
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            for name, tensor, scale, axis in _parts(tensors, dtypes, axes, transposed=transposed):
                file.write(b"\0" * (-file.tell() % _PAGE))
                stored[name] = StoredTensor(
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    shape=tuple(tensor.shape),
                    offset=file.tell(),
                    length=tensor.numel() * tensor.element_size(),
                    scale=scale,
                    axis=axis,
                )
                file.write(_bytes(tensor))
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
    return WeightsFile(path=path, tensors=stored)


def write_index(weights: WeightsFile) -> None:
    """Write beside a file what lies where, so that `open_weights` finds it."""
    index = {name: dataclasses.asdict(tensor) for name, tensor in weights.tensors.items()}
    write_whole(_index_path(weights.path), json.dumps(index).encode())


def open_weights(path: Path) -> WeightsFile | None:
    """Return a file written before with its index, None if there is none."""
    try:
        index = json.loads(_index_path(path).read_text(encoding="utf-8"))
        tensors = {
            name: StoredTensor(**{**fields, "shape": tuple(fields["shape"])})
            for name, fields in index.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # none, or a damaged one
        return None
    size = max((tensor.offset + tensor.length for tensor in tensors.values()), default=0)
    if not path.is_file() or path.stat().st_size < size:
        return None
    return WeightsFile(path=path, tensors=tensors)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all."""
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def _parts(
    tensors: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype],
    axes: Mapping[str, int],
    *,
    transposed: bool,
) -> Iterator[tuple[str, Tensor, str | None, int | None]]:
    """Yield what is written: names, values, and of int8 the scale's name and axis."""
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        twice = transposed and tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]
        if name in axes:
            scale = f"{name}.scale"
            whole, scales = quantised(tensor, axis=axes[name])
            yield name, whole, scale, axes[name]
            yield scale, scales, None, None
            if twice:
                yield name + TRANSPOSED, whole.T, scale, 1 - axes[name]
        else:
            whole = tensor.to(dtypes.get(name, tensor.dtype))
            yield name, whole, None, None
            if twice:
                yield name + TRANSPOSED, whole.T, None, None


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _index_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")
