import re

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from lightning_hybridop.pipeline.anatomy import CutError, find_blocks, read_anatomy
from tests.pipeline.plain import VOCABULARY, WIDTH, PlainModel
from tests.tiny import TinyModule, tiny_llama

# peft 0.21 asks a transformers 5.24 model by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def test_anatomy_of_a_lightning_module_around_peft() -> None:
    anatomy = read_anatomy(TinyModule(blocks=5))

    path = "model.base_model.model"
    assert anatomy.blocks_name == f"{path}.model.layers"
    assert anatomy.blocks == 5
    assert anatomy.embedding_name == f"{path}.model.embed_tokens"
    assert set(anatomy.behind) == {f"{path}.model.norm", f"{path}.lm_head"}
    assert anatomy.width == 16
    assert anatomy.returns_tuple is False


def test_what_runs_behind_is_told_by_running_not_by_order() -> None:
    # BERT's embeddings stand beside its encoder as the pooler does, and have a norm of their own.
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=61, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2
        )
    )

    anatomy = read_anatomy(model)

    assert anatomy.blocks_name == "bert.encoder.layer"
    assert anatomy.embedding_name == "bert.embeddings.word_embeddings"
    assert set(anatomy.behind) == {"bert.pooler", "classifier"}


def test_tied_head_is_behind_and_its_embedding_is_not() -> None:
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=61, n_embd=16, n_layer=3, n_head=2, bos_token_id=1, eos_token_id=2)
    )

    anatomy = read_anatomy(model)

    assert model.lm_head.weight is model.transformer.wte.weight
    assert set(anatomy.behind) == {"transformer.ln_f", "lm_head"}
    assert not anatomy.is_behind("transformer.wte.weight")


@pytest.mark.parametrize("tuples", [False, True], ids=["tensor", "tuple"])
def test_model_outside_hugging_face_is_judged_by_the_order_of_its_modules(tuples: bool) -> None:
    anatomy = read_anatomy(PlainModel(blocks=4, tuples=tuples))

    assert anatomy.blocks_name == "trunk"
    assert anatomy.blocks == 4
    assert anatomy.embedding_name is None
    assert anatomy.behind == ("norm", "head")
    assert anatomy.width == WIDTH
    assert anatomy.returns_tuple is tuples


def test_model_that_refuses_bare_tokens_is_judged_by_order() -> None:
    class NeedsMore(PlainModel):
        def get_input_embeddings(self) -> nn.Module:
            return self.embed

        def forward(self, tokens_BT: Tensor, *, audio: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(tokens_BT)

    anatomy = read_anatomy(NeedsMore())

    assert anatomy.embedding_name == "embed"
    assert anatomy.behind == ("norm", "head")
    assert anatomy.width == WIDTH


def test_reading_leaves_the_random_state_and_the_model_alone() -> None:
    module = TinyModule(dropout=0.5)
    module.train()
    before = torch.get_rng_state()

    read_anatomy(module)

    assert torch.equal(torch.get_rng_state(), before)
    assert all(child.training for child in module.modules())
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_outermost_longest_list_is_the_list_of_blocks() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(1, 1) for _ in range(9))

    model = nn.Module()
    model.layers = nn.ModuleList(Experts() for _ in range(3))
    model.heads = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))

    assert find_blocks(model, None) == "layers"
    assert find_blocks(model, "heads") == "heads"


def test_blocks_may_be_named_by_the_end_of_their_path() -> None:
    model = tiny_llama(blocks=3)

    assert find_blocks(model, "layers") == "base_model.model.model.layers"
    assert find_blocks(model, "model.layers") == "base_model.model.model.layers"


def test_wrong_name_of_blocks_lists_the_right_ones() -> None:
    with pytest.raises(
        CutError, match=re.escape("blocks='layer' names 0 module lists, expected exactly one of: trunk.")
    ):
        read_anatomy(PlainModel(), blocks_name="layer")


def test_ambiguous_name_of_blocks_is_refused() -> None:
    model = nn.Module()
    for side in ("encoder", "decoder"):
        model.add_module(side, PlainModel())

    with pytest.raises(CutError, match=r"names 2 module lists.*encoder\.trunk, decoder\.trunk"):
        read_anatomy(model, blocks_name="trunk")


def test_model_without_a_list_of_blocks_is_refused() -> None:
    with pytest.raises(CutError, match=r"Linear has no nn\.ModuleList of transformer blocks"):
        read_anatomy(nn.Linear(2, 2))


def test_unknown_width_is_refused() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 2)])

    with pytest.raises(CutError, match="the size of its hidden state is unknown"):
        read_anatomy(model)


def test_names_are_placed_by_whole_parts() -> None:
    anatomy = read_anatomy(PlainModel(blocks=12))

    assert anatomy.block_of("trunk.11.mix.weight") == 11
    assert anatomy.block_of("trunk.1.mix.weight") == 1
    assert anatomy.block_of("trunks.1.mix.weight") is None
    assert anatomy.is_behind("head.weight")
    assert anatomy.is_behind("norm")
    assert not anatomy.is_behind("header.weight")
    assert VOCABULARY > WIDTH  # an embedding's width is its second dimension, and the two differ here
