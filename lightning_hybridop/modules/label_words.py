"""LoRA fine-tuning of a causal language model that answers with a label word."""

from collections.abc import Sequence
from typing import Unpack

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from peft import TaskType
from torch import Tensor, nn
from torchmetrics import Metric
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_hybridop.metrics import AnswerF1, QuestionExactMatch
from lightning_hybridop.modules.answers import answer_logits, answer_loss, loaded
from lightning_hybridop.modules.fine_tuning import (
    FineTuningOptions,
    hyperparameters,
    warmed_up_optimizer,
    with_adapters,
)
from lightning_hybridop.modules.language_models import SMOLLM2
from lightning_hybridop.modules.prompts import CLASSES, IGNORED, Batch, Prompt
from lightning_hybridop.modules.scores import class_scores, log_scores, log_train_loss


class LabelWordClassifier(LightningModule):
    """An ordinary LightningModule: LoRA adapters of a causal language model learn to answer with a label word.

    `model` is a loaded model or what `load_language_model` takes, `tokenizer` a tokenizer or what
    `load_tokenizer` takes (default: the model's). `label_words` are the classes in the order of their
    indices, as they follow a prompt's end; their first tokens tell the classes apart. `options` are those of
    `FineTuningOptions`.

    Batches hold `input_ids`, `attention_mask` and `labels`, int64 (rows, tokens), padded on the left, with
    the label word's tokens at the end and labels of -100 elsewhere. The model numbers its positions from the
    first column, so with learned absolute positions (GPT-2) the padding shifts a text.

    Logs `train_loss` each step; `val_loss`, `val_accuracy` and the macro-averaged `val_f1` each epoch; the
    same as `test_*`. With `per_question`, where a row is one answer option of a question and the label words mean
    wrong and right, batches also hold `question`, int64 (rows,), and `val_f1a` and `val_exact_match` are those of
    MultiRC.
    """

    label_tokens: Tensor  # (classes,): the first token of each label word

    def __init__(
        self,
        model: PreTrainedModel | str = SMOLLM2,
        tokenizer: PreTrainedTokenizerBase | str | None = None,
        *,
        label_words: Sequence[str] = CLASSES,
        per_question: bool = False,
        **options: Unpack[FineTuningOptions],
    ) -> None:
        super().__init__()
        if per_question and len(label_words) != 2:
            raise ValueError(
                f"per_question=True judges answers with two label words, wrong and right, but there are "
                f"{len(label_words)}: pass two, or per_question=False."
            )
        own = {"label_words": list(label_words), "per_question": per_question}
        self.save_hyperparameters(own | hyperparameters(model, tokenizer, **options))
        language_model, words = loaded(model, tokenizer)
        answers = Prompt(label_words=tuple(label_words)).label_tokens(words)
        first_tokens = torch.tensor([answer[0] for answer in answers])
        self.register_buffer("label_tokens", first_tokens, persistent=False)
        self.model = with_adapters(language_model, TaskType.CAUSAL_LM, self.hparams)
        self.val_scores = _scores(len(label_words), per_question=per_question)
        self.test_scores = _scores(len(label_words), per_question=per_question)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy over the batch's label tokens."""
        loss = answer_loss(answer_logits(self.model, batch), batch["labels"])
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
        return self._class_scores(answer_logits(self.model, batch), batch).argmax(dim=-1)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer over the trainable parameters and, if asked for, the warm-up."""
        return warmed_up_optimizer(self.parameters(), self.hparams)

    def _class_scores(self, logits: Tensor, batch: Batch) -> Tensor:
        scores = logits[..., self.label_tokens]  # (rows, kept positions, classes)
        if "labels" not in batch:
            return scores[:, -1]
        answers = batch["labels"][:, -logits.shape[1] :] != IGNORED
        # The position before the first label token predicts it.
        return scores[torch.arange(len(scores), device=scores.device), answers.int().argmax(dim=-1) - 1]

    def _evaluate(self, prefix: str, batch: Batch, scores: nn.ModuleDict) -> None:
        logits = answer_logits(self.model, batch)
        predicted = self._class_scores(logits, batch).argmax(dim=-1)
        target = _classes(batch["labels"], self.label_tokens)
        for metric in scores.values():
            assert isinstance(metric, Metric)
            question = (batch["question"],) if isinstance(metric, QuestionExactMatch) else ()
            metric.update(predicted, target, *question)
        loss = answer_loss(logits, batch["labels"])
        log_scores(self, prefix, scores, losses={"loss": loss}, batch_size=len(target))


def _scores(classes: int, *, per_question: bool) -> nn.ModuleDict:
    scores = class_scores(classes)
    if per_question:
        scores.update({"f1a": AnswerF1(), "exact_match": QuestionExactMatch()})
    return scores


def _classes(labels: Tensor, label_tokens: Tensor) -> Tensor:
    """Return the class index of each row, int64 (rows,), from its first label token."""
    first = (labels != IGNORED).int().argmax(dim=-1, keepdim=True)
    matches = labels.gather(1, first) == label_tokens  # (rows, classes)
    if not matches.any(dim=-1).all():
        row = int((~matches.any(dim=-1)).nonzero()[0])
        raise ValueError(
            f"Row {row} of the batch is labelled with token {int(labels[row, first[row]])}, expected the first "
            f"token of a label word, one of {label_tokens.tolist()}: give data and module the same label words."
        )
    return matches.int().argmax(dim=-1)
