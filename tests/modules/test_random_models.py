from pathlib import Path

import pytest
import torch

from lightning_hybridop.modules.language_models import load_language_model
from lightning_hybridop.modules.prompts import Prompt
from lightning_hybridop.modules.random_models import random_blocks


@pytest.mark.parametrize(
    ("name", "blocks"), [("random-28-blocks", 28), ("random-blocks", None), ("a/random-28-blocks", None)]
)
def test_the_name_says_how_many_blocks(name: str, blocks: int | None) -> None:
    assert random_blocks(name) == blocks


def test_the_same_model_comes_from_the_cache_and_from_the_first_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRIDOP_CACHE", str(tmp_path / "first"))
    state = torch.random.get_rng_state()
    model, tokenizer = load_language_model("random-5-blocks")
    again, _ = load_language_model("random-5-blocks")
    monkeypatch.setenv("HYBRIDOP_CACHE", str(tmp_path / "second"))
    other, _ = load_language_model("random-5-blocks")

    assert torch.equal(torch.random.get_rng_state(), state)
    assert model.config.num_hidden_layers == 5
    for copy in (again, other):
        for mine, theirs in zip(model.parameters(), copy.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    assert len(Prompt().label_tokens(tokenizer)) == 4  # the label words differ in their first character
    assert tokenizer.pad_token == "<eos>"
