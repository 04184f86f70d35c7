"""How exceptions reach the terminal: as one sentence, also from another process."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException

from lightning_hybridop.pipeline.world import first_failure as first_failure_of_run
from lightning_hybridop.pipeline.world import lost_connection, told_of_lost


class RunError(RuntimeError):
    """A process of a run failed; the message names it and its error."""


class RunInterruptedError(RuntimeError):
    """The run was ended by the signal of number `signal`."""

    def __init__(self, signal: int) -> None:
        super().__init__(f"The run was ended by signal {signal}.")
        self.signal = signal


def sentence(error: BaseException) -> str:
    """Return what `error` says in one line, with its type where that adds something."""
    # Hydra wraps what a class or function of the configuration raised.
    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    # Of a run on several hosts each says which process failed, not that it could not reach it.
    first = first_failure_of_run(error)
    if lost := told_of_lost(error):
        return " ".join(lost)
    if first is not None and (first.silent or (lost_connection(error) and not first.follows)):
        return str(first)
    text = " ".join(str(error).split())
    kind = type(error)
    if text and (kind.__module__.startswith("lightning_hybridop") or kind is ValueError):
        return text
    return f"{kind.__name__}: {text}" if text else kind.__name__


def write_failure(logs: Path, rank: int, error: BaseException) -> None:
    """Leave a note of why rank `rank` failed, and when, for the process that started it."""
    # A neighbour that is gone is why the others fail, not why the run does.
    first = first_failure_of_run(error)
    # What a process that hangs would say is known only to those that noticed.
    silent = first is not None and first.silent
    consequence = not silent and (lost_connection(error) or (first is not None and first.rank != rank))
    told = None if consequence else first
    note = {
        "who": f"rank {rank}" if told is None else f"{told.stage} (rank {told.rank}, host {told.host})",
        "time": time.time(),
        "consequence": consequence,
        "sentence": told.sentence if told is not None and silent else sentence(error),
    }
    with suppress(OSError):  # a full disk, which may be why
        _note(logs, rank).write_text(json.dumps(note), encoding="utf-8")


def forget_failures(logs: Path) -> None:
    """Remove the notes that an earlier start of a run has left."""
    for path in logs.glob("rank_*.failure.json"):
        path.unlink(missing_ok=True)


def first_failure(logs: Path, *, consequences: bool = True) -> str | None:
    """Return why the run failed according to the notes: the first cause, else the first consequence of one.

    None when there is no note, or without `consequences` when no note tells a cause.
    """
    notes = [note for path in logs.glob("rank_*.failure.json") if (note := _read(path)) is not None]
    told = [note for note in notes if consequences or not note["consequence"]]
    if not told:
        return None
    first = min(told, key=lambda note: (note["consequence"], note["time"]))
    return f"{first['who']}: {first['sentence']}"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        note: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # cut short by a full disk
        return None
    return note


def _note(logs: Path, rank: int) -> Path:
    return logs / f"rank_{rank}.failure.json"
