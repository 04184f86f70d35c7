import pytest
import torch
from torch import nn

from lightning_hybridop.pipeline.anatomy import CutError, read_anatomy
from lightning_hybridop.pipeline.ownership import (
    block_dtype,
    check_updated_once,
    forget_absent_parameters,
    frozen_dtype,
    owned_parameters,
)
from tests.pipeline.plain import PlainModel
from tests.tiny import tiny_llama

# peft 0.21 asks a transformers 5.24 model by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def tied_model() -> PlainModel:
    model = PlainModel(blocks=4)
    model.head.weight = model.embed.weight
    return model


def test_every_trainable_parameter_has_one_owner() -> None:
    model = tiny_llama(blocks=6)

    owned = owned_parameters(model, read_anatomy(model), (2, 3, 6))

    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name: parameter for stage in owned for name, parameter in stage.items()} == trainable
    assert [len(stage) for stage in owned] == [2 * 4, 1 * 4, 3 * 4]


def test_trainable_tied_embedding_is_refused() -> None:
    model = tied_model()

    with pytest.raises(
        CutError, match=r"embed\.weight \(stage 0\) and head\.weight \(stage 1\) are one trainable tensor"
    ):
        check_updated_once(model, read_anatomy(model), (2, 4))


def test_tied_embedding_is_accepted_when_frozen_or_on_one_stage() -> None:
    model = tied_model()
    assert "embed.weight" in owned_parameters(model, read_anatomy(model), (4,))[0]
    assert "head.weight" not in owned_parameters(model, read_anatomy(model), (4,))[0]

    check_updated_once(model, read_anatomy(model), (4,))

    model.embed.weight.requires_grad_(False)

    check_updated_once(model, read_anatomy(model), (2, 4))
    first, last = owned_parameters(model, read_anatomy(model), (2, 4))
    assert "embed.weight" not in first
    assert set(last) == {f"trunk.{block}.mix.{kind}" for block in (2, 3) for kind in ("weight", "bias")} | {
        "norm.weight",
        "norm.bias",
        "head.bias",
    }


def test_only_frozen_floating_point_weights_are_cast() -> None:
    model = nn.Linear(3, 3)
    model.weight.requires_grad_(False)
    model.register_parameter("codes", nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False))

    frozen_dtype(model, torch.bfloat16)

    assert model.weight.dtype == torch.bfloat16
    assert model.bias.dtype == torch.float32
    assert model.codes.dtype == torch.int8


def test_frozen_adapters_are_not_cast() -> None:
    model = tiny_llama(blocks=2)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    before = {name: parameter for name, parameter in model.named_parameters() if "lora" in name}

    frozen_dtype(model, torch.bfloat16)

    assert all(
        p.dtype == (torch.float32 if n in before else torch.bfloat16) for n, p in model.named_parameters()
    )


def test_the_state_of_absent_parameters_is_forgotten() -> None:
    here, absent = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))
    optimizer = torch.optim.Adagrad([absent, here])
    assert absent in optimizer.state

    forget_absent_parameters(optimizer)

    assert list(optimizer.state) == [here]
    assert optimizer.param_groups[0]["params"] == [absent, here]


def test_dtype_of_a_block_is_that_of_its_first_floating_point_weight() -> None:
    model = nn.Module()
    assert block_dtype(model) == torch.float32
    model.register_parameter("codes", nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False))
    model.register_buffer("scale", torch.ones(2, dtype=torch.float16))
    assert block_dtype(model) == torch.float16
