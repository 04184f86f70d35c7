"""Weights that are read from safetensors files only once it is known which of them a stage needs."""

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

CHUNK = 2**17
"""Elements that are read at a time where the stored dtype is not the one wanted."""

_LARGEST = 8
"""Bytes of an element of the largest dtype."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class WeightError(RuntimeError):
    """A weight cannot be read; the message says which one, where it was looked for, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies: its values start `offset` bytes into `file`, in row-major order."""

    file: Path
    key: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class ReleasedParameter(nn.Parameter):
    """What is left of a frozen weight that this process no longer needs: its shape and dtype, on `meta`.

    It stays there when its module is moved.
    """

    @classmethod
    def of(cls, parameter: nn.Parameter) -> Self:
        """Return what is left of a parameter."""
        return cls(parameter.detach().to("meta"), requires_grad=False)

    def to(self, *_: Any, **__: Any) -> Self:
        """Return the parameter itself."""
        return self

    def cpu(self, *_: Any, **__: Any) -> Self:
        """Return the parameter itself."""
        return self


class AwaitedParameter(nn.Parameter):
    """A parameter of shape and dtype but without values yet: it lies on `meta`, and `stored` says where they are.

    It names the CPU as its device, because that is where it is going to lie: libraries that put something beside a
    weight, as peft does with adapters, then make it a real tensor. `first_dtype` is the dtype that the values pass
    through on their way from the file, so that they are those of a model that was loaded in it and cast afterwards.
    """

    stored: StoredTensor
    first_dtype: torch.dtype

    @classmethod
    def of(cls, parameter: nn.Parameter, stored: StoredTensor) -> Self:
        """Return the awaited form of a parameter on `meta`."""
        awaited = cls(parameter.detach(), parameter.requires_grad)
        awaited.stored = stored
        awaited.first_dtype = parameter.dtype
        return awaited

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # an attribute of torch's stubs
        """Where the parameter is going to lie."""
        return torch.device("cpu")

    def to(self, *arguments: Any, **keywords: Any) -> Tensor:
        """Cast as any tensor; refuse to move, which takes values."""
        try:
            moved: Tensor = super().to(*arguments, **keywords)
        except NotImplementedError as error:
            raise WeightError(
                f"The values of {self.stored.key} were asked for before they are read from {self.stored.file.name}, "
                "which HybridOPStrategy does in the Trainer's setup; call materialise(module.parameters()) first, or load the "
                "model the ordinary way (adapters that start from the weights, such as DoRA and PiSSA, need that)."
            ) from error
        return moved

    def cpu(self, *_: Any, **__: Any) -> Self:
        """Return the parameter itself: Lightning puts all that is left of a run there, one that failed early too."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied: Self = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        copied.stored = self.stored
        copied.first_dtype = self.first_dtype
        return copied


def stored_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Return what lies in safetensors files, by key; only their headers are read.

    Raises:
        WeightError: a file is missing or not a safetensors file.
    """
    found: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with file.open("rb") as opened:
                (length,) = struct.unpack("<Q", opened.read(8))
                if length > file.stat().st_size:
                    raise ValueError(f"it claims {length} bytes")
                header = dict(json.loads(opened.read(length)))
            for key, entry in header.items():
                if key != "__metadata__":
                    found[key] = StoredTensor(
                        file=file,
                        key=key,
                        offset=8 + length + entry["data_offsets"][0],
                        shape=tuple(entry["shape"]),
                        dtype=_DTYPES[entry["dtype"]],
                    )
        except OSError as error:
            raise WeightError(
                f"The file {file.name} cannot be read in {file.parent} ({error.strerror}); fetch the model again."
            ) from error
        except (struct.error, ValueError, KeyError, TypeError) as error:
            raise WeightError(
                f"{file.name} in {file.parent} has no safetensors header that can be read ({type(error).__name__}: "
                f"{error}); fetch the file again."
            ) from error
    return found


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put every parameter that a module registers inside the block on `meta`; buffers stay as they are computed."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            # In place: a parameter that two modules share stays one.
            without_values = torch.empty_like(parameter, device="meta")
            torch.utils.swap_tensors(  # type: ignore[no-untyped-call]
                parameter, nn.Parameter(without_values, parameter.requires_grad)
            )
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def await_weights(model: nn.Module, stored: Mapping[str, StoredTensor]) -> list[str]:
    """Replace the parameters of `model` that lie on `meta` by awaited ones; return the names that `stored` lacks.

    Tied parameters stay tied; any of their names may be the stored one.

    Raises:
        WeightError: a stored tensor has another shape, or the stored values of tied parameters differ.
    """
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_meta and not isinstance(parameter, AwaitedParameter):
            names.setdefault(id(parameter), []).append(name)
            parameters[id(parameter)] = parameter
    missing = []
    for identity, parameter in parameters.items():
        found = [stored[name] for name in names[identity] if name in stored]
        if not found:
            missing.append(names[identity][0])
            continue
        for other in found:
            _check_shape(other, parameter)
        for other in found[1:]:
            _check_same(found[0], other)
        awaited = AwaitedParameter.of(parameter, found[0])
        for name in names[identity]:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, awaited)
    return missing


def materialise(parameters: Iterable[nn.Parameter]) -> int:
    """Read the values of those `parameters` that are awaited, in place, and return how many bytes they take.

    Every parameter remains the object that it was, so tied ones stay tied. The values come in the parameter's own
    dtype; beside them two times `CHUNK` elements are in memory.

    Raises:
        WeightError: a file is missing or shorter than its header says.
    """
    awaited = [parameter for parameter in parameters if isinstance(parameter, AwaitedParameter)]
    scratch = Scratch() if awaited else None
    size = 0
    for parameter in awaited:
        values = read(parameter.stored, parameter.dtype, first=parameter.first_dtype, scratch=scratch)
        read_parameter = nn.Parameter(values, parameter.requires_grad)
        torch.utils.swap_tensors(parameter, read_parameter)  # type: ignore[no-untyped-call]
        size += values.nbytes
    return size


def lacks_values(module: nn.Module) -> bool:
    """Tell whether a parameter of `module` lies on `meta` without being awaited or released."""
    return any(
        parameter.is_meta and not isinstance(parameter, (AwaitedParameter, ReleasedParameter))
        for parameter in module.parameters()
    )


def check_materialised(module: nn.Module) -> None:
    """Refuse a module that has a parameter or buffer on `meta`.

    Raises:
        WeightError: it has, and nobody knows where its values are.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise WeightError(
                f"{name} lies on `meta` and nothing says where its values are; build the model with "
                "load_on_demand, or load it the ordinary way (adapters that start from the weights, such as PiSSA, "
                "need that)."
            )


