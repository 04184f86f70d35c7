"""MultiRC: is an answer to a question about a passage right? From SuperGLUE's files or from the Hugging Face hub."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lightning_hybridop.data.classification import EncodedText, collate
from lightning_hybridop.data.prompted import PromptedAnswer, encode_answers
from lightning_hybridop.data.sources import DataError, field, hub_rows, local_file
from lightning_hybridop.data.split import SplitData, shuffled
from lightning_hybridop.modules.language_models import SMOLLM2
from lightning_hybridop.modules.prompts import Batch

LABEL_WORDS = ("no", "yes")
"""How a wrong and a right answer are called."""

_SPLITS = {"train": "train", "test": "validation"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOption:
    """A possible answer to a question about a passage.

    `label` is 1 if it is right, `question_number` tells the questions of one source apart.
    """

    passage: str
    question: str
    answer: str
    label: int
    question_number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedOption:
    """The tokens of an answer option and the number of its question."""

    text: EncodedText
    question_number: int


class MultiRCData(SplitData[EncodedOption]):
    """MultiRC as prompts with the label words yes and no; validation, test and prediction use the same held-out rows.

    `train` and `test` are JSONL files in SuperGLUE's form, a passage with its questions and their answers per line;
    what is not a file is taken as a data set's name on the Hugging Face hub (`aps/super_glue`), which needs the
    package `datasets`. A row is one answer option. Training rows are shuffled by `seed`; training rows whose passage also
    stands in `test` are dropped; `train_rows` and `held_out_questions` limit how many are used (None: all), the
    held-out ones by whole questions. `tokenizer` is a tokenizer or what `load_tokenizer` takes.

    Batches are dictionaries of `input_ids`, `attention_mask` and `labels`, int64 (rows, tokens), padded on the left,
    of at most `max_length` tokens (a longer passage loses its end), and `question`, int64 (rows,): what
    `LabelWordClassifier(label_words=("no", "yes"), per_question=True)` takes. Raises DataError, in `setup`, when a
    file is missing or malformed.
    """

    def __init__(
        self,
        *,
        train: str | Path,
        test: str | Path,
        tokenizer: PreTrainedTokenizerBase | str = SMOLLM2,
        train_rows: int | None = None,
        held_out_questions: int | None = None,
        batch_size: int = 8,
        max_length: int = 1024,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(
            tokenizer=tokenizer, batch_size=batch_size, max_length=max_length, num_workers=num_workers
        )
        self.train = train
        self.test = test
        self.train_rows = train_rows
        self.held_out_questions = held_out_questions
        self.seed = seed

    def encoded_splits(self) -> tuple[list[EncodedOption], list[EncodedOption]]:
        """Read and encode both splits."""
        train, held_out = self.splits()
        return self._encode(train), self._encode(held_out)

    def splits(self) -> tuple[list[AnswerOption], list[AnswerOption]]:
        """Return shuffled training rows, without passages of the test set, and the options of held-out questions."""
        test = read_multirc(self.test, split="test")
        numbers = shuffled(sorted({option.question_number for option in test}), seed=self.seed)
        chosen = set(numbers[: self.held_out_questions])
        held_out = [option for option in test if option.question_number in chosen]
        known = {" ".join(option.passage.split()) for option in test}
        train = [
            option
            for option in shuffled(read_multirc(self.train, split="train"), seed=self.seed)
            if " ".join(option.passage.split()) not in known
        ]
        return train[: self.train_rows], held_out

    def collate(self, rows: Sequence[EncodedOption]) -> Batch:
        """Return a batch padded on the left."""
        texts = collate([row.text for row in rows], padding_token=self.tokenizer.pad_token_id)
        return texts | {"question": torch.tensor([row.question_number for row in rows])}

    def _encode(self, options: Sequence[AnswerOption]) -> list[EncodedOption]:
        texts = encode_answers(
            [prompted(option) for option in options], tokenizer=self.tokenizer, max_length=self.max_length
        )
        return [
            EncodedOption(text=text, question_number=option.question_number)
            for text, option in zip(texts, options, strict=True)
        ]


def prompted(option: AnswerOption) -> PromptedAnswer:
    """Return the prompt that asks whether an answer is right, with the label word."""
    return PromptedAnswer(
        passage=option.passage,
        request=f"\nQuestion: {option.question}\nAnswer: {option.answer}\nIs this answer right, yes or no?",
        answer=LABEL_WORDS[option.label],
    )


def read_multirc(source: str | Path, *, split: str) -> list[AnswerOption]:
    """Return the answer options of a MultiRC file, or of a hub data set ("train", or "test" for its validation).

    Options keep their order, and questions are numbered in theirs. Raises DataError.
    """
    option = f"data.{split}"
    path = local_file(source, name="MultiRC", form="JSONL", option=option)
    if path is not None:
        return list(_read_jsonl(path))

    def convert(row: Mapping[str, Any]) -> AnswerOption:
        label = row["label"]
        if label not in (0, 1):
            raise DataError(f"{source}, split {_SPLITS[split]}: found the label {label}, expected 0 or 1.")
        return AnswerOption(
            passage=row["paragraph"],
            question=row["question"],
            answer=row["answer"],
            label=label,
            question_number=row["idx"]["question"],
        )

    return hub_rows(
        str(source),
        configuration=("multirc",),
        split=_SPLITS[split],
        convert=convert,
        columns="paragraph, question, answer, idx and label",
        form="JSONL",
        option=option,
    )


def _read_jsonl(path: Path) -> Iterator[AnswerOption]:
    questions = 0
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    place = f"{path}, line {number}"
                    for question in _questions(line, place):
                        yield from _options(question, place, questions)
                        questions += 1
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason}); convert the file to UTF-8.") from error
    if questions == 0:
        raise DataError(f"{path}: no questions; expected a passage with questions and answers on each line.")


def _questions(line: str, place: str) -> Iterable[tuple[str, object]]:
    try:
        row = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise DataError(
            f"{place}: not valid JSON ({error.msg}, column {error.colno}), expected an object with the field 'passage'."
        ) from error
    passage = field(row, "passage", dict, place)
    text = field(passage, "text", str, place)
    return [(text, question) for question in field(passage, "questions", list, place)]


def _options(asked: tuple[str, object], place: str, question_number: int) -> Iterator[AnswerOption]:
    passage, question = asked
    text = field(question, "question", str, place)
    for answer in field(question, "answers", list, place):
        label = field(answer, "label", int, place)
        if label not in (0, 1):
            raise DataError(f"{place}: found the label {label}, expected 0 (wrong) or 1 (right).")
        yield AnswerOption(
            passage=passage,
            question=text,
            answer=field(answer, "text", str, place),
            label=label,
            question_number=question_number,
        )
