import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from lightning_hybridop.pipeline.anatomy import CutError, read_anatomy
from lightning_hybridop.pipeline.stage import StageModel, parameter_owner
from lightning_hybridop.pipeline.stand_ins import FromPrevious, StageInputError
from tests.pipeline.by_hand import cut, forward_by_hand, split_gradients, unsplit_gradients
from tests.pipeline.plain import PlainModel, plain_step, tokens
from tests.tiny import VOCABULARY, TinyModule, tiny_llama

# peft 0.21 asks a transformers 5.24 model by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

BLOCKS = "base_model.model.model.layers"
TOKENS_BT = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))


def step(model: nn.Module) -> Any:
    return model(input_ids=TOKENS_BT, labels=TOKENS_BT)


def tied_llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).requires_grad_(False)


# What is cut away.


def test_owned_blocks_are_untouched_and_others_hold_no_weights() -> None:
    model = tiny_llama(blocks=4)
    blocks = list(model.get_submodule(BLOCKS))

    StageModel(model, read_anatomy(model), first=1, last=3)

    kept = model.get_submodule(BLOCKS)
    assert kept[1] is blocks[1]
    assert kept[2] is blocks[2]
    names = {name for name, _ in model.named_parameters()}
    assert {name.removeprefix(f"{BLOCKS}.").split(".")[0] for name in names} == {"1", "2"}


def test_frozen_weights_of_other_stages_are_released_and_adapters_stay() -> None:
    model = tiny_llama(blocks=4)
    original = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    stage = StageModel(model, read_anatomy(model), first=1, last=3)

    with stage.whole():
        for name, parameter in model.named_parameters():
            owned = f"{BLOCKS}.1." in name or f"{BLOCKS}.2." in name
            if owned or "lora_" in name:
                assert torch.equal(parameter, original[name]), name
            else:
                assert parameter.is_meta, name


def test_frozen_adapters_of_other_stages_stay() -> None:
    model = tiny_llama(blocks=4).requires_grad_(False)

    stage = StageModel(model, read_anatomy(model), first=1, last=3)

    with stage.whole():
        adapters = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
    assert len(adapters) == 4 * 4
    assert not any(parameter.is_meta for parameter in adapters)


def test_trainable_weights_of_other_stages_stay() -> None:
    model = PlainModel(blocks=4)  # everything is trained

    stage = StageModel(model, read_anatomy(model), first=3, last=4)

    with stage.whole():
        assert not any(parameter.is_meta for parameter in model.parameters())


def test_tied_embedding_survives_where_the_head_needs_it() -> None:
    model = tied_llama()
    whole = step(model)

    first, middle, last = cut(model, [(0, 1), (1, 3), (3, 4)])

    assert not first.module.model.embed_tokens.weight.is_meta
    assert not last.module.lm_head.weight.is_meta
    with middle.whole():
        assert middle.module.lm_head.weight.is_meta
        assert middle.module.lm_head.weight is middle.module.model.embed_tokens.weight
    with last.whole():
        assert last.module.lm_head.weight is last.module.model.embed_tokens.weight
    assert torch.equal(forward_by_hand([first, middle, last], step).logits, whole.logits)


def test_whole_restores_every_name_and_module_and_cuts_again_afterwards() -> None:
    module = TinyModule(blocks=4)
    modules = dict(module.named_modules())
    parameters = set(dict(module.named_parameters()))
    stage = StageModel(module, read_anatomy(module), first=1, last=2)
    cut_names = set(dict(module.named_parameters()))

    with stage.whole():
        assert dict(module.named_modules()) == modules
        assert set(dict(module.named_parameters())) == parameters

    assert set(dict(module.named_parameters())) == cut_names < parameters


def test_the_model_stays_whole_until_the_outermost_block_ends() -> None:
    model = PlainModel()
    modules = dict(model.named_modules())
    stage = StageModel(model, read_anatomy(model), first=0, last=2)

    with stage.whole():
        with stage.whole():
            assert dict(model.named_modules()) == modules
        assert dict(model.named_modules()) == modules

    assert dict(model.named_modules()) != modules


def test_model_is_cut_again_after_an_error_inside_whole() -> None:
    model = PlainModel()
    stage = StageModel(model, read_anatomy(model), first=0, last=2)
    kept = dict(model.named_modules())

    with pytest.raises(KeyError), stage.whole():
        raise KeyError

    assert dict(model.named_modules()) == kept


