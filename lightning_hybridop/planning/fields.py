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
            called = name if isinstance(name, str) and len(name) <= 60 else shown(name)
            near = difflib.get_close_matches(called, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known fields: {', '.join(known)}."
            raise error(f"{where}.{called}: unknown field; {hint}")
    for field in dataclasses.fields(kind):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in values:
            raise error(f"{where}.{field.name}: missing; it has no default, give it a value.")
    return dict(values)


def read_yaml(path: str | Path, *, what: str, error: type[ValueError]) -> Any:
    """Return the plain containers in a YAML file; nothing in it is ever executed, however it came about.

    Raises:
        error: the file cannot be read, is not YAML, or is larger or deeper than any that a person wrote; `what` says what
            it should have been.
    """
    if not isinstance(path, (str, Path)):
        raise error(f"{what}: found {shown(path)}, expected the path of a {what}'s YAML file.")
    try:
        if Path(path).exists() and not Path(path).is_file():  # a pipe would be waited for
            raise error(f"{what}: {path} is no file; give the path of a {what}'s YAML file.")
        with Path(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise error(f"{what}: {path} is larger than {MOST_BYTES} bytes, which no {what} is.")
        return _bounded(content.decode("utf-8"))
    except error:
        raise
    except OSError as failure:
        raise error(
            f"{what}: cannot read {path} ({failure.strerror}); give the path of a {what}'s YAML file."
        ) from failure
    # Numbers and dates that Python does not make are ValueErrors.
    except (yaml.YAMLError, ValueError, RecursionError) as failure:
        reason = " ".join(str(failure).split())
        raise error(f"{what}: {path} is not a YAML file ({reason}).") from failure


def _bounded(text: str) -> Any:
    """Return what YAML text holds, having looked at its shape first: aliases can make a few lines unfold to gigabytes."""
    depth = nodes = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"it has an alias, *{event.anchor}; write out what that stands for")
        if isinstance(event, yaml.ScalarEvent) and "${" in event.value:
            # A hosts file becomes part of the configuration, where such a thing would read the environment.
            raise ValueError(f"it has an interpolation, {shown(event.value)}; write out what that stands for")
        nodes += isinstance(event, yaml.NodeEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_LEVELS or nodes > MOST_NODES:
            raise ValueError(f"it has more than {MOST_LEVELS} levels or {MOST_NODES} values")
    return yaml.safe_load(text)


MOST_BYTES = 2**20
MOST_LEVELS = 20
MOST_NODES = 20_000
"""No plan, profile or hosts file is larger; a cluster of 64 devices with a link between each two has 15,000 values."""

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
    if isinstance(value, int) and abs(value) >= LARGEST:
        # Python writes no number of thousands of digits.
        start = f"{str(value)[:6]}... " if value.bit_length() < 10_000 else "a number "
        return f"{start}({value.bit_length()} bits)"
    try:
        text = repr(value)
    except ValueError:  # such a number, deeper inside
        text = type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."
