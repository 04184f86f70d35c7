import re

import pytest
import torch
from peft import TaskType
from peft.tuners.lora import LoraLayer
from torch import Tensor
from torch.nn import functional
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedModel,
)

from lightning_hybridop.modules.fine_tuning import (
    hyperparameters,
    mean_cross_entropy,
    warmed_up_optimizer,
    with_adapters,
)
from tests.tiny import bare_llama


def test_options_are_plain_and_complete() -> None:
    settings = hyperparameters("smollm2", None, lora_targets=("q_proj",), learning_rate=0.1)
    assert settings == {
        "model": "smollm2",
        "lora_rank": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "lora_targets": ["q_proj"],
        "learning_rate": 0.1,
        "optimizer": "adam",
        "weight_decay": 0.0,
        "warmup_steps": 0,
        "zo_rank": None,
        "zo_blocks": 0,
    }
    assert hyperparameters("smollm2")["lora_targets"] is not hyperparameters("smollm2")["lora_targets"]


def test_a_model_that_was_given_is_no_hyperparameter(model: PreTrainedModel) -> None:
    assert "model" not in hyperparameters(model)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="There is no option rank, expected one of lora_rank, lora_alpha"):
        hyperparameters("smollm2", rank=4)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="optimizer is 'sgd', expected one of adam, adamw"):
        hyperparameters("smollm2", optimizer="sgd")  # type: ignore[arg-type]


def test_a_tasks_head_is_trained_as_a_whole_and_nothing_else_but_the_adapters() -> None:
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_labels=3,
    )
    settings = hyperparameters("any", lora_rank=2, weight_decay=0.5, optimizer="adamw", learning_rate=0.2)
    model = with_adapters(LlamaForSequenceClassification(config), TaskType.SEQ_CLS, settings)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert model.training
    assert sum("lora_" in name for name in trained) == 2 * 2 * 2
    assert [tuple(p.shape) for name, p in trained.items() if "lora_" not in name] == [(3, 16)]
    optimizer = warmed_up_optimizer(model.parameters(), settings)
    assert isinstance(optimizer, torch.optim.AdamW)
    (group,) = optimizer.param_groups
    assert {id(p) for p in group["params"]} == {id(p) for p in trained.values()}
    assert (group["lr"], group["weight_decay"]) == (0.2, 0.5)


@pytest.mark.parametrize("labels", [torch.tensor([2, -100, 0, 1]), torch.tensor([[1, 0], [-100, -100]])])
def test_mean_cross_entropy_is_that_of_torch(labels: Tensor) -> None:
    torch.manual_seed(0)
    scores = torch.randn(*labels.shape, 3)
    expected = functional.cross_entropy(scores.view(-1, 3), labels.view(-1))
    torch.testing.assert_close(mean_cross_entropy(scores, labels), expected)


def test_mean_cross_entropy_of_no_label_is_zero() -> None:
    assert mean_cross_entropy(torch.randn(2, 3), torch.tensor([-100, -100])).item() == 0


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize("family", ["Llama", "GPT-2"])
def test_the_first_blocks_may_have_adapters_of_a_smaller_rank_scaled_alike(family: str) -> None:
    if family == "Llama":
        bare: PreTrainedModel = bare_llama(blocks=12)
        targets = ["q_proj", "down_proj"]
    else:
        bare = GPT2LMHeadModel(
            GPT2Config(n_layer=12, n_embd=8, n_head=2, vocab_size=11, bos_token_id=1, eos_token_id=2)
        )
        targets = ["c_attn"]
    settings = hyperparameters("m", lora_targets=targets, lora_rank=4, lora_alpha=6, zo_rank=2, zo_blocks=2)

    model = with_adapters(bare, TaskType.CAUSAL_LM, settings)

    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    assert len(layers) == 12 * len(targets)
    for name, layer in layers.items():
        block = int(re.search(r"\.(\d+)\.", name)[1])  # type: ignore[index]
        assert layer.r["default"] == (2 if block < 2 else 4), name
        assert layer.scaling["default"] == 1.5, name


def test_a_rank_below_one_is_refused() -> None:
    settings = hyperparameters("m", zo_rank=0, zo_blocks=1)

    with pytest.raises(ValueError, match="zo_rank is 0, expected a whole number of at least 1, or None"):
        with_adapters(bare_llama(blocks=2), TaskType.CAUSAL_LM, settings)
