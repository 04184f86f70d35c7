"""Mini-batches as rows: slicing into micro-batches, their weights, the shape of their hidden states."""

import copy
import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybridop.pipeline.raw_bytes import as_bytes


class BatchError(ValueError):
    """A batch that a pipeline cannot slice or compare."""


def tensors(batch: Any) -> Iterator[Tensor]:
    """Yield every tensor of a batch: a tensor, mapping, sequence or dataclass of such."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from tensors(value)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from tensors(getattr(batch, field.name))


def row_count(batch: Any) -> int:
    """Return the number of rows: the first dimension of the batch's first tensor that has one."""
    for tensor in tensors(batch):
        if tensor.ndim > 0:
            return tensor.shape[0]
    raise BatchError(
        f"A batch of type {type(batch).__name__} holds no tensor with rows; return tensors whose first dimension is "
        "the row from the DataLoader."
    )


def take_rows(batch: Any, rows: int, start: int, stop: int) -> Any:
    """Return rows `[start, stop)` of a batch of `rows` rows; what has no row dimension is passed on as it is."""
    return _map_rows(batch, rows, lambda part: part[start:stop])


def repeat_rows(batch: Any, times: int) -> Any:
    """Return a batch with all its rows `times` times, one copy after the other; the rest is passed on as it is."""

    def repeated(part: Any) -> Any:
        return torch.cat([part] * times) if isinstance(part, Tensor) else part * times

    return _map_rows(batch, row_count(batch), repeated) if times > 1 else batch


def _map_rows(batch: Any, rows: int, change: Callable[[Any], Any]) -> Any:
    """Return a batch with `change` applied to its tensors of `rows` rows and to its lists of as many plain items."""
    if isinstance(batch, Tensor):
        return change(batch) if batch.ndim > 0 and batch.shape[0] == rows else batch
    if isinstance(batch, Mapping):
        changed: Any = copy.copy(batch)  # keeps what is more than a dict: BatchEncoding, defaultdict
        changed.update({key: _map_rows(value, rows, change) for key, value in batch.items()})
        return changed
    if isinstance(batch, (list, tuple)):
        if len(batch) == rows and not any(True for _ in tensors(batch)):
            return change(batch)
        items = [_map_rows(value, rows, change) for value in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {
            field.name: _map_rows(getattr(batch, field.name), rows, change)
            for field in dataclasses.fields(batch)
        }
        return dataclasses.replace(batch, **fields)
    return batch


def split_rows(batch: Any, parts: int) -> list[Any]:
    """Slice a mini-batch into at most `parts` micro-batches of as equal row counts as possible, larger ones first.

    A mini-batch of fewer rows than `parts` gives one micro-batch per row.
    """
    rows = row_count(batch)
    parts = min(parts, rows)
    if parts == 0:
        raise BatchError("The DataLoader yielded a batch of 0 rows; drop empty batches.")
    sizes = [rows // parts + (index < rows % parts) for index in range(parts)]
    starts = [sum(sizes[:index]) for index in range(parts)]
    return [take_rows(batch, rows, start, start + size) for start, size in zip(starts, sizes, strict=True)]


def join_outputs(outputs: Sequence[Any], weights: Sequence[float]) -> Any:
    """Join what micro-batches returned: tensors by rows, mappings key by key, lists end to end, tuples item by item.

    Numbers, and tensors of no dimension, become their mean by `weights`, the micro-batches' shares of the loss. What
    is none of these is returned as the list of the micro-batches' outputs.
    """
    first = outputs[0]
    if len(outputs) == 1 or first is None:
        return first
    if isinstance(first, Tensor) and first.ndim > 0:
        same_shape = len({output.shape[1:] for output in outputs}) == 1
        return torch.cat(list(outputs)) if same_shape else list(outputs)
    if isinstance(first, (Tensor, int, float)) and not isinstance(first, bool):
        # A micro-batch of weight 0 has no loss of its own (0/0), so it takes no part.
        return sum(weight * output for weight, output in zip(weights, outputs, strict=True) if weight > 0.0)
    if isinstance(first, Mapping):
        return {key: join_outputs([output[key] for output in outputs], weights) for key in first}
    if isinstance(first, tuple):
        items = [join_outputs(parts, weights) for parts in zip(*outputs, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else tuple(items)
    if isinstance(first, list):
        return [item for output in outputs for item in output]
    return list(outputs)


def label_count(batch: Any, *, shifted: bool) -> float:
    """Return what a micro-batch's loss averages over: its label tokens (`labels != -100`), else its rows.

    With `shifted`, as in causal language models, the first token of a row has no prediction and does not count.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor):
        return float(row_count(batch))
    counted = labels[:, 1:] if shifted and labels.ndim == 2 else labels
    return float((counted != -100).sum())


def loss_is_shifted(module: nn.Module) -> bool:
    """Tell whether labels stand one position behind their prediction, as in Hugging Face's causal language models."""
    # The outermost model's: one with a head holds one without, whose loss is nobody's.
    outermost = next((child for child in module.modules() if hasattr(child, "loss_type")), None)
    return outermost is not None and outermost.loss_type in (None, "ForCausalLM")


def shares(counts: list[float]) -> list[float]:
    """Return each count's share of their sum; all 0 if there is nothing to share."""
    total = sum(counts)
    return [count / total if total > 0 else 0.0 for count in counts]


def token_shape(batch: Any) -> tuple[int, int]:
    """Return (rows, length) of the tokens in a batch: `input_ids`, `inputs_embeds`, else the first matrix of integers."""
    if isinstance(batch, Mapping):
        for name in ("input_ids", "inputs_embeds"):
            if isinstance(batch.get(name), Tensor):
                return batch[name].shape[0], batch[name].shape[1]
    for tensor in tensors(batch):
        if tensor.ndim >= 2 and not tensor.is_floating_point():
            return tensor.shape[0], tensor.shape[1]
    raise BatchError(
        "The batch holds no `input_ids` and no other matrix of token numbers, so the shape of the hidden state is "
        "unknown; yield a dict with `input_ids` from the DataLoader."
    )


def fingerprint(batch: Any) -> int:
    """Return a 32-bit checksum over all tensors of a batch, their shapes included."""
    checksum = 0
    for tensor in tensors(batch):
        checksum = zlib.crc32(repr((tuple(tensor.shape), tensor.dtype)).encode(), checksum)
        checksum = zlib.crc32(as_bytes(tensor).numpy().tobytes(), checksum)
    return checksum
