"""LoRA fine-tuning of a model that answers a question by a span of a text."""

from typing import Any, Unpack

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from peft import TaskType
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForQuestionAnswering, PreTrainedModel

from lightning_hybridop.metrics import SpanExactMatch, SpanF1
from lightning_hybridop.modules.fine_tuning import (
    FineTuningOptions,
    hyperparameters,
    warmed_up_optimizer,
    with_adapters,
)
from lightning_hybridop.modules.language_models import SMOLLM2, load_language_model
from lightning_hybridop.modules.prompts import IGNORED
from lightning_hybridop.modules.scores import log_scores, log_train_loss, update

SpanBatch = dict[str, Any]
"""See `SpanAnswerer`."""


class SpanAnswerer(LightningModule):
    """An ordinary LightningModule: LoRA adapters and a new head learn where in a context the answer begins and ends.

    `model` is a loaded `AutoModelForQuestionAnswering` or what `load_language_model` takes, `longest_answer` how many
    tokens a predicted answer may have, `options` are those of `FineTuningOptions`.

    Batches hold, int64, `input_ids` and `attention_mask` (rows, tokens), for some models `token_type_ids`,
    `offsets` (rows, tokens, 2), the characters `[start, end)` of the row's context that a token stands for and -1 for
    all other tokens, and `start_positions` and `end_positions` (rows,), the answer's first and last token or -100
    where the row's tokens do not hold it; further lists of texts with one item per row, `context` and `answers`, the
    latter a list of all accepted ones. Only tokens of the context compete for beginning and end.

    Logs `train_loss` each step; `val_loss`, `val_exact_match` and `val_f1` (SQuAD's) each epoch; the same as `test_*`.
    """

    def __init__(
        self,
        model: PreTrainedModel | str = SMOLLM2,
        *,
        longest_answer: int = 30,
        **options: Unpack[FineTuningOptions],
    ) -> None:
        super().__init__()
        self.save_hyperparameters({"longest_answer": longest_answer} | hyperparameters(model, **options))
        if isinstance(model, str):
            model, _ = load_language_model(model, auto_class=AutoModelForQuestionAnswering)
        self.model = with_adapters(model, TaskType.QUESTION_ANS, self.hparams)
        self.val_scores, self.test_scores = _scores(), _scores()

    def training_step(self, batch: SpanBatch, batch_idx: int) -> Tensor:
        """Return the batch's `span_loss`."""
        loss = span_loss(*self._logits(batch), batch["start_positions"], batch["end_positions"])
        log_train_loss(self, loss, batch_size=len(batch["input_ids"]))
        return loss

    def validation_step(self, batch: SpanBatch, batch_idx: int) -> None:
        """Log the loss and the scores of a batch."""
        self._evaluate("val", batch, self.val_scores)

    def test_step(self, batch: SpanBatch, batch_idx: int) -> None:
        """Log the loss and the scores of a batch."""
        self._evaluate("test", batch, self.test_scores)

    def predict_step(self, batch: SpanBatch, batch_idx: int) -> list[str]:
        """Return each row's most likely answer; the batch may come without positions and answers."""
        return self._answers(*self._logits(batch), batch)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer over the trainable parameters and, if asked for, the warm-up."""
        return warmed_up_optimizer(self.parameters(), self.hparams)

    def _logits(self, batch: SpanBatch) -> tuple[Tensor, Tensor]:
        names = ("input_ids", "attention_mask", "token_type_ids")
        output = self.model(**{name: batch[name] for name in names if name in batch})
        outside = batch["offsets"][..., 0] < 0
        return (
            output.start_logits.float().masked_fill(outside, -torch.inf),
            output.end_logits.float().masked_fill(outside, -torch.inf),
        )

    def _answers(self, start_logits: Tensor, end_logits: Tensor, batch: SpanBatch) -> list[str]:
        firsts, lasts = best_spans(start_logits, end_logits, longest=self.hparams["longest_answer"])
        rows = torch.arange(len(firsts), device=firsts.device)
        begins = batch["offsets"][rows, firsts, 0].tolist()
        ends = batch["offsets"][rows, lasts, 1].tolist()
        # A token may begin with the white space before its word.
        return [
            text[begin:end].strip() for text, begin, end in zip(batch["context"], begins, ends, strict=True)
        ]

    def _evaluate(self, prefix: str, batch: SpanBatch, scores: nn.ModuleDict) -> None:
        logits = self._logits(batch)
        update(scores, self._answers(*logits, batch), batch["answers"])
        loss = span_loss(*logits, batch["start_positions"], batch["end_positions"])
        log_scores(self, prefix, scores, losses={"loss": loss}, batch_size=len(batch["input_ids"]))


def _scores() -> nn.ModuleDict:
    return nn.ModuleDict({"exact_match": SpanExactMatch(), "f1": SpanF1()})


def span_loss(start_logits: Tensor, end_logits: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Return the mean over rows of the mean cross-entropy of beginning and end; a row without an answer counts as 0.

    Logits float32 (rows, tokens), positions int64 (rows,). Dividing by all rows, not by those with an answer, makes
    the mean over slices of a batch, weighed by their rows, the mean over the batch.
    """
    total = sum(
        functional.cross_entropy(logits, positions, ignore_index=IGNORED, reduction="sum")
        for logits, positions in ((start_logits, starts), (end_logits, ends))
    )
    return torch.as_tensor(total) / (2 * len(starts))


def best_spans(start_logits: Tensor, end_logits: Tensor, *, longest: int) -> tuple[Tensor, Tensor]:
    """Return the first and the last token, int64 (rows,), of each row's best span of at most `longest` tokens.

    The best span has the largest sum of its first token's start logit and its last token's end logit.
    """
    tokens = start_logits.shape[1]
    # One slice per length less one: (rows, lengths, tokens).
    sums = torch.stack(
        [
            functional.pad(
                start_logits[:, : tokens - length] + end_logits[:, length:], (0, length), value=-torch.inf
            )
            for length in range(min(longest, tokens))
        ],
        dim=1,
    )
    best = sums.flatten(1).argmax(dim=-1)
    firsts = best % tokens
    return firsts, firsts + best // tokens
