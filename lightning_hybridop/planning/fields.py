"""Turns plain containers, as read from YAML, into dataclasses, and says which field is wrong."""

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


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


def read_yaml(path: str | Path, *, what: str, error: type[ValueError]) -> Any:
    """Return the plain containers in a YAML file; nothing in it is ever executed.

    Raises:
        error: the file cannot be read, or is not YAML; `what` says what it should have been.
    """
    if not isinstance(path, (str, Path)):
        raise error(f"{what}: found {shown(path)}, expected the path of a {what}'s YAML file.")
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as failure:
        raise error(
            f"{what}: cannot read {path} ({failure.strerror}); give the path of a {what}'s YAML file."
        ) from failure
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as failure:
        reason = " ".join(str(failure).split())
        raise error(f"{what}: {path} is not a YAML file ({reason}).") from failure


LARGEST = 1e15
SMALLEST = 1e-12
"""No figure of a device, a link or a plan lies outside of these; sums and quotients of such figures stay finite."""


def check_number(where: str, value: Any, *, error: type[ValueError], above: bool = True) -> None:
    """Raise `error` unless `value` is a number above 0 (or 0 without `above`) of a magnitude that can be meant."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if SMALLEST <= value <= LARGEST or (value == 0 and not above):
            return
        if SMALLEST > value > 0 or LARGEST < value < float("inf"):
            raise error(f"{where}: found {shown(value)}, expected a number from {SMALLEST:g} to {LARGEST:g}.")
    bound = "above 0" if above else "of at least 0"
    raise error(f"{where}: found {shown(value)}, expected a number {bound}.")


def check_whole(
    where: str, value: Any, least: int, most: int | None = None, *, error: type[ValueError]
) -> None:
    """Raise `error` unless `value` is a whole number of at least `least` and at most `most`, if that is given."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise error(f"{where}: found {shown(value)}, expected a whole number of at least {least}.")
    if most is not None and value > most:
        raise error(f"{where}: found {shown(value)}, expected a whole number of at most {most}.")


def check_name(where: str, value: Any, *, error: type[ValueError]) -> None:
    """Raise `error` unless `value` is a text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise error(f"{where}: found {shown(value)}, expected a name.")


def shown(value: Any) -> str:
    """Return a value as error texts show it: not at a length that hides the rest."""
    text = (
        repr(value)
        if not isinstance(value, int) or abs(value) < LARGEST
        else f"{str(value)[:6]}... ({value.bit_length()} bits)"
    )
    return text if len(text) <= 60 else f"{text[:57]}..."
