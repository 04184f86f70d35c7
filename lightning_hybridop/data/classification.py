"""From labelled texts to left-padded batches of a prompt and its label word, the same for every data set."""

import random
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from lightning_hybridop.modules.language_models import load_tokenizer
from lightning_hybridop.modules.prompts import IGNORED, Batch, Prompt


class DataError(ValueError):
    """A data set cannot be read; the message names the file, the line if any, and what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledText:
    """A text and the index of its class."""

    text: str
    label: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedText:
    """The tokens of a text with its prompt's end, and those of its label word."""

    prompt: list[int]
    answer: list[int]


def encode(
    rows: Sequence[LabelledText], *, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, max_length: int
) -> list[EncodedText]:
    """Return the tokens of every row, at most `max_length` each with the label word.

    A text that is too long loses its end; the prompt's end and the label word are never cut.
    Raises DataError when `max_length` leaves no token for a text.
    """
    ending = prompt.ending_tokens(tokenizer)
    answers = prompt.label_tokens(tokenizer)
    room = max_length - len(ending) - max(len(answer) for answer in answers)
    if room < 1:
        raise DataError(
            f"max_length={max_length} leaves no room for the text: the prompt's end and the longest label "
            f"word alone take {max_length - room} tokens, so pass at least {max_length - room + 1}."
        )
    if not rows:
        return []
    texts = tokenizer([row.text for row in rows], truncation=True, max_length=room)["input_ids"]
    return [
        EncodedText(prompt=[*text, *ending], answer=answers[row.label])
        for row, text in zip(rows, texts, strict=True)
    ]


def collate(rows: Sequence[EncodedText], *, padding_token: int) -> Batch:
    """Return a batch as long as its longest row, padded on the left: every label word stands at the end."""
    tokens = max(len(row.prompt) + len(row.answer) for row in rows)
    input_ids = torch.full((len(rows), tokens), padding_token)
    attention_mask = torch.zeros_like(input_ids)
    labels = torch.full_like(input_ids, IGNORED)
    for index, row in enumerate(rows):
        sequence = [*row.prompt, *row.answer]
        input_ids[index, -len(sequence) :] = torch.tensor(sequence)
        attention_mask[index, -len(sequence) :] = 1
        labels[index, -len(row.answer) :] = torch.tensor(row.answer)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


class ClassificationData(LightningDataModule):
    """Encoded training and held-out rows of a labelled text data set; a data set says what its `splits` are.

    `tokenizer` is a tokenizer or what `load_tokenizer` takes. Validation, test and prediction all use the held-out
    rows. A last batch of fewer rows is kept.
    """

    def __init__(
        self,
        *,
        tokenizer: PreTrainedTokenizerBase | str,
        batch_size: int,
        max_length: int,
        num_workers: int,
    ) -> None:
        super().__init__()
        self.tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.batch_size = batch_size
        self.max_length = max_length
        self.num_workers = num_workers
        self.prompt = Prompt()
        self.train_set: list[EncodedText] = []
        self.held_out_set: list[EncodedText] = []

    @abstractmethod
    def splits(self) -> tuple[list[LabelledText], list[LabelledText]]:
        """Return the training rows and the held-out rows."""

    def setup(self, stage: str) -> None:
        """Read and encode both splits, once."""
        if self.held_out_set:
            return
        train, held_out = self.splits()
        self.train_set, self.held_out_set = self._encode(train), self._encode(held_out)

    def train_dataloader(self) -> DataLoader[EncodedText]:
        """Return the shuffled training rows."""
        return self._loader(self.train_set, shuffle=True)

    def val_dataloader(self) -> DataLoader[EncodedText]:
        """Return the held-out rows."""
        return self._loader(self.held_out_set, shuffle=False)

    def test_dataloader(self) -> DataLoader[EncodedText]:
        """Return the held-out rows."""
        return self._loader(self.held_out_set, shuffle=False)

    def predict_dataloader(self) -> DataLoader[EncodedText]:
        """Return the held-out rows."""
        return self._loader(self.held_out_set, shuffle=False)

    def _encode(self, rows: list[LabelledText]) -> list[EncodedText]:
        return encode(rows, tokenizer=self.tokenizer, prompt=self.prompt, max_length=self.max_length)

    def _loader(self, rows: list[EncodedText], *, shuffle: bool) -> DataLoader[EncodedText]:
        return classification_loader(
            rows,
            tokenizer=self.tokenizer,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
        )


def classification_loader(
    rows: Sequence[EncodedText],
    *,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    shuffle: bool = False,
    num_workers: int = 0,
) -> DataLoader[EncodedText]:
    """Return a loader of `Batch`es that keeps a last batch of fewer rows."""
    return DataLoader(
        rows,  # type: ignore[arg-type]  # torch asks for a Dataset but needs only __getitem__ and __len__
        batch_size=batch_size,
        shuffle=shuffle,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        collate_fn=partial(collate, padding_token=tokenizer.pad_token_id),
    )


def shuffled(rows: Sequence[LabelledText], *, seed: int) -> list[LabelledText]:
    """Return the rows in an order that depends on `seed` alone."""
    # Sorting by draws, because only random() itself is promised to stay equal between Python versions.
    draws = random.Random(seed)
    return [row for _, row in sorted(((draws.random(), row) for row in rows), key=lambda drawn: drawn[0])]


def balanced_subset(
    rows: Sequence[LabelledText], count: int, *, classes: Sequence[str]
) -> list[LabelledText]:
    """Return `count` rows, the first of each class, classes in turn: equally many of each, to within one.

    Raises DataError when a class has too few rows.
    """
    of_class = [[row for row in rows if row.label == label] for label in range(len(classes))]
    for label, name in enumerate(classes):
        needed = (count - label + len(classes) - 1) // len(classes)
        if len(of_class[label]) < needed:
            raise DataError(
                f"A balanced set of {count} rows needs {needed} rows of the class {name}, but there are "
                f"{len(of_class[label])}: ask for fewer rows."
            )
    return [of_class[index % len(classes)][index // len(classes)] for index in range(count)]
