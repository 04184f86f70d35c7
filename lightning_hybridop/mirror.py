"""Carries over to every rank what a step leaves in its module's plain attributes on the last stage.

`self.outputs.append(...)` in validation_step, read in on_validation_epoch_end, is how Lightning's users collect; the
step ends on the last stage alone, the hook runs on all ranks.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule
from torch import Tensor

_MISSING = object()


class AttributeWatch:
    """Finds out which numbers, strings, tensors, lists, dicts and sets a module holds in another state than before.

    Attributes whose name begins with an underscore are the module's and Lightning's own and are left out, as are
    objects of other types.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._before = {name: _snapshot(value) for name, value in _plain_attributes(module).items()}

    def changes(self) -> dict[str, Any]:
        """Return what makes the module of another rank the same, for `apply_changes`; empty if nothing changed.

        Of lists that only grew, alone or inside other lists and dicts, just the new items are in it.
        """
        found = {}
        for name, value in _plain_attributes(self._module).items():
            change = _change(self._before.get(name, _MISSING), value)
            if change is not None:
                found[name] = move_data_to_device(change, "cpu")
        return found


def apply_changes(module: LightningModule, changes: Mapping[str, Any]) -> None:
    """Put `changes` into a module that is in the state from before them, but for lists that the step went on filling."""
    for name, change in changes.items():
        module.__dict__[name] = _changed(module.__dict__.get(name), change)


@contextmanager
def attributes_kept(module: LightningModule) -> Iterator[None]:
    """Undo behind the block what it did to the module's plain attributes, and to the lists and dicts in them."""
    kept = {name: _kept(value) for name, value in _plain_attributes(module).items()}
    try:
        yield
    finally:
        for name in _plain_attributes(module).keys() - kept.keys():
            del module.__dict__[name]
        for name, value in kept.items():
            module.__dict__[name] = _restored(value)


def _kept(value: Any) -> tuple[Any, Any]:
    """Return a value with a copy of what is in it."""
    if isinstance(value, Tensor):
        return value, value.detach().clone()
    if isinstance(value, list):
        return value, [_kept(item) if isinstance(item, (list, dict)) else (item, None) for item in value]
    if isinstance(value, dict):
        return value, {key: _kept(item) for key, item in value.items()}
    return value, set(value) if isinstance(value, set) else None


def _restored(kept: tuple[Any, Any]) -> Any:
    value, inside = kept
    if inside is None:
        return value
    if isinstance(value, Tensor):
        if not torch.equal(value, inside):
            with torch.no_grad():
                value.copy_(inside)
    elif isinstance(value, list):
        value[:] = [_restored(item) for item in inside]
    elif isinstance(value, dict):
        value.clear()
        value.update({key: _restored(item) for key, item in inside.items()})
    else:
        value.clear()
        value.update(inside)
    return value


def _plain_attributes(module: LightningModule) -> dict[str, Any]:
    # log and print are replaced during a step.
    plain = (bool, int, float, str, Tensor, list, tuple, dict, set, type(None))
    return {
        name: value
        for name, value in module.__dict__.items()
        if not name.startswith("_") and isinstance(value, plain) and name != "training"
    }


def _snapshot(value: Any, *, inside_list: bool = False) -> Any:
    """Return enough of a value to tell later whether it changed: itself, so that no other takes its place, and more."""
    if isinstance(value, Tensor):
        if not value.is_inference():
            return value, value._version
        # Tensors of inference mode do not count their changes. Those in lists are outputs, which nobody writes to.
        return value, None if inside_list else value.clone()
    if isinstance(value, list):
        return value, [_snapshot(item, inside_list=True) for item in value]
    if isinstance(value, dict):
        return value, {key: _snapshot(item, inside_list=inside_list) for key, item in value.items()}
    if isinstance(value, set):
        return value, set(value)
    return value if isinstance(value, (bool, int, float, str)) else (value, None)


def _change(before: Any, value: Any) -> tuple[str, Any] | None:
    """Return how a value differs from its snapshot, as a kind and what that kind needs."""
    if isinstance(value, (bool, int, float, str)):
        return None if type(before) is type(value) and before == value else ("value", value)
    if not isinstance(before, tuple) or before[0] is not value:
        return "value", value
    inside: Any = before[1]
    if isinstance(value, Tensor):
        if isinstance(inside, Tensor):
            return None if inside.equal(value) else ("value", value)
        return None if inside is None or inside == value._version else ("value", value)
    if isinstance(value, list):
        return _change_of_list(inside, value)
    if isinstance(value, dict):
        inner = {
            key: change
            for key, item in value.items()
            if (change := _change(inside.get(key, _MISSING), item)) is not None
        }
        gone = [key for key in inside if key not in value]
        return ("keys", (gone, inner)) if gone or inner else None
    return ("value", value) if isinstance(value, set) and inside != value else None


def _change_of_list(inside: list[Any], value: list[Any]) -> tuple[str, Any] | None:
    length = len(inside)
    changes = {
        index: change
        for index, (before, item) in enumerate(zip(inside, value, strict=False))
        if (change := _change(before, item)) is not None
    }
    if len(value) < length or any(kind == "value" for kind, _ in changes.values()):
        return "value", value
    return ("grown", (length, value[length:], changes)) if len(value) > length or changes else None


def _changed(value: Any, change: tuple[str, Any]) -> Any:
    kind, what = change
    if kind == "grown":
        length, new, inner = what
        del value[length:]
        for index, part in inner.items():
            value[index] = _changed(value[index], part)
        value.extend(new)
        return value
    if kind == "keys":
        gone, inner = what
        for key in gone:
            value.pop(key, None)
        for key, part in inner.items():
            value[key] = _changed(value.get(key), part)
        return value
    return what
