"""Where a data set comes from: files as published, or the Hugging Face hub."""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

_Row = TypeVar("_Row")
_Value = TypeVar("_Value")

_FILE_SUFFIXES = (".csv", ".tsv", ".txt", ".json", ".jsonl")
_KINDS = {str: "a text", int: "a whole number", list: "a list", dict: "an object"}


class DataError(ValueError):
    """A data set cannot be read; the message names the file, the line if any, and what was expected."""


def local_file(source: str | Path, *, name: str, form: str, option: str) -> Path | None:
    """Return the file that `source` names; None when it can only be a data set's name on the hub.

    `name` is what the data set is called, `form` what its files are ("CSV"), `option` what they are named in.
    Raises DataError when `source` means a file but there is none.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return path
    means_a_file = isinstance(source, Path) or source.startswith((".", "~", "/")) or len(path.parts) > 2
    if means_a_file or path.is_dir() or path.suffix.lower() in _FILE_SUFFIXES:
        raise DataError(
            f"The {name} file {source} does not exist or is a folder: name an existing {form} file in {option}."
        )
    return None


def hub_rows(
    name: str,
    *,
    split: str,
    convert: Callable[[Mapping[str, Any]], _Row],
    columns: str,
    form: str,
    option: str,
    configuration: tuple[str, ...] = (),
) -> list[_Row]:
    """Return the converted rows of a split of a hub data set, loaded by the package `datasets`.

    `columns` says which ones `convert` reads; `configuration` holds the name of the data set's part, if it has parts.
    Raises DataError when the package, the data set, the split or a column is missing.
    """
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(
            f"{name} is not a file, and reading it from the Hugging Face hub needs the package datasets: name "
            f"a {form} file in {option} or run `pip install datasets`."
        ) from error
    try:
        return [convert(row) for row in datasets.load_dataset(name, *configuration, split=split)]
    except DataError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{name} is neither a file nor a data set of the Hugging Face hub with a split {split} and the "
            f"columns {columns} ({error}): check {option}."
        ) from error


def field(holder: object, name: str, kind: type[_Value], place: str) -> _Value:
    """Return a field of an object that was read from JSON.

    Raises DataError, beginning with `place`, when it is no object, lacks the field or holds something else there.
    """
    if not isinstance(holder, dict):
        raise DataError(f"{place}: found {_shown(holder)}, expected an object with the field {name!r}.")
    if name not in holder:
        raise DataError(
            f"{place}: found the fields {', '.join(map(str, holder)) or 'none'}, expected {name!r} among them."
        )
    value = holder[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise DataError(f"{place}: found {_shown(value)} in the field {name!r}, expected {_KINDS[kind]}.")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
