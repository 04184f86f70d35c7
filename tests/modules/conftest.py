import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TokenizersBackend,
)

WORDS = [
    "Topic",
    ":",
    "World",
    "Sports",
    "Business",
    "Technology",
    "Science",
    "Fiction",
    "the",
    "a",
    "team",
    "bank",
    "law",
    "chip",
    "wins",
    "loses",
]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<eos>", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return TokenizersBackend(
        tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>"
    )


@pytest.fixture
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=24,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
