"""Keeps measurements in the user's cache, one readable YAML file for each setting."""

import dataclasses
import os
import platform
import re
import tempfile
from pathlib import Path
from typing import Any

import platformdirs
import yaml

from lightning_hybridop.devices.measure import Measured, Setting
from lightning_hybridop.planning.fields import check_number, checked_fields, read_yaml

CACHE_VARIABLE = "HYBRIDOP_CACHE"

_UNKNOWN_ON_FORWARD_ONLY = ("block_backward", "head_backward", "activation_elements")


class _DamagedError(ValueError):
    """A file that holds no whole measurement."""


def cache_folder() -> Path:
    """Return the folder that keeps what took long to make: HYBRIDOP_CACHE, else the user's cache directory."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    return platformdirs.user_cache_path("lightning_hybridop", appauthor=False)


def measured_path(setting: Setting) -> Path:
    """Return the file of a setting's measurement on this host; it need not exist."""
    parts = (
        platform.node(),
        setting.device,
        f"{setting.threads}-threads",
        setting.model,
        setting.dtype,
        f"{setting.rows}x{setting.length}",
    )
    name = "_".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-") for part in parts)
    return cache_folder() / "profiles" / f"{name}.yaml"


def load_measured(setting: Setting) -> Measured | None:
    """Return the measurement of a setting; None if there is none, if it is damaged, or of another setting."""
    try:
        values = read_yaml(measured_path(setting), what="measurement", error=_DamagedError)
        measured = measured_from_dict(values)
    except _DamagedError:
        return None
    return measured if measured.setting == setting else None


def save_measured(measured: Measured) -> Path | None:
    """Write a measurement, whole or not at all, and return its file; None when the cache cannot be written."""
    path = measured_path(measured.setting)
    values = dataclasses.asdict(measured)
    values["setting"]["lora_targets"] = list(measured.setting.lora_targets)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}.", suffix=".partial")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                yaml.safe_dump(values, file, sort_keys=False)
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise
    except OSError:
        return None
    return path


def measured_from_dict(values: Any) -> Measured:
    """Return the measurement in plain containers, as `dataclasses.asdict` makes them; ValueError if it is not whole."""
    fields = checked_fields("measurement", values, Measured, error=_DamagedError)
    setting = checked_fields("setting", fields.pop("setting"), Setting, error=_DamagedError)
    targets = setting.pop("lora_targets")
    if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        raise _DamagedError(f"lora_targets: found {targets!r}, expected a list of projections.")
    for name, value in fields.items():
        if value is not None or name not in _UNKNOWN_ON_FORWARD_ONLY:
            check_number(name, value, error=_DamagedError)
    return Measured(setting=Setting(**setting, lora_targets=tuple(targets)), **fields)
