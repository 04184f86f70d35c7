"""Prompts of a passage and what is asked of it, each with its own answer: questions about texts as language modelling."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from lightning_hybridop.data.classification import EncodedText
from lightning_hybridop.data.sources import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptedAnswer:
    """The prompt `{passage}{request}` and its answer, `{request} {answer}` where it follows."""

    passage: str
    request: str
    answer: str


def encode_answers(
    rows: Sequence[PromptedAnswer],
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    end_of_text: bool = False,
) -> list[EncodedText]:
    """Return the tokens of every row, at most `max_length` with the answer.

    A passage that is too long loses its end; what is asked and the answer are never cut. With `end_of_text` the
    answer ends with the tokenizer's end-of-text token, so that the model learns to stop.
    Raises DataError when `max_length` leaves no token for a passage.
    """
    if not rows:
        return []
    # Many rows ask about the same passage, and may ask the same of it.
    passages = list({row.passage for row in rows})
    requests = list({row.request for row in rows})
    answered = list({(row.request, row.answer) for row in rows})
    tokens_of_passage = dict(zip(passages, tokenizer(passages)["input_ids"], strict=True))
    tokens_of_request = dict(zip(requests, _tokens(tokenizer, requests), strict=True))
    # An answer's tokens may depend on what stands before it, so tokenise it in place and take the request off.
    both = dict(
        zip(
            answered, _tokens(tokenizer, [f"{request} {answer}" for request, answer in answered]), strict=True
        )
    )
    end = [tokenizer.eos_token_id] if end_of_text else []

    def encoded(row: PromptedAnswer) -> EncodedText:
        request = tokens_of_request[row.request]
        answer = [*both[row.request, row.answer][len(request) :], *end]
        room = max_length - len(request) - len(answer)
        if room < 1:
            raise DataError(
                f"max_length={max_length} leaves no room for the passage of {row.request.strip()!r}: the question and "
                f"its answer alone take {max_length - room} tokens, so pass at least {max_length - room + 1}."
            )
        return EncodedText(prompt=[*tokens_of_passage[row.passage][:room], *request], answer=answer)

    return [encoded(row) for row in rows]


def _tokens(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    found: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return found
