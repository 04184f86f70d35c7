"""What this package reads of a Trainer that Lightning does not declare."""

from lightning.pytorch import Callback, Trainer


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """Return a Trainer's callbacks, which a connector of Lightning's attaches."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks
