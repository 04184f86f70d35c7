"""What zo stages can do with groups of rows, and how many copies of a micro-batch fit into memory."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_hybridop.pipeline.grouping import (
    Grouping,
    common_grouping,
    copies_that_fit,
    dropout_in,
    grouping_of,
)
from tests.tiny import tiny_llama


def grouping(model: nn.Module, **parameters: nn.Parameter) -> Grouping:
    layers = model.get_base_model().model.layers
    trained = parameters or {name: p for name, p in model.named_parameters() if p.requires_grad}
    return grouping_of(model, {"layers.0": layers[0]}, trained, width=16)[1]


def test_plain_lora_has_groups() -> None:
    model = tiny_llama(blocks=2)
    found = grouping(model)

    # q and v, A and B: 2 x 16, 16 x 2, 2 x 16 and 8 x 2 in each of two blocks.
    assert found.dimensions == 2 * (32 + 32 + 32 + 16)
    assert found.parameter_bytes == 4 * found.dimensions
    assert (found.refusal, found.dropout) == (None, None)
    # At least what every linear layer of a block makes of one token.
    assert found.token_bytes >= 4 * (16 + 8 + 8 + 16 + 32 + 32 + 16)


def test_other_parameters_have_none() -> None:
    model = tiny_llama(blocks=2)
    norm = model.get_base_model().model.layers[0].input_layernorm.weight

    assert grouping(model, norm=norm).refusal == (
        "norm is not a factor of plain LoRA on a linear layer, which directions of single rows and several queries in one "
        "forward need."
    )


def test_dropout_is_found_by_layer_and_by_probability() -> None:
    model = tiny_llama(blocks=2, dropout=0.1)
    block = model.get_base_model().model.layers[0]

    assert dropout_in(block) == "self_attn.q_proj.lora_dropout.default"
    plain = tiny_llama(blocks=2).get_base_model().model.layers[0]
    assert dropout_in(plain) is None
    plain.self_attn.attention_dropout = 0.2
    assert dropout_in(plain) == "self_attn.attention_dropout"


def test_what_holds_for_all_stages() -> None:
    parts = [
        Grouping(dropout="drop in front"),
        Grouping(dimensions=3, parameter_bytes=12, token_bytes=5),
        Grouping(refusal="no", dimensions=4, parameter_bytes=8, token_bytes=7),
        Grouping(refusal="not asked", dropout="dropped behind", dimensions=9, token_bytes=99),
    ]

    assert common_grouping(parts, zo_stages=[1, 2]) == Grouping(
        refusal="no", dropout="drop in front", dimensions=7, parameter_bytes=12, token_bytes=7
    )
    assert common_grouping(parts, zo_stages=[]) == Grouping()


@pytest.mark.parametrize(
    ("options", "copies"),
    [
        # The largest micro-batch: 4 rows of 8 tokens at 1024 bytes are 32 KiB, and 1024 bytes of parameters.
        ({"memory": 0.1, "directions": "microbatch"}, 3),
        ({"memory": 0.1, "directions": "row"}, 2),
        ({"memory": 1.0, "directions": "microbatch"}, 31),
        ({"memory": 1e-6, "directions": "row"}, 1),
    ],
)
def test_as_many_copies_as_fit(options: dict[str, Any], copies: int) -> None:
    its = Grouping(parameter_bytes=1024, token_bytes=1024)

    assert copies_that_fit(its, [(3, 8), (4, 8)], **options) == copies


def test_what_a_layer_makes_of_a_token_is_counted() -> None:
    model = tiny_llama(blocks=2)
    layers = model.get_base_model().model.layers
    made: dict[str, int] = {}
    for name, layer in layers[0].named_modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(
                lambda _, __, output, name=name: made.update({name: output[0, 0].numel() * output.itemsize})
            )
    with torch.no_grad():
        model(input_ids=torch.ones(2, 5, dtype=torch.long))

    # And of the hidden state itself: as it comes in, behind attention, behind the MLP, and once between.
    assert grouping(model).token_bytes == sum(made.values()) + 4 * 16 * 4
