"""SQuAD: questions about paragraphs of articles, answered by words of the paragraph; from its files or from the hub."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from lightning_hybridop.data.classification import EncodedText, collate
from lightning_hybridop.data.prompted import PromptedAnswer, encode_answers
from lightning_hybridop.data.sources import DataError, field, hub_rows, local_file
from lightning_hybridop.data.spans import AskedContext, EncodedSpan, collate_spans, encode_spans
from lightning_hybridop.data.split import SplitData, check_choice, shuffled
from lightning_hybridop.modules.language_models import SMOLLM2

AnswerForm = Literal["text", "span"]
"""Whether answers are written behind a prompt or pointed at in the context."""

_SPLITS = {"train": "train", "test": "validation"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question about a context of the article `title`; each answer is a text and the character where it starts."""

    title: str
    context: str
    question: str
    answers: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredPrompt:
    """The tokens of a prompt with its first answer, and the texts of all answers."""

    text: EncodedText
    answers: tuple[str, ...]


class SQuADData(SplitData[AnsweredPrompt | EncodedSpan]):
    """SQuAD 1.1; validation, test and prediction use the same held-out questions, of articles never trained on.

    `train` and `test` are JSON files as published; what is not a file is taken as a data set's name on the Hugging
    Face hub (`rajpurkar/squad`), which needs the package `datasets`. Without `test`, `held_out_articles` articles of
    `train` are held out. Articles and rows are shuffled by `seed`; training rows of an article that also stands in
    `test` are dropped; `train_rows` and `held_out_rows` limit how many are used (None: all). `tokenizer` is a
    tokenizer or what `load_tokenizer` takes.

    With `answers="text"`, batches are what `TextAnswerer` takes: a prompt and its first answer, padded on the left; a
    context that is too long loses its end. With `answers="span"`, they are what `SpanAnswerer` takes, padded on the
    right: a training context that is too long is cut to a window with the first answer in its middle, as far as that
    goes, a held-out one loses its end, so that the cut does not give the answer away, and with it perhaps the answer.
    Both at most `max_length` tokens. Raises DataError, in `setup`, when a file is missing or malformed.
    """

    def __init__(
        self,
        *,
        train: str | Path,
        test: str | Path | None = None,
        answers: AnswerForm = "text",
        held_out_articles: int = 10,
        tokenizer: PreTrainedTokenizerBase | str = SMOLLM2,
        train_rows: int | None = None,
        held_out_rows: int | None = None,
        batch_size: int = 8,
        max_length: int = 1024,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(
            tokenizer=tokenizer, batch_size=batch_size, max_length=max_length, num_workers=num_workers
        )
        check_choice("answers", answers, ("text", "span"))
        self.train = train
        self.test = test
        self.answers = answers
        self.held_out_articles = held_out_articles
        self.train_rows = train_rows
        self.held_out_rows = held_out_rows
        self.seed = seed

    def encoded_splits(
        self,
    ) -> tuple[list[AnsweredPrompt | EncodedSpan], list[AnsweredPrompt | EncodedSpan]]:
        """Read and encode both splits."""
        train, held_out = self.splits()
        return self._encode(train, keep_answer=True), self._encode(held_out, keep_answer=False)

    def splits(self) -> tuple[list[Question], list[Question]]:
        """Return shuffled training questions and shuffled held-out questions, of no article in common."""
        train = read_squad(self.train, split="train")
        if self.test is None:
            held_out_titles = set(
                articles_to_hold_out(
                    [question.title for question in train], self.held_out_articles, self.seed
                )
            )
            held_out = [question for question in train if question.title in held_out_titles]
        else:
            held_out = read_squad(self.test, split="test")
            held_out_titles = {question.title for question in held_out}
        train = [question for question in train if question.title not in held_out_titles]
        return (
            shuffled(train, seed=self.seed)[: self.train_rows],
            shuffled(held_out, seed=self.seed)[: self.held_out_rows],
        )

    def collate(self, rows: Sequence[AnsweredPrompt | EncodedSpan]) -> dict[str, Any]:
        """Return a batch for the module that answers in this form."""
        padding_token = self.tokenizer.pad_token_id
        if self.answers == "span":
            return collate_spans(
                [row for row in rows if isinstance(row, EncodedSpan)], padding_token=padding_token
            )
        prompts = [row for row in rows if isinstance(row, AnsweredPrompt)]
        texts = collate([row.text for row in prompts], padding_token=padding_token)
        return {**texts, "answers": [list(row.answers) for row in prompts]}

    def _encode(
        self, questions: Sequence[Question], *, keep_answer: bool
    ) -> list[AnsweredPrompt | EncodedSpan]:
        if self.answers == "span":
            asked = [
                AskedContext(
                    context=question.context,
                    question=question.question,
                    answers=tuple(text for text, _ in question.answers),
                    answer_start=question.answers[0][1],
                )
                for question in questions
            ]
            return [
                *encode_spans(
                    asked, tokenizer=self.tokenizer, max_length=self.max_length, keep_answer=keep_answer
                )
            ]
        texts = encode_answers(
            [prompted(question) for question in questions],
            tokenizer=self.tokenizer,
            max_length=self.max_length,
            end_of_text=True,
        )
        return [
            AnsweredPrompt(text=text, answers=tuple(answer for answer, _ in question.answers))
            for text, question in zip(texts, questions, strict=True)
        ]


def prompted(question: Question) -> PromptedAnswer:
    """Return the prompt that asks a question about its context, with the first answer."""
    return PromptedAnswer(
        passage=question.context,
        request=f"\nQuestion: {question.question.strip()}\nAnswer:",
        answer=question.answers[0][0],
    )


def articles_to_hold_out(titles: Sequence[str], count: int, seed: int) -> list[str]:
    """Return `count` of the distinct titles, which ones depends on `seed` alone.

    Raises DataError when that would leave none to train on, or hold out none.
    """
    distinct = sorted(set(titles))
    if not 0 < count < len(distinct):
        raise DataError(
            f"held_out_articles={count}, but data.train has {len(distinct)} articles: hold out at least one and leave "
            "at least one, or name a file in data.test."
        )
    return shuffled(distinct, seed=seed)[:count]


def read_squad(source: str | Path, *, split: str) -> list[Question]:
    """Return the questions of a SQuAD file, or of a hub data set ("train", or "test" for its validation).

    Raises DataError.
    """
    option = f"data.{split}"
    path = local_file(source, name="SQuAD", form="JSON", option=option)
    if path is not None:
        return list(_read_json(path))

    def convert(row: Mapping[str, Any]) -> Question:
        answers = zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)
        return _checked(
            Question(
                title=row["title"],
                context=row["context"],
                question=row["question"],
                answers=tuple(answers),
            ),
            f"{source}, split {_SPLITS[split]}, question {row['id']}",
        )

    return hub_rows(
        str(source),
        split=_SPLITS[split],
        convert=convert,
        columns="id, title, context, question and answers",
        form="JSON",
        option=option,
    )


