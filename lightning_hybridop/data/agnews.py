"""AG News: news titles with descriptions in four classes, from its CSV files or from the Hugging Face hub."""

import csv
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_hybridop.data.classification import (
    ClassificationData,
    LabelForm,
    LabelledText,
    balanced_subset,
)
from lightning_hybridop.data.sources import DataError, hub_rows, local_file
from lightning_hybridop.data.split import shuffled
from lightning_hybridop.modules.language_models import SMOLLM2
from lightning_hybridop.modules.prompts import CLASSES

COLUMNS = ("class_index", "title", "description")


class AGNewsData(ClassificationData):
    """AG News as prompts with label words; validation, test and prediction use the same held-out rows.

    `train` and `test` are CSV files, with or without the header `class_index,title,description`, whose
    classes are 1..4 = World, Sports, Business, Technology; what is not a file is taken as a data set's name
    on the Hugging Face hub (`fancyzhx/ag_news`), which needs the package `datasets`. Rows are shuffled by
    `seed`; training rows whose text also stands in `test` are dropped; `train_rows` and `held_out_rows` limit
    how many are used (None: all), the held-out ones equally many of each class. `tokenizer` is a tokenizer or
    what `load_tokenizer` takes.

    Batches are dictionaries of `input_ids`, `attention_mask` and `labels`, int64 (rows, tokens), of at most
    `max_length` tokens; with `labels="number"` the labels are class indices, int64 (rows,). Raises
    DataError, in `setup`, when a file is missing or malformed.
    """

    def __init__(
        self,
        *,
        train: str | Path,
        test: str | Path,
        tokenizer: PreTrainedTokenizerBase | str = SMOLLM2,
        train_rows: int | None = None,
        held_out_rows: int | None = 500,
        batch_size: int = 8,
        max_length: int = 128,
        num_workers: int = 0,
        seed: int = 0,
        labels: LabelForm = "word",
    ) -> None:
        super().__init__(
            tokenizer=tokenizer,
            batch_size=batch_size,
            max_length=max_length,
            num_workers=num_workers,
            labels=labels,
        )
        self.train = train
        self.test = test
        self.train_rows = train_rows
        self.held_out_rows = held_out_rows
        self.seed = seed

    def splits(self) -> tuple[list[LabelledText], list[LabelledText]]:
        """Return shuffled training rows, without those of the test set, and held-out rows balanced over the classes."""
        test = shuffled(read_agnews(self.test, split="test"), seed=self.seed)
        held_out = (
            test if self.held_out_rows is None else balanced_subset(test, self.held_out_rows, classes=CLASSES)
        )
        train = without_texts_of(test, shuffled(read_agnews(self.train, split="train"), seed=self.seed))
        return train[: self.train_rows], held_out


def read_agnews(source: str | Path, *, split: str) -> list[LabelledText]:
    """Return the rows of an AG News CSV file, or of a hub data set's split ("train", "test"), in their order.

    Raises DataError.
    """
    option = f"data.{split}"
    path = local_file(source, name="AG News", form="CSV", option=option)
    if path is not None:
        return list(_read_csv(path))

    def convert(row: Mapping[str, Any]) -> LabelledText:
        if row["label"] not in range(len(CLASSES)):
            raise DataError(
                f"{source}, split {split}: found the label {row['label']}, expected 0..{len(CLASSES) - 1}."
            )
        return LabelledText(text=row["text"], label=row["label"])

    return hub_rows(
        str(source), split=split, convert=convert, columns="text and label", form="CSV", option=option
    )


def without_texts_of(held_out: list[LabelledText], rows: list[LabelledText]) -> list[LabelledText]:
    """Return the rows whose text does not stand in `held_out`, whatever its case and spacing."""
    known = {_normal_form(row.text) for row in held_out}
    return [row for row in rows if _normal_form(row.text) not in known]


def _normal_form(text: str) -> str:
    return " ".join(text.casefold().split())


def _read_csv(path: Path) -> Iterator[LabelledText]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, strict=True)
        empty = True
        number = 1
        try:
            for fields in lines:
                # A quoted field may span lines: name the one on which the row begins.
                place = f"{path}, line {number}"
                first, number = number == 1, lines.line_num + 1
                if not fields:
                    continue
                if first and not _is_number(fields[0]):
                    _check_header(fields, place)
                    continue
                yield _row(fields, place)
                empty = False
        except csv.Error as error:
            raise DataError(f"{path}, line {number}: not valid CSV ({error}); double every quote.") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 text ({error.reason}); convert the file to UTF-8.") from error
        if empty:
            raise DataError(f"{path}: no rows; expected the columns {','.join(COLUMNS)}.")


def _is_number(field: str) -> bool:
    return re.fullmatch(r"-?\d+", field.strip()) is not None


def _check_header(fields: list[str], place: str) -> None:
    found = tuple("_".join(field.lower().split()) for field in fields)
    if found != COLUMNS:
        raise DataError(
            f"{place}: found the columns {','.join(fields)!r}, expected {','.join(COLUMNS)!r} or no header."
        )


def _row(fields: list[str], place: str) -> LabelledText:
    if len(fields) != len(COLUMNS):
        raise DataError(
            f"{place}: found {len(fields)} columns, expected {len(COLUMNS)}: {','.join(COLUMNS)}."
        )
    index, title, description = fields
    if not _is_number(index) or not 1 <= int(index) <= len(CLASSES):
        raise DataError(
            f"{place}: found the class {index!r}, expected 1..{len(CLASSES)} ({', '.join(CLASSES)})."
        )
    # In these files a backslash stands for a line break of the original.
    text = " ".join(f"{title} {description}".replace("\\", " ").split())
    return LabelledText(text=text, label=int(index) - 1)
