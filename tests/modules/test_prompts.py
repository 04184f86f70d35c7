import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from lightning_hybridop.modules.prompts import Prompt


def test_label_words_are_tokenised_where_they_follow_the_end(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = Prompt(label_words=("Sports", "Science Fiction"))
    assert tokenizer.convert_ids_to_tokens(prompt.ending_tokens(tokenizer)) == ["Topic", ":"]
    sports, fiction = prompt.label_tokens(tokenizer)
    assert tokenizer.convert_ids_to_tokens(sports) == ["Sports"]
    assert tokenizer.convert_ids_to_tokens(fiction) == ["Science", "Fiction"]


def test_special_tokens_of_the_tokenizer_stay_out(tokenizer: PreTrainedTokenizerBase) -> None:
    before = Prompt().label_tokens(tokenizer)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", 1)]
    )
    assert tokenizer("Topic")["input_ids"][0] == 1
    assert Prompt().label_tokens(tokenizer) == before


def test_words_with_the_same_first_token_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match=r"'Science' and 'Science Fiction' begin with the same token 8"):
        Prompt(label_words=("Science", "Science Fiction")).label_tokens(tokenizer)


def test_an_empty_word_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="'' has no token of its own"):
        Prompt(label_words=("World", "")).label_tokens(tokenizer)
