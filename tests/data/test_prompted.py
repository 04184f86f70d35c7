import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from lightning_hybridop.data.prompted import PromptedAnswer, encode_answers
from lightning_hybridop.data.sources import DataError


def words(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    return " ".join(tokenizer.convert_ids_to_tokens(tokens))


def test_a_passage_is_followed_by_its_request_and_its_own_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [
        PromptedAnswer(passage="one two", request="\nTopic:", answer="World six"),
        PromptedAnswer(passage="one two", request="\nfive:", answer="Sports"),
        PromptedAnswer(passage="three", request="\nTopic:", answer="World six"),
    ]
    encoded = encode_answers(rows, tokenizer=tokenizer, max_length=20)
    assert [(words(tokenizer, row.prompt), words(tokenizer, row.answer)) for row in encoded] == [
        ("one two Topic :", "World six"),
        ("one two five :", "Sports"),
        ("three Topic :", "World six"),
    ]


def test_a_long_passage_loses_its_end_and_nothing_else(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", 1)]
    )
    rows = [PromptedAnswer(passage="one two three four five", request="\nTopic:", answer="World")]
    (row,) = encode_answers(rows, tokenizer=tokenizer, max_length=7, end_of_text=True)
    assert words(tokenizer, row.prompt) == "<eos> one two Topic :"
    assert words(tokenizer, row.answer) == "World <eos>"


def test_a_length_without_room_for_a_passage_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [PromptedAnswer(passage="one", request="\nTopic:", answer="World six")]
    assert len(encode_answers(rows, tokenizer=tokenizer, max_length=5)[0].prompt) == 3
    with pytest.raises(DataError, match=r"passage of 'Topic:': .* alone take 4 tokens, so pass at least 5"):
        encode_answers(rows, tokenizer=tokenizer, max_length=4)


def test_no_rows_give_none(tokenizer: PreTrainedTokenizerBase) -> None:
    assert encode_answers([], tokenizer=tokenizer, max_length=5) == []
