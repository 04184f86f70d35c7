import copy
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from lightning_hybridop.pipeline.executors.configuration import configuration, switchable, switches
from tests.tiny import tiny_llama


def block(index: int) -> Any:
    return tiny_llama().base_model.model.model.layers[index]  # type: ignore[union-attr, index]


def test_blocks_of_one_model_differ_in_their_numbers_only() -> None:
    assert configuration(block(1)) == configuration(block(2))


def test_training_mode_and_values_of_weights_do_not_count() -> None:
    own = block(1)
    before = configuration(own)
    own.train(not own.training)
    own.mlp.up_proj.weight.data.add_(1)
    assert configuration(own) == before


def _other_epsilon(own: Any) -> None:
    own.input_layernorm.variance_epsilon *= 2


def _other_activation(own: Any) -> None:
    own.mlp.act_fn = nn.GELU()


def _other_model(own: Any) -> None:
    own.self_attn.config = copy.deepcopy(own.self_attn.config)
    own.self_attn.config.attention_bias = True


def _other_scaling(own: Any) -> None:
    own.self_attn.q_proj.scaling["default"] *= 2


def _other_rank(own: Any) -> None:
    own.self_attn.q_proj.lora_A["default"].weight.data = own.self_attn.q_proj.lora_A["default"].weight.data[
        :1
    ]


def _other_list(own: Any) -> None:
    own.windows = [1, (2, 3)]


@pytest.mark.parametrize(
    "change", [_other_epsilon, _other_activation, _other_model, _other_scaling, _other_rank, _other_list]
)
def test_whatever_shapes_the_arithmetic_counts(change: Callable[[Any], None]) -> None:
    own = block(1)
    before = configuration(own)
    change(own)
    assert configuration(own) != before


def test_switches_tell_what_adapters_are_on() -> None:
    own = block(1)
    layers = switchable([own])
    assert layers == [own.self_attn.q_proj, own.self_attn.v_proj]
    before = switches(layers)
    own.self_attn.q_proj.enable_adapters(False)
    assert switches(layers) != before
    own.self_attn.q_proj.enable_adapters(True)
    assert switches(layers) == before
