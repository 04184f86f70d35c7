"""Lets prediction writers write once: every rank has all predictions, rank 0 writes them."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from lightning_hybridop.trainers import callbacks_of

_WRITES = ("write_on_batch_end", "write_on_epoch_end")


def silence_writers(trainer: Trainer) -> None:
    """Keep this rank's prediction writers from writing, until `restore_writers`."""
    for writer in _writers(trainer):
        writer.__dict__.update(dict.fromkeys(_WRITES, _write_nothing))


def restore_writers(trainer: Trainer) -> None:
    """Let silenced prediction writers write again."""
    for writer in _writers(trainer):
        for name in _WRITES:
            if writer.__dict__.get(name) is _write_nothing:
                del writer.__dict__[name]


def _write_nothing(*_: Any, **__: Any) -> None:
    """Stand for a method that writes."""


def _writers(trainer: Trainer) -> list[BasePredictionWriter]:
    return [callback for callback in callbacks_of(trainer) if isinstance(callback, BasePredictionWriter)]
