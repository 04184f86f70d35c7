import os
from pathlib import Path

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


def data_folder(name: str) -> Path:
    """Return the folder of an original data set, in HYBRIDOP_DATA or in the folder beside the checkout."""
    beside = Path(__file__).parents[2] / ".." / "shared" / "data"
    folder = Path(os.environ.get("HYBRIDOP_DATA", beside)) / name
    if not folder.is_dir():
        pytest.skip(f"needs the original files in {name}/; name their parent folder in HYBRIDOP_DATA")
    return folder


@pytest.fixture(scope="session")
def multirc_folder() -> Path:
    return data_folder("multirc")


@pytest.fixture(scope="session")
def squad_folder() -> Path:
    return data_folder("squad")
