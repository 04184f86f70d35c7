"""From labelled texts to batches: of a prompt and its label word, or of a text and its class index."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from lightning_hybridop.data.sources import DataError
from lightning_hybridop.data.split import SplitData, check_choice
from lightning_hybridop.modules.prompts import IGNORED, Batch, Prompt

LabelForm = Literal["word", "number"]
"""What a row is trained on: the label word behind a prompt, or the class index of the text."""


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
        input_ids[index, tokens - len(sequence) :] = torch.tensor(sequence)
        attention_mask[index, tokens - len(sequence) :] = 1
        labels[index, tokens - len(row.answer) :] = torch.tensor(row.answer)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedText:
    """The tokens of a text and the index of its class."""

    tokens: list[int]
    label: int


def encode_numbered(
    rows: Sequence[LabelledText], *, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> list[NumberedText]:
    """Return the tokens of every row's text, at most `max_length`; a text that is too long loses its end."""
    if not rows:
        return []
    texts = tokenizer([row.text for row in rows], truncation=True, max_length=max_length)["input_ids"]
    return [NumberedText(tokens=text, label=row.label) for row, text in zip(rows, texts, strict=True)]


def collate_numbered(rows: Sequence[NumberedText], *, padding_token: int) -> Batch:
    """Return a batch as long as its longest row, padded on the left, with labels int64 (rows,)."""
    # A text is a prompt that nothing follows.
    texts = [EncodedText(prompt=row.tokens, answer=[]) for row in rows]
    return collate(texts, padding_token=padding_token) | {"labels": torch.tensor([row.label for row in rows])}


class ClassificationData(SplitData[EncodedText | NumberedText]):
    """Encoded training and held-out rows of a labelled text data set; a data set says what its `splits` are.

    `labels` says what rows are trained on: the label word behind a prompt ("word", for `LabelWordClassifier`) or the
    class index ("number", for `SequenceClassifier`).
    """

    def __init__(
        self,
        *,
        tokenizer: PreTrainedTokenizerBase | str,
        batch_size: int,
        max_length: int,
        num_workers: int,
        labels: LabelForm,
    ) -> None:
        super().__init__(
            tokenizer=tokenizer, batch_size=batch_size, max_length=max_length, num_workers=num_workers
        )
        check_choice("labels", labels, ("word", "number"))
        self.labels = labels
        self.prompt = Prompt()

    @abstractmethod
    def splits(self) -> tuple[list[LabelledText], list[LabelledText]]:
        """Return the training rows and the held-out rows."""

    def encoded_splits(self) -> tuple[list[EncodedText | NumberedText], list[EncodedText | NumberedText]]:
        """Read and encode both splits."""
        train, held_out = self.splits()
        return self._encode(train), self._encode(held_out)

    def collate(self, rows: Sequence[EncodedText | NumberedText]) -> Batch:
        """Return a batch padded on the left."""
        padding_token = self.tokenizer.pad_token_id
        if self.labels == "number":
            numbered = [row for row in rows if isinstance(row, NumberedText)]
            return collate_numbered(numbered, padding_token=padding_token)
        prompted = [row for row in rows if isinstance(row, EncodedText)]
        return collate(prompted, padding_token=padding_token)

    def _encode(self, rows: list[LabelledText]) -> list[EncodedText | NumberedText]:
        if self.labels == "number":
            return [*encode_numbered(rows, tokenizer=self.tokenizer, max_length=self.max_length)]
        return [*encode(rows, tokenizer=self.tokenizer, prompt=self.prompt, max_length=self.max_length)]


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
