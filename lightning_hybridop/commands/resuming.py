"""`resume=auto`: which run an interrupted one goes on from, from which checkpoint, and what it had logged until there."""

import csv
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from omegaconf import DictConfig, OmegaConf

from lightning_hybridop.checkpoints import check_whole
from lightning_hybridop.commands.configuration import ConfigurationError

AUTO = "auto"
"""`resume=auto`: go on with the latest run of this configuration that has not come to its end."""

CONFIGURATION = "config.yaml"
SUMMARY = "summary.json"
METRICS = "metrics.csv"
METRICS_BEFORE = "metrics-before.csv"
HELD = ".held"
ENDED = ".ended"
"""Where only copies of a run's checkpoints lie: it has come to its end."""

MAY_CHANGE = (
    "folder",
    "resume",
    "restarts",
    "port",
    "debug",
    "plan",
    "cluster",
    "hosts",
    "use_all",
    "workload",
    "present",
    "checkpoint",
)
"""What a run may be given anew when it goes on: where it runs and by which plan, not what it learns from."""

STRATEGY_MAY_CHANGE = (
    "micro_batches",
    "timeout",
    "heartbeat",
    "interface",
    "data",
    "perturbation_memory",
    "checkpoint_copies",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A checkpoint that can be loaded, and the optimizer step that it was made at."""

    path: Path
    step: int


def newest_checkpoint(folder: Path) -> Found | None:
    """Return the latest whole checkpoint of a run's folder, None without any; says which ones are left out as broken."""
    return max(whole_checkpoints(folder), key=lambda one: (one.step, one.path.stat().st_mtime), default=None)


def whole_checkpoints(folder: Path) -> list[Found]:
    """Return the checkpoints of a run's folder that can be loaded; says which ones are left out as broken."""
    found: list[Found] = []
    for path in sorted(folder.glob("*/*.ckpt")):
        try:
            check_whole(path)
            # The file of another run may lie here: nothing in it may run code.
            step = int(torch.load(path, map_location="meta", weights_only=True)["global_step"])
        except Exception as error:  # a changed file can raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            print(f"{path} is left out: {reason}", flush=True)
            continue
        found.append(Found(path=path, step=step))
    return found


def go_on_from_newest(config: DictConfig, folder: Path, *, restarted: bool) -> None:
    """Let a run begin with the latest checkpoint of its own, if it is to go on, or is `restarted`, and has one."""
    if config.resume != AUTO and not restarted:
        return
    found = newest_checkpoint(folder)
    if found is not None:
        config.resume = AUTO
        config.checkpoint = {"path": str(found.path), "step": found.step}


def unfinished_run(config: DictConfig, parent: Path) -> Path | None:
    """Return the latest of the dated folders below `parent` that holds a run like `config` without an end, None without any.

    Runs that another process is at are left to it.
    """
    folders = [path.parent for path in parent.glob(f"*/*/{CONFIGURATION}")]
    for folder in sorted(folders, key=lambda one: (one / CONFIGURATION).stat().st_mtime, reverse=True):
        if not is_ended(folder) and not differences(config, folder) and not _is_held(folder):
            return folder
    return None


def is_ended(folder: Path) -> bool:
    """Tell whether the run in a folder has come to its end, as far as is known on this host."""
    return any((folder / name).exists() for name in (SUMMARY, ENDED))


_held: list[TextIO] = []
"""Open for as long as this process lives."""


def hold(folder: Path) -> bool:
    """Take a run's folder for this process until it ends; return False if another process has it."""
    file = (folder / HELD).open("w", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return False
    _held.append(file)
    return True


def _is_held(folder: Path) -> bool:
    path = folder / HELD
    if not path.exists():
        return False
    with path.open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to, and move what was written there to `path`, which is thus never half written."""
    # Its own: several processes may write to one disk.
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def check_continues(config: DictConfig, folder: Path) -> None:
    """Raise ConfigurationError when a folder holds a run that `config` does not go on with."""
    changed = differences(config, folder)
    if changed:
        raise ConfigurationError(
            f"{folder} holds a run with another {changed[0]}, which resume=auto cannot go on with; pass the same options, or "
            "another folder=."
        )


def differences(config: DictConfig, folder: Path) -> list[str]:
    """Return the options, but for those that may change, in which a configuration differs from that of a folder."""
    try:
        before = OmegaConf.load(folder / CONFIGURATION)
    except Exception:  # whatever a file that is no configuration makes of itself
        return [CONFIGURATION]
    if not isinstance(before, DictConfig):
        return [CONFIGURATION]
    one, other = dict(_compared(config)), dict(_compared(before))
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _compared(config: DictConfig) -> Iterator[tuple[str, Any]]:
    """Yield the options that must stay the same; paths inside the run's own folder are the same wherever it lies."""
    folder = str(config.get("folder"))
    plain = OmegaConf.to_container(config)
    assert isinstance(plain, dict)
    for name, value in _flat(plain, ""):
        group, _, option = name.partition(".")
        if group in MAY_CHANGE or (group == "strategy" and option in STRATEGY_MAY_CHANGE):
            continue
        yield name, value.replace(folder, "") if isinstance(value, str) else value


def _flat(values: dict[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def set_metrics_aside(folder: Path, step: int) -> None:
    """Keep what was logged before optimizer step `step`: the logger of the run that goes on begins a file of its own."""
    _write_rows(folder / METRICS_BEFORE, [row for row in _joined(folder) if int(row["step"]) < step])
    (folder / METRICS).unlink(missing_ok=True)


def join_metrics(folder: Path) -> None:
    """Put what was logged before the run went on in front of what was logged since."""
    before = folder / METRICS_BEFORE
    if before.exists():
        _write_rows(folder / METRICS, _joined(folder))
        before.unlink()


def _joined(folder: Path) -> list[dict[str, str]]:
    return [row for name in (METRICS_BEFORE, METRICS) for row in _rows(folder / name)]


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        # A run that was killed while it wrote leaves half a row.
        return [row for row in csv.DictReader(file) if (row.get("step") or "").isdecimal()]


def _write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    names = sorted({name for row in rows for name in row if name is not None})
    with whole_file(path) as beside, beside.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
