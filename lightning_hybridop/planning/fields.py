"""Turns plain containers, as read from YAML, into dataclasses, and says which field is wrong."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any


def checked_fields(
    where: str, values: Any, kind: type[Any], *, error: type[ValueError], also: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return `values` as keyword arguments of the dataclass `kind`; `also` are names allowed beside its fields.

    Raises:
        error: the values are no mapping, or a name is unknown (the nearest known one is suggested) or missing.
    """
    if not isinstance(values, Mapping):
        raise error(f"{where}: found {type(values).__name__}, expected fields with values.")
    known = [*(field.name for field in dataclasses.fields(kind)), *also]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known fields: {', '.join(known)}."
            raise error(f"{where}.{name}: unknown field; {hint}")
    for field in dataclasses.fields(kind):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in values:
            raise error(f"{where}.{field.name}: missing; it has no default, give it a value.")
    return dict(values)


def check_number(
    where: str, value: Any, *, error: type[ValueError], least: float = 0.0, above: bool = True
) -> None:
    """Raise `error` unless `value` is a finite number above `least` (at least `least` without `above`)."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (least < value < float("inf") or (value == least and not above)):
        bound = f"above {least:g}" if above else f"of at least {least:g}"
        raise error(f"{where}: found {value!r}, expected a number {bound}.")
