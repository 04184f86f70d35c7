"""Questions about contexts as pairs of texts, with the answer's first and last token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lightning_hybridop.data.sources import DataError
from lightning_hybridop.modules.prompts import IGNORED

_OUTSIDE = (-1, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedContext:
    """A context, a question, all accepted answers, and where in the context the first of them starts."""

    context: str
    question: str
    answers: tuple[str, ...]
    answer_start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedSpan:
    """The tokens of a question and its context, and the answer's first and last of them, -100 if they lack it.

    `offsets` are the characters `[start, end)` of `context` that a token stands for, -1 for all other tokens;
    `token_types` tell question and context apart for models that ask for it.
    """

    tokens: list[int]
    token_types: list[int] | None
    offsets: list[tuple[int, int]]
    start: int
    end: int
    context: str
    answers: tuple[str, ...]


def encode_spans(
    rows: Sequence[AskedContext],
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    keep_answer: bool,
) -> list[EncodedSpan]:
    """Return the tokens of every row, at most `max_length`; the question is never cut.

    A context that is too long loses its end. With `keep_answer` it loses its beginning and its end instead, so that the
    first answer stands in the middle of what is left, or as near to it as the context goes.
    Raises DataError when `max_length` leaves no room for a context or its answer, or the tokenizer tells no characters.
    """
    if not tokenizer.is_fast:
        raise DataError(
            f"{type(tokenizer).__name__} does not tell which characters its tokens stand for: use a fast tokenizer."
        )
    return [_encoded(row, tokenizer, max_length, keep_answer=keep_answer) for row in rows]


def _encoded(
    row: AskedContext, tokenizer: PreTrainedTokenizerBase, max_length: int, *, keep_answer: bool
) -> EncodedSpan:
    # The question on a line of its own: some tokenizers put nothing between the texts of a pair.
    pair = tokenizer(f"{row.question.strip()}\n", row.context, return_offsets_mapping=True, verbose=False)
    tokens, characters = pair["input_ids"], pair["offset_mapping"]
    of_context = [position for position, text in enumerate(pair.sequence_ids(0)) if text == 1]
    room = max_length - (len(tokens) - len(of_context))
    if room < 1:
        raise DataError(
            f"max_length={max_length} leaves no room for a context: the question {row.question!r} alone takes "
            f"{max_length - room} tokens, so pass at least {max_length - room + 1}."
        )
    answer_range = _answer_range(row)
    answer = [position for position in of_context if _overlap(characters[position], answer_range)]
    first = 0
    if keep_answer and answer:
        if len(answer) > room:
            raise DataError(
                f"max_length={max_length} leaves {room} tokens for a context, but the answer {row.answers[0]!r} takes "
                f"{len(answer)}: pass at least {max_length - room + len(answer)}."
            )
        before = of_context.index(answer[0]) - (room - len(answer)) // 2
        first = min(max(before, 0), max(len(of_context) - room, 0))
    cut = {*of_context[:first], *of_context[first + room :]}
    kept = [position for position in range(len(tokens)) if position not in cut]
    complete = bool(answer) and not cut.intersection(answer)
    inside = set(of_context)
    types = pair.get("token_type_ids")
    return EncodedSpan(
        tokens=[tokens[position] for position in kept],
        token_types=None if types is None else [types[position] for position in kept],
        offsets=[tuple(characters[position]) if position in inside else _OUTSIDE for position in kept],
        start=kept.index(answer[0]) if complete else IGNORED,
        end=kept.index(answer[-1]) if complete else IGNORED,
        context=row.context,
        answers=row.answers,
    )


def _answer_range(row: AskedContext) -> tuple[int, int]:
    """Return the characters `[start, end)` of the first answer, without the white space around it."""
    text = row.answers[0]
    start = row.answer_start + len(text) - len(text.lstrip())
    return start, start + len(text.strip())


def _overlap(first: tuple[int, int], second: tuple[int, int]) -> bool:
    return max(first[0], second[0]) < min(first[1], second[1])


def collate_spans(rows: Sequence[EncodedSpan], *, padding_token: int) -> dict[str, Any]:
    """Return a batch as long as its longest row, padded on the right; see `SpanAnswerer` for what it holds."""
    tokens = max(len(row.tokens) for row in rows)
    input_ids = torch.full((len(rows), tokens), padding_token)
    attention_mask = torch.zeros_like(input_ids)
    token_types = torch.zeros_like(input_ids)
    offsets = torch.full((len(rows), tokens, 2), -1)
    for index, row in enumerate(rows):
        length = len(row.tokens)
        input_ids[index, :length] = torch.tensor(row.tokens)
        attention_mask[index, :length] = 1
        token_types[index, :length] = torch.tensor(row.token_types or [0] * length)
        offsets[index, :length] = torch.tensor(row.offsets)
    types = {} if any(row.token_types is None for row in rows) else {"token_type_ids": token_types}
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        **types,
        "offsets": offsets,
        "start_positions": torch.tensor([row.start for row in rows]),
        "end_positions": torch.tensor([row.end for row in rows]),
        "context": [row.context for row in rows],
        "answers": [list(row.answers) for row in rows],
    }