def _read_json(path: Path) -> Iterator[Question]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}, line {error.lineno}: not valid JSON ({error.msg}), expected an object with the field 'data'."
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason}); convert the file to UTF-8.") from error
    # A whole file may be one line: say which article and question instead.
    empty = True
    for number, article in enumerate(field(content, "data", list, str(path)), start=1):
        place = f"{path}, article {number}"
        title = field(article, "title", str, place)
        for paragraph in field(article, "paragraphs", list, place):
            context = field(paragraph, "context", str, place)
            for row in field(paragraph, "qas", list, place):
                here = f"{place}, question {field(row, 'id', str, place)}"
                answers = tuple(
                    (field(answer, "text", str, here), field(answer, "answer_start", int, here))
                    for answer in field(row, "answers", list, here)
                )
                text = field(row, "question", str, here)
                yield _checked(Question(title=title, context=context, question=text, answers=answers), here)
                empty = False
    if empty:
        raise DataError(f"{path}: no questions; expected articles of paragraphs with questions and answers.")


def _checked(question: Question, place: str) -> Question:
    if not question.answers:
        raise DataError(f"{place}: no answer, expected at least one, as in SQuAD 1.1.")
    for text, start in question.answers:
        found = question.context[start : start + len(text)] if start >= 0 else ""
        if not text.strip() or found != text:
            raise DataError(
                f"{place}: found {found!r} at character {start} of the context, expected the answer {text!r}."
            )
    return question
