import pytest
import torch
from peft import TaskType
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedModel

from lightning_hybridop.modules.fine_tuning import (
    hyperparameters,
    mean_cross_entropy,
    warmed_up_optimizer,
    with_adapters,
)


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
