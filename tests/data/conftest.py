import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, TokenizersBackend

WORDS = [
    "Topic",
    ":",
    "World",
    "Sports",
    "Business",
    "Technology",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<eos>", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return TokenizersBackend(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>"
    )