def read(
    stored: StoredTensor,
    dtype: torch.dtype,
    *,
    first: torch.dtype | None = None,
    scratch: "Scratch | None" = None,
) -> Tensor:
    """Return a stored tensor's values in `dtype`, cast to `first` before that if it is given.

    Raises:
        WeightError: the file is missing or shorter than its header says.
    """
    values = torch.empty(stored.shape, dtype=dtype)
    flat = values.view(-1)
    if {stored.dtype, first or dtype} == {dtype}:
        with _opened(stored) as file:
            _fill(file, flat, stored)
        return values
    scratch = Scratch() if scratch is None else scratch
    start = 0
    for chunk in _chunks(stored, scratch.read):
        part = flat[start : start + len(chunk)]
        if first in (None, dtype, stored.dtype):
            part.copy_(chunk)
        else:
            part.copy_(scratch.cast.view(first)[: len(chunk)].copy_(chunk))
        start += len(chunk)
    return values


def read_some(stored: StoredTensor, start: int, count: int) -> list[float]:
    """Return `count` values of a stored tensor from the flat index `start` on.

    Raises:
        WeightError: the file is missing or shorter than its header says.
    """
    values = torch.empty(count, dtype=stored.dtype)
    with _opened(stored) as file:
        file.seek(start * stored.dtype.itemsize, 1)
        _fill(file, values, stored)
    return [float(value) for value in values.double()]


class Scratch:
    """Two pieces of memory that all reading is done in: new ones for every tensor would leave holes in the heap."""

    def __init__(self) -> None:
        self.read = torch.empty(CHUNK * _LARGEST, dtype=torch.uint8)
        self.cast = torch.empty(CHUNK * _LARGEST, dtype=torch.uint8)


@contextmanager
def _opened(stored: StoredTensor) -> Iterator[FileIO]:
    try:
        # Read, not mapped: mapped pages would count as this process's memory until the system wants them back.
        with stored.file.open("rb", buffering=0) as file:
            file.seek(stored.offset)
            yield file
    except OSError as error:
        raise WeightError(
            f"{stored.key} cannot be read from {stored.file.name} in {stored.file.parent} ({error.strerror}); fetch "
            "the model again."
        ) from error


def _chunks(stored: StoredTensor, memory: Tensor) -> Iterator[Tensor]:
    """Yield a stored tensor's values, flat and `CHUNK` at a time, each time in the same memory."""
    elements = torch.Size(stored.shape).numel()
    buffer = memory.view(stored.dtype)
    with _opened(stored) as file:
        for start in range(0, elements, CHUNK):
            chunk = buffer[: min(CHUNK, elements - start)]
            _fill(file, chunk, stored)
            yield chunk


def _fill(file: FileIO, tensor: Tensor, stored: StoredTensor) -> None:
    remaining = tensor.view(torch.uint8).numpy().data
    while remaining:
        count = file.readinto(remaining)
        if not count:
            raise WeightError(
                f"{stored.file.name} in {stored.file.parent} ends before the values of {stored.key} do; fetch the "
                "file again."
            )
        remaining = remaining[count:]


def _check_shape(stored: StoredTensor, parameter: nn.Parameter) -> None:
    if stored.shape != tuple(parameter.shape):
        raise WeightError(
            f"{stored.key} has the shape {list(stored.shape)} in {stored.file.name}, but the model expects "
            f"{list(parameter.shape)}; take the configuration that belongs to these weights."
        )


def _check_same(first: StoredTensor, second: StoredTensor) -> None:
    scratch = Scratch()
    pairs = zip(_chunks(first, scratch.read), _chunks(second, scratch.cast), strict=True)
    if first.dtype != second.dtype or not all(torch.equal(one, other) for one, other in pairs):
        raise WeightError(
            f"{first.key} and {second.key} are one tensor in the model but have different values in "
            f"{first.file.name}; set tie_word_embeddings to false in the model's configuration."
        )
