"""What shapes a block's arithmetic beside its tensors, as text: blocks of one text have one graph."""

import functools
import hashlib
import inspect
import json
from collections.abc import Hashable, Mapping, Sequence
from enum import Enum
from typing import Any, cast

from torch import Tensor, nn

# What any module has: `training`, for one, may differ from one process to the next.
_OF_MODULES = frozenset(vars(nn.Module()))

# Nothing is computed with a block's number or a layer's name, and groups of rows come as another shape of an adapter.
_LEFT_OUT = frozenset({"layer_idx", "layer_id", "layer_number", "target_name", "forward", "grouped_weight"})

# What peft's layers can be switched to between one call and the next.
_SWITCHES = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")


def configuration(block: nn.Module) -> str:
    """Return the classes of a block's modules and the plain values that they hold, but for the block's number."""
    lines = []
    for name, module in block.named_modules():
        plain = _plain({key: value for key, value in vars(module).items() if key not in _OF_MODULES})
        shapes = {
            key: list(tensor.shape)
            for key, tensor in [*module._parameters.items(), *module._buffers.items()]
            if tensor is not None
        }
        lines.append(
            f"{name} {_kind(module)} {_source_hash(cast(Hashable, type(module)))} {json.dumps([plain, shapes], sort_keys=True)}"
        )
    return "\n".join(lines)


def switchable(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules of blocks that can be switched: peft's layers."""
    return [
        module for block in blocks for module in block.modules() if hasattr(module, "adapter_layer_names")
    ]


def switches(modules: Sequence[nn.Module]) -> str:
    """Return what modules are switched to at the moment."""
    return repr([[getattr(module, name, None) for name in _SWITCHES] for module in modules])


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if key not in _LEFT_OUT}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(item) for item in value)
    if hasattr(value, "to_dict") and not isinstance(
        value, nn.Module
    ):  # a configuration of transformers or peft
        return _plain(value.to_dict())
    if isinstance(value, Tensor):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, functools.partial):
        return [_plain(value.func), _plain(value.args), _plain(value.keywords)]
    return getattr(value, "__qualname__", None) or _kind(value)


@functools.cache
def _source_hash(kind: Any) -> str:
    """Return a hash of a class's source, so that a block whose code has changed has another graph."""
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # typed into an interpreter
        source = ""
    return hashlib.sha256(source.encode()).hexdigest()[:8]


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
