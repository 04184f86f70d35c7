"""Sequence and token classification."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics.functional.classification import multiclass_f1_score
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedModel,
)

from lightning_hybridop.modules.sequence_classification import SequenceClassifier
from lightning_hybridop.modules.token_classification import TokenClassifier
from tests.modules.trainers import trainer

pytestmark = [
    # The steps are also called without a Trainer here.
    pytest.mark.filterwarnings("ignore:You are trying to `self.log:UserWarning"),
    # The sets are too small for more workers, and for a log every 50 steps.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]

CLASSES = 3
LENGTHS = (7, 5, 6, 3)


def llama(kind: type[PreTrainedModel]) -> PreTrainedModel:
    torch.manual_seed(0)
    return kind(
        LlamaConfig(
            vocab_size=24,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_labels=CLASSES,
            pad_token_id=0,
            classifier_dropout=0.0,
        )
    )


def sequence_classifier(**options: Any) -> SequenceClassifier:
    return SequenceClassifier(llama(LlamaForSequenceClassification), classes=CLASSES, **options)


def token_classifier(**options: Any) -> TokenClassifier:
    return TokenClassifier(llama(LlamaForTokenClassification), classes=CLASSES, **options)


def columns() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(1, 24, (len(LENGTHS), max(LENGTHS)), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    for row, length in enumerate(LENGTHS):
        input_ids[row, length:] = attention_mask[row, length:] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def sequences() -> dict[str, Tensor]:
    return columns() | {"labels": torch.tensor([2, 0, 1, 0])}


def tagged() -> dict[str, Tensor]:
    batch = columns()
    # Tokens of even number are left out, as the later pieces of words would be.
    left_out = (batch["attention_mask"] == 0) | (batch["input_ids"] % 2 == 0)
    return batch | {"labels": (batch["input_ids"] % CLASSES).masked_fill(left_out, -100)}


KINDS = pytest.mark.parametrize(
    ("make", "batch"),
    [(sequence_classifier, sequences()), (token_classifier, tagged())],
    ids=["sequences", "tokens"],
)


def loader(batch: dict[str, Tensor]) -> DataLoader[dict[str, Tensor]]:
    rows = [{name: values[row] for name, values in batch.items()} for row in range(len(LENGTHS))]
    return DataLoader(rows, batch_size=3)  # type: ignore[arg-type]


@KINDS
def test_loss_is_the_models_own(make: Callable[..., LightningModule], batch: dict[str, Tensor]) -> None:
    module = make()
    calls = []
    module.model.register_forward_hook(lambda *_: calls.append(1))
    loss = module.training_step(batch, 0)
    assert len(calls) == 1
    torch.testing.assert_close(loss, module.model(**batch).loss, atol=1e-6, rtol=0)


@KINDS
def test_logged_scores_equal_those_computed_by_hand(
    make: Callable[..., LightningModule], batch: dict[str, Tensor], tmp_path: Path
) -> None:
    module = make().eval()
    with torch.no_grad():
        output = module.model(**batch)
    counted = batch["labels"] != -100
    predicted, target = output.logits.argmax(-1)[counted], batch["labels"][counted]
    (scores,) = trainer(tmp_path).validate(module, loader(batch), verbose=False)
    assert scores == pytest.approx(
        {
            "val_loss": float(output.loss),
            "val_accuracy": float((predicted == target).float().mean()),
            "val_f1": float(multiclass_f1_score(predicted, target, CLASSES, average="macro")),
        },
        abs=1e-6,
    )
    (scores,) = trainer(tmp_path).test(module, loader(batch), verbose=False)
    assert set(scores) == {"test_loss", "test_accuracy", "test_f1"}


def test_predictions_need_no_labels_and_leave_padding_out() -> None:
    batch = columns()
    sequence, token = sequence_classifier().eval(), token_classifier().eval()
    assert torch.equal(sequence.predict_step(batch, 0), sequence.model(**batch).logits.argmax(-1))
    found = token.predict_step(batch, 0)
    padding = batch["attention_mask"] == 0
    assert (found[padding] == -100).all()
    assert torch.equal(found[~padding], token.model(**batch).logits.argmax(-1)[~padding])


@KINDS
def test_a_plain_trainer_fits_it(
    make: Callable[..., LightningModule], batch: dict[str, Tensor], tmp_path: Path
) -> None:
    module = make(learning_rate=0.01)
    before = module.model(**batch).loss.item()
    run = trainer(tmp_path, epochs=15)
    run.fit(module, loader(batch), loader(batch))
    assert "train_loss" in run.logged_metrics
    assert module.model(**batch).loss.item() < 0.7 * before


@KINDS
def test_a_checkpoint_loads_under_weights_only(
    make: Callable[..., LightningModule], batch: dict[str, Tensor], tmp_path: Path
) -> None:
    module = make(learning_rate=0.25)
    run = trainer(tmp_path)
    run.strategy.connect(module)
    run.save_checkpoint(tmp_path / "whole.ckpt")
    fresh = llama(type(module.model.get_base_model()))
    loaded = type(module).load_from_checkpoint(tmp_path / "whole.ckpt", model=fresh, weights_only=True)
    assert loaded.hparams == module.hparams
    assert loaded.hparams["learning_rate"] == 0.25
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in module.state_dict().items())


@KINDS
def test_another_number_of_classes_is_refused(
    make: Callable[..., LightningModule], batch: dict[str, Tensor]
) -> None:
    module = make()
    with pytest.raises(ValueError, match="model has 3 classes, expected 5: load it with num_labels=5"):
        type(module)(llama(type(module.model.get_base_model())), classes=5)
