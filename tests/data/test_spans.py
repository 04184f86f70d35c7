from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase, TokenizersBackend

from lightning_hybridop.data.sources import DataError
from lightning_hybridop.data.spans import AskedContext, EncodedSpan, collate_spans, encode_spans
from lightning_hybridop.data.squad import read_squad


def characters() -> PreTrainedTokenizerBase:
    """A tokenizer of single characters that puts `#` before, between and behind the texts of a pair."""
    names = ["<unk>", "#", *"abcdefghijklmnopqrstuvwxyz?"]
    backend = Tokenizer(
        models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split("", "isolated")]
    )
    backend.post_processor = TemplateProcessing(
        single="# $A #", pair="# $A # $B:1 #:1", special_tokens=[("#", 1)]
    )
    return TokenizersBackend(tokenizer_object=backend, unk_token="<unk>", pad_token="#", eos_token="#")


CHARACTERS = characters()


def encoded(context: str, answer: str, *, max_length: int, keep_answer: bool) -> EncodedSpan:
    row = AskedContext(context=context, question="q?", answers=(answer,), answer_start=context.index(answer))
    (span,) = encode_spans([row], tokenizer=CHARACTERS, max_length=max_length, keep_answer=keep_answer)
    return span


def kept(span: EncodedSpan) -> str:
    return "".join(span.context[start:end] for start, end in span.offsets if start >= 0)


def pointed_at(span: EncodedSpan) -> str:
    return span.context[span.offsets[span.start][0] : span.offsets[span.end][1]]


def test_positions_point_at_the_answer_behind_the_question() -> None:
    span = encoded("ab cde f", "cd", max_length=20, keep_answer=True)
    assert "".join(CHARACTERS.convert_ids_to_tokens(span.tokens)) == "#q?#abcdef#"
    assert (span.start, span.end) == (6, 7)
    assert pointed_at(span) == "cd"
    # The question's tokens and the separators stand for no character of the context.
    assert [start for start, _ in span.offsets] == [-1, -1, -1, -1, 0, 1, 3, 4, 5, 7, -1]


def test_a_long_training_context_keeps_the_answer_in_its_middle() -> None:
    def window(answer: str) -> str:
        span = encoded("abcdefghijklmnopqrstuvwxyz", answer, max_length=11, keep_answer=True)
        assert len(span.tokens) == 11
        assert pointed_at(span) == answer
        return kept(span)

    assert window("jk") == "hijklm"
    assert window("ab") == "abcdef"
    assert window("z") == "uvwxyz"
    assert window("klmnop") == "klmnop"


def test_a_long_held_out_context_loses_its_end_whatever_the_answer() -> None:
    found = [
        encoded("abcdefghijklmnop", answer, max_length=11, keep_answer=False)
        for answer in ("ab", "ef", "fg", "op")
    ]
    assert [kept(span) for span in found] == ["abcdef"] * 4
    assert [(span.start, span.end) for span in found] == [(4, 5), (8, 9), (-100, -100), (-100, -100)]
    assert found[3].answers == ("op",)


@given(
    words=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=8),
    place=st.tuples(st.integers(0, 7), st.integers(1, 3)),
    max_length=st.integers(17, 40),
)
def test_training_positions_always_give_the_answers_text_back(
    words: list[str], place: tuple[int, int], max_length: int
) -> None:
    first = place[0] % len(words)
    context = " ".join(words)
    answer = " ".join(words[first : first + place[1]])
    start = len(" ".join(words[:first])) + (first > 0)
    row = AskedContext(context=context, question="q?", answers=(answer,), answer_start=start)
    (span,) = encode_spans([row], tokenizer=CHARACTERS, max_length=max_length, keep_answer=True)
    assert pointed_at(span) == answer
    assert span.offsets[span.start][0] == start
    assert len(span.tokens) <= max_length


def test_white_space_around_an_answer_does_not_count() -> None:
    assert pointed_at(encoded("ab cd ef", " cd ", max_length=20, keep_answer=True)) == "cd"


def test_lengths_without_room_are_refused() -> None:
    with pytest.raises(
        DataError, match="no room for a context: the question 'q\\?' alone takes 5 tokens, so pass at least 6"
    ):
        encoded("abc", "a", max_length=5, keep_answer=False)
    with pytest.raises(
        DataError, match="leaves 3 tokens for a context, but the answer 'abcd' takes 4: pass at least 9"
    ):
        encoded("abcdef", "abcd", max_length=8, keep_answer=True)
    assert pointed_at(encoded("abcdef", "abcd", max_length=9, keep_answer=True)) == "abcd"


def test_a_batch_is_padded_on_the_right_to_its_longest_row() -> None:
    rows = [
        encoded("abcd", "b", max_length=20, keep_answer=True),
        encoded("ab", "b", max_length=20, keep_answer=True),
    ]
    batch = collate_spans(rows, padding_token=1)
    assert batch["input_ids"].shape == (2, 9)
    assert batch["input_ids"][1].tolist() == [*rows[1].tokens, 1, 1]
    assert batch["attention_mask"][1].tolist() == [1] * 7 + [0, 0]
    assert batch["offsets"][1, -3:].tolist() == [[-1, -1]] * 3
    assert batch["start_positions"].tolist() == [5, 5]
    assert batch["context"] == ["abcd", "ab"]
    assert batch["answers"] == [["b"], ["b"]]
    assert "token_type_ids" not in batch


def test_models_that_ask_for_it_are_told_question_and_context_apart() -> None:
    tokenizer = characters()
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    row = AskedContext(context="abcdefgh", question="q?", answers=("h",), answer_start=7)
    spans = encode_spans([row], tokenizer=tokenizer, max_length=9, keep_answer=True)
    batch = collate_spans(spans, padding_token=1)
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 1, 1, 1]]


def test_real_questions_point_at_their_answers(squad_folder: Path) -> None:
    questions = read_squad(squad_folder / "xquad.en.json", split="test")[::20]
    asked = [
        AskedContext(
            context=row.context,
            question=row.question,
            answers=(row.answers[0][0],),
            answer_start=row.answers[0][1],
        )
        for row in questions
    ]
    for span in encode_spans(asked, tokenizer=CHARACTERS, max_length=500, keep_answer=True):
        assert pointed_at(span) == span.answers[0]
