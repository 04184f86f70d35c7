"""The Trainer of the ready modules' tests."""

from pathlib import Path
from typing import Any

from lightning import Trainer


def trainer(folder: Path, epochs: int = 1, **options: Any) -> Trainer:
    """Return a Trainer in one process that writes nothing by itself."""
    return Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