@pytest.mark.parametrize(("first", "last"), [(0, 0), (2, 1), (3, 5), (-1, 2)])
def test_stage_outside_the_blocks_is_refused(first: int, last: int) -> None:
    model = PlainModel(blocks=4)

    with pytest.raises(
        CutError, match=re.escape(f"Stage [{first}, {last}) does not lie in the model's 4 blocks")
    ):
        StageModel(model, read_anatomy(model), first=first, last=last)


def test_owner_of_every_parameter() -> None:
    anatomy = read_anatomy(PlainModel(blocks=12))

    def owner(name: str) -> int:
        return parameter_owner(anatomy, name, (2, 11, 12))

    assert owner("embed.weight") == 0
    assert owner("trunk.1.mix.weight") == 0
    assert owner("trunk.2.mix.weight") == 1
    assert owner("trunk.10.mix.weight") == 1
    assert owner("trunk.11.mix.weight") == 2
    assert owner("norm.weight") == 2
    assert owner("head.bias") == 2


# What the stages compute.


@pytest.mark.parametrize("tuples", [False, True], ids=["tensor", "tuple"])
@pytest.mark.parametrize("ranges", [[(0, 4)], [(0, 1), (1, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)]], ids=len)
def test_model_outside_hugging_face(ranges: list[tuple[int, int]], tuples: bool) -> None:
    model = PlainModel(blocks=4, tuples=tuples)
    whole = unsplit_gradients(model, plain_step)

    split = split_gradients(cut(model, ranges), plain_step)

    assert torch.equal(split.output.logits, whole.output.logits)
    assert (
        split.gradients.keys()
        == whole.gradients.keys()
        == dict(PlainModel(blocks=4).named_parameters()).keys()
    )
    for name, gradient in whole.gradients.items():
        assert torch.equal(split.gradients[name], gradient), name


def _opt() -> nn.Module:
    """A model that computes positions from the attention mask, so that padding moves them."""
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            word_embed_proj_dim=16,
            ffn_dim=32,
            num_hidden_layers=6,
            num_attention_heads=2,
            max_position_embeddings=64,
            pad_token_id=0,
        )
    )


def _gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=16,
            n_layer=6,
            n_head=2,
            n_positions=64,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize(
    "make_model", [lambda: tiny_llama(blocks=6), _opt, _gpt2], ids=["Llama", "OPT", "GPT-2"]
)
def test_padding_gives_the_unsplit_logits(make_model: Callable[[], nn.Module], side: str) -> None:
    torch.manual_seed(0)
    model = make_model().eval()
    mask_BT = torch.ones(3, 9, dtype=torch.long)
    if side in ("left", "both"):
        mask_BT[0, :4] = 0
    if side in ("right", "both"):
        mask_BT[1, 5:] = 0
    tokens_BT = torch.randint(3, VOCABULARY, (3, 9)) * mask_BT

    def padded(model: nn.Module) -> Any:
        return model(
            input_ids=tokens_BT, attention_mask=mask_BT, labels=tokens_BT.masked_fill(mask_BT == 0, -100)
        )

    with torch.no_grad():
        whole = padded(model)
        unpadded = model(input_ids=tokens_BT)
    split = forward_by_hand(cut(model, [(0, 2), (2, 3), (3, 6)]), padded)

    assert torch.equal(split.logits, whole.logits)
    assert torch.equal(split.loss, whole.loss)
    assert not torch.equal(unpadded.logits, whole.logits)  # the mask reaches the blocks


def test_hidden_state_takes_the_dtype_of_the_stage() -> None:
    model = tiny_llama(blocks=4)
    first, last = cut(model, [(0, 2), (2, 4)])
    last.module.to(torch.bfloat16)

    with torch.no_grad():
        hidden_BTD = first.hidden(lambda: step(first.module), None)
        output = last.output(lambda: step(last.module), hidden_BTD)

    assert hidden_BTD.dtype == torch.float32
    assert output.logits.dtype == torch.bfloat16
    torch.testing.assert_close(output.logits.float(), step(tiny_llama(blocks=4)).logits, atol=0.03, rtol=0.1)


# The early exit.


