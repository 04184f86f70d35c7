"""LoRA fine-tuning of a model that assigns a class to each text."""

from typing import Unpack, cast

from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from peft import TaskType
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from lightning_hybridop.modules.fine_tuning import (
    FineTuningOptions,
    hyperparameters,
    mean_cross_entropy,
    warmed_up_optimizer,
    with_adapters,
)
from lightning_hybridop.modules.language_models import SMOLLM2, load_classifier
from lightning_hybridop.modules.prompts import CLASSES, Batch
from lightning_hybridop.modules.scores import class_scores, log_scores, log_train_loss, update


class SequenceClassifier(LightningModule):
    """An ordinary LightningModule: LoRA adapters and a new head learn the class of each text.

    `model` is a loaded `AutoModelForSequenceClassification` or what `load_language_model` takes, `classes` the number
    of classes, `options` are those of `FineTuningOptions`.

    Batches hold `input_ids` and `attention_mask`, int64 (rows, tokens), padded on either side with the tokenizer's
    padding token, and `labels`, int64 (rows,), the class indices; -100 leaves a row out.

    Logs `train_loss` each step; `val_loss`, `val_accuracy` and the macro-averaged `val_f1` each epoch; the same as
    `test_*`. Raises ValueError when a loaded model has another number of classes.
    """

    def __init__(
        self,
        model: PreTrainedModel | str = SMOLLM2,
        *,
        classes: int = len(CLASSES),
        **options: Unpack[FineTuningOptions],
    ) -> None:
        super().__init__()
        self.save_hyperparameters({"classes": classes} | hyperparameters(model, **options))
        classifier = load_classifier(model, AutoModelForSequenceClassification, classes=classes)
        self.model = with_adapters(classifier, TaskType.SEQ_CLS, self.hparams)
        self.val_scores, self.test_scores = class_scores(classes), class_scores(classes)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy over the batch's labelled rows."""
        loss = mean_cross_entropy(self._logits(batch), batch["labels"])
        log_train_loss(self, loss, batch_size=len(batch["labels"]))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the loss and the scores of a batch."""
        self._evaluate("val", batch, self.val_scores)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the loss and the scores of a batch."""
        self._evaluate("test", batch, self.test_scores)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return each row's most likely class index, int64 (rows,); the batch may come without labels."""
        return self._logits(batch).argmax(dim=-1)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer over the trainable parameters and, if asked for, the warm-up."""
        return warmed_up_optimizer(self.parameters(), self.hparams)

    def _logits(self, batch: Batch) -> Tensor:
        output = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        return cast(Tensor, output.logits)  # (rows, classes)

    def _evaluate(self, prefix: str, batch: Batch, scores: nn.ModuleDict) -> None:
        logits, labels = self._logits(batch), batch["labels"]
        update(scores, logits.argmax(dim=-1), labels)
        loss = mean_cross_entropy(logits, labels)
        log_scores(self, prefix, scores, losses={"loss": loss}, batch_size=len(labels))
