"""LoRA fine-tuning of a causal language model that answers with a label word."""

import warnings
from collections.abc import Sequence
from typing import Literal, cast

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from peft import LoraConfig, TaskType, get_peft_model
from torch import Tensor
from torch.nn import functional
from torch.optim.lr_scheduler import LinearLR
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_hybridop.modules.language_models import SMOLLM2, load_language_model, load_tokenizer
from lightning_hybridop.modules.prompts import CLASSES, IGNORED, Batch, Prompt

_OPTIMIZERS: dict[str, type[torch.optim.Adam]] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


class LabelWordClassifier(LightningModule):
    """An ordinary LightningModule: LoRA adapters of a causal language model learn to answer with a label word.

    `model` is a loaded model or what `load_language_model` takes, `tokenizer` a tokenizer or what
    `load_tokenizer` takes (default: the model's). `label_words` are the classes in the order of their
    indices, as they follow a prompt's end; their first tokens tell the classes apart. `lora_*` are peft's
    rank, alpha, dropout and target modules. `learning_rate` is reached linearly, with the step number
    `warmup_steps`.

    Batches hold `input_ids`, `attention_mask` and `labels`, int64 (rows, tokens), padded on the left, with
    the label word's tokens at the end and labels of -100 elsewhere. The model numbers its positions from the
    first column, so with learned absolute positions (GPT-2) the padding shifts a text.

    Logs `train_loss` each step; `val_loss`, `val_accuracy` and the macro-averaged `val_f1` each epoch; the
    same as `test_*`.
    """

    label_tokens: Tensor  # (classes,): the first token of each label word

    def __init__(
        self,
        model: PreTrainedModel | str = SMOLLM2,
        tokenizer: PreTrainedTokenizerBase | str | None = None,
        *,
        label_words: Sequence[str] = CLASSES,
        lora_rank: int = 8,
        lora_alpha: int = 16,
        lora_dropout: float = 0.0,
        lora_targets: Sequence[str] = ("q_proj", "v_proj"),
        learning_rate: float = 5e-4,
        optimizer: Literal["adam", "adamw"] = "adam",
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
    ) -> None:
        super().__init__()
        if optimizer not in _OPTIMIZERS:
            raise ValueError(f"optimizer is {optimizer!r}, expected one of {', '.join(_OPTIMIZERS)}.")
        # Plain containers only: a checkpoint must load under weights_only.
        self.save_hyperparameters(
            {
                "label_words": list(label_words),
                "lora_rank": lora_rank,
                "lora_alpha": lora_alpha,
                "lora_dropout": lora_dropout,
                "lora_targets": list(lora_targets),
                "learning_rate": learning_rate,
                "optimizer": optimizer,
                "weight_decay": weight_decay,
                "warmup_steps": warmup_steps,
            }
            | {
                key: name
                for key, name in (("model", model), ("tokenizer", tokenizer))
                if isinstance(name, str)
            }
        )
        language_model, words = _loaded(model, tokenizer)
        answers = Prompt(label_words=tuple(label_words)).label_tokens(words)
        first_tokens = torch.tensor([answer[0] for answer in answers])
        self.register_buffer("label_tokens", first_tokens, persistent=False)
        adapters = LoraConfig(
            task_type=TaskType.CAUSAL_LM,
            r=lora_rank,
            lora_alpha=lora_alpha,
            lora_dropout=lora_dropout,
            target_modules=list(lora_targets),
        )
        with warnings.catch_warnings():
            # peft 0.21 asks for an attribute that transformers 5.24 has renamed.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            self.model = get_peft_model(language_model, adapters)
        # A loaded model comes in evaluation mode, which Lightning would keep while it fits.
        self.model.train()
        self.val_accuracy = MulticlassAccuracy(num_classes=len(label_words), average="micro")
        self.val_f1 = MulticlassF1Score(num_classes=len(label_words), average="macro")
        self.test_accuracy = MulticlassAccuracy(num_classes=len(label_words), average="micro")
        self.test_f1 = MulticlassF1Score(num_classes=len(label_words), average="macro")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy over the batch's label tokens."""
        loss = answer_loss(self._logits(batch), batch["labels"])
        rows = len(batch["labels"])
        self.log("train_loss", loss, on_step=True, on_epoch=False, prog_bar=True, batch_size=rows)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the loss, accuracy and macro F1 of a batch."""
        logits = self._logits(batch)
        self._log_scores("val", logits, batch, self.val_accuracy, self.val_f1)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the loss, accuracy and macro F1 of a batch."""
        logits = self._logits(batch)
        self._log_scores("test", logits, batch, self.test_accuracy, self.test_f1)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return each row's most likely class index, int64 (rows,); the batch may come without labels."""
        return self._class_scores(self._logits(batch), batch).argmax(dim=-1)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer over the trainable parameters and, if asked for, the warm-up."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer_class = _OPTIMIZERS[cast(str, self.hparams["optimizer"])]
        optimizer = optimizer_class(
            trained, lr=self.hparams["learning_rate"], weight_decay=self.hparams["weight_decay"]
        )
        warmup_steps = cast(int, self.hparams["warmup_steps"])
        if warmup_steps == 0:
            return optimizer
        # Step k of the warm-up, counted from 1, runs at k / warmup_steps of the learning rate.
        warmup = LinearLR(optimizer, start_factor=1 / warmup_steps, total_iters=warmup_steps - 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}

    def _logits(self, batch: Batch) -> Tensor:
        # The label words stand at the end: the logits of all other positions would be computed for nothing.
        output = self.model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            logits_to_keep=_answer_length(batch) + 1,
            use_cache=False,
        )
        return cast(Tensor, output.logits)

    def _class_scores(self, logits: Tensor, batch: Batch) -> Tensor:
        scores = logits[..., self.label_tokens]  # (rows, kept positions, classes)
        if "labels" not in batch:
            return scores[:, -1]
        answers = batch["labels"][:, -logits.shape[1] :] != IGNORED
        # The position before the first label token predicts it.
        return scores[torch.arange(len(scores), device=scores.device), answers.int().argmax(dim=-1) - 1]

    def _log_scores(self, prefix: str, logits: Tensor, batch: Batch, accuracy: Metric, f1: Metric) -> None:
        predicted = self._class_scores(logits, batch)
        target = _classes(batch["labels"], self.label_tokens)
        accuracy.update(predicted, target)
        f1.update(predicted, target)
        loss = answer_loss(logits, batch["labels"])
        self.log_dict(
            {f"{prefix}_loss": loss, f"{prefix}_accuracy": accuracy, f"{prefix}_f1": f1},
            on_step=False,
            on_epoch=True,
            prog_bar=True,
            batch_size=len(batch["labels"]),
            sync_dist=True,
        )


def answer_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy, float32, over the label tokens that the logits predict; 0 without any.

    `logits` (rows, kept positions, vocabulary) belong to the last positions of `labels` (rows, tokens).
    """
    kept = labels[:, labels.shape[1] - logits.shape[1] + 1 :]
    total = functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), kept.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total / (kept != IGNORED).sum().clamp(min=1)


def _answer_length(batch: Batch) -> int:
    """Return over how many last positions the batch's label tokens extend."""
    if "labels" not in batch:
        return 0
    columns = (batch["labels"] != IGNORED).any(dim=0).nonzero()
    return 0 if columns.numel() == 0 else batch["labels"].shape[1] - int(columns[0])


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


def _loaded(
    model: PreTrainedModel | str, tokenizer: PreTrainedTokenizerBase | str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if isinstance(tokenizer, str):
        tokenizer = load_tokenizer(tokenizer)
    if isinstance(model, str):
        language_model, own_tokenizer = load_language_model(model)
        return language_model, own_tokenizer if tokenizer is None else tokenizer
    if tokenizer is None:
        raise ValueError("A loaded model comes without its tokenizer: pass tokenizer= as well.")
    return model, tokenizer