@pytest.mark.parametrize("make_model", [lambda: tiny_llama(blocks=6), PlainModel], ids=["Llama", "plain"])
def test_early_exit_is_the_model_without_its_later_blocks(make_model: Callable[[], nn.Module]) -> None:
    model = make_model()
    run = plain_step if isinstance(model, PlainModel) else step
    anatomy = read_anatomy(model)
    reference = copy.deepcopy(model)
    parent, _, name = anatomy.blocks_name.rpartition(".")
    setattr(reference.get_submodule(parent), name, reference.get_submodule(anatomy.blocks_name)[:3])
    first = StageModel(copy.deepcopy(model), anatomy, first=0, last=1)
    exit_stage = StageModel(copy.deepcopy(model), anatomy, first=1, last=3, keep_behind=True)

    with torch.no_grad():
        hidden_BTD = first.hidden(lambda: run(first.module), None)
        with exit_stage.exiting():
            exited = exit_stage.output(lambda: run(exit_stage.module), hidden_BTD)

        assert torch.equal(exited.logits, run(reference).logits)
        assert torch.equal(exited.loss, run(reference).loss)
        assert not torch.equal(exited.loss, run(model).loss)


def test_stage_ends_at_its_boundary_again_after_an_early_exit() -> None:
    model = PlainModel(blocks=4)
    stage = StageModel(model, read_anatomy(model), first=0, last=2, keep_behind=True)
    hidden_BTD = stage.hidden(lambda: plain_step(model), None)

    with pytest.raises(KeyError), stage.exiting():
        raise KeyError

    assert torch.equal(stage.hidden(lambda: plain_step(model), None), hidden_BTD)


def test_exit_of_the_last_stage_is_the_whole_model() -> None:
    model = PlainModel(blocks=4)
    loss = plain_step(model).loss
    stage = StageModel(model, read_anatomy(model), first=0, last=4)

    with stage.exiting():
        assert torch.equal(stage.output(lambda: plain_step(model), None).loss, loss)


# Steps that a stage cannot follow.


@pytest.fixture
def stages() -> list[StageModel]:
    return cut(PlainModel(blocks=6), [(0, 2), (2, 4), (4, 6)])


def received(stages: list[StageModel]) -> Tensor:
    return stages[0].hidden(lambda: plain_step(stages[0].module), None).detach()


def twice(model: nn.Module) -> Any:
    plain_step(model)
    return plain_step(model)


def test_two_model_calls_on_the_last_stage_are_refused(stages: list[StageModel]) -> None:
    with pytest.raises(StageInputError, match="The model was called twice in one step"):
        stages[-1].output(lambda: twice(stages[-1].module), received(stages))


def test_step_without_a_model_call_is_refused(stages: list[StageModel]) -> None:
    hidden_BTD = received(stages)
    for stage, given in ((stages[0], None), (stages[1], hidden_BTD)):
        with pytest.raises(StageInputError, match=r"without calling the model's blocks \(trunk\)"):
            stage.hidden(lambda: None, given)
    with pytest.raises(StageInputError, match=r"without calling the model's blocks \(trunk\)"):
        stages[2].output(lambda: None, hidden_BTD)


def test_refused_step_keeps_no_hidden_state(stages: list[StageModel]) -> None:
    hidden_BTD = received(stages)
    with pytest.raises(StageInputError, match="without calling"):
        stages[2].output(lambda: None, hidden_BTD)

    stand_ins = [child for child in stages[2].module.modules() if isinstance(child, FromPrevious)]
    assert [stand_in.received for stand_in in stand_ins] == [None]
    assert stages[2].output(lambda: plain_step(stages[2].module), hidden_BTD).loss.isfinite()


def test_hidden_state_of_another_batch_is_refused(stages: list[StageModel]) -> None:
    hidden_BTD = received(stages)

    with pytest.raises(StageInputError, match="every rank must read the same batch"):
        stages[1].hidden(lambda: stages[1].module(tokens(rows=2)), hidden_BTD)


def test_blocks_that_change_the_shape_are_refused() -> None:
    class Halving(nn.Module):
        def forward(self, hidden_BTD: Tensor) -> Tensor:
            return hidden_BTD[:, ::2]

    model = PlainModel(blocks=6)
    model.trunk[3] = Halving()
    first, middle, _ = cut(model, [(0, 2), (2, 4), (4, 6)])
    hidden_BTD = first.hidden(lambda: plain_step(first.module), None)

    with pytest.raises(StageInputError, match="trunk is not a plain chain of blocks"):
        middle.hidden(lambda: plain_step(middle.module), hidden_BTD)


def test_step_that_catches_exceptions_cannot_swallow_the_boundary(stages: list[StageModel]) -> None:
    def careful() -> Any:
        try:
            return plain_step(stages[0].module)
        except Exception:
            return None

    assert torch.equal(stages[0].hidden(careful, None), received(stages))
