"""A LightningDataModule of training rows and held-out rows, whatever they are."""

import random
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from lightning import LightningDataModule
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from lightning_hybridop.modules.language_models import load_tokenizer

Row = TypeVar("Row")


class SplitData(LightningDataModule, Generic[Row]):
    """Encoded training and held-out rows; a data set says what they are and how they become a batch.

    `tokenizer` is a tokenizer or what `load_tokenizer` takes. Validation, test and prediction all use the held-out
    rows. A last batch of fewer rows is kept.
    """

    def __init__(
        self, *, tokenizer: PreTrainedTokenizerBase | str, batch_size: int, max_length: int, num_workers: int
    ) -> None:
        super().__init__()
        self.tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.batch_size = batch_size
        self.max_length = max_length
        self.num_workers = num_workers
        self.train_set: list[Row] = []
        self.held_out_set: list[Row] = []

    @abstractmethod
    def encoded_splits(self) -> tuple[list[Row], list[Row]]:
        """Return the training rows and the held-out rows."""

    @abstractmethod
    def collate(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return a batch of rows."""

    def setup(self, stage: str) -> None:
        """Read and encode both splits, once."""
        if not self.held_out_set:
            self.train_set, self.held_out_set = self.encoded_splits()

    def train_dataloader(self) -> DataLoader[Row]:
        """Return the shuffled training rows."""
        return self._loader(self.train_set, shuffle=True)

    def val_dataloader(self) -> DataLoader[Row]:
        """Return the held-out rows."""
        return self._loader(self.held_out_set, shuffle=False)

    def test_dataloader(self) -> DataLoader[Row]:
        """Return the held-out rows."""
        return self._loader(self.held_out_set, shuffle=False)

    def predict_dataloader(self) -> DataLoader[Row]:
        """Return the held-out rows."""
        return self._loader(self.held_out_set, shuffle=False)

    def _loader(self, rows: list[Row], *, shuffle: bool) -> DataLoader[Row]:
        return row_loader(
            rows,
            self.collate,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
        )


def row_loader(
    rows: Sequence[Row],
    collate: Callable[[Sequence[Row]], dict[str, Any]],
    *,
    batch_size: int,
    shuffle: bool = False,
    num_workers: int = 0,
) -> DataLoader[Row]:
    """Return a loader of batches that keeps a last batch of fewer rows."""
    return DataLoader(
        rows,  # type: ignore[arg-type]  # torch asks for a Dataset but needs only __getitem__ and __len__
        batch_size=batch_size,
        shuffle=shuffle,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        collate_fn=collate,
    )


def shuffled(rows: Sequence[Row], *, seed: int) -> list[Row]:
    """Return the rows in an order that depends on `seed` alone."""
    # Sorting by draws, because only random() itself is promised to stay equal between Python versions.
    draws = random.Random(seed)
    return [row for _, row in sorted(((draws.random(), row) for row in rows), key=lambda drawn: drawn[0])]


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError when an option has none of the values that it may have."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(choices)}.")
