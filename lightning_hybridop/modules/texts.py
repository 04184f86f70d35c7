"""LoRA fine-tuning of a causal language model that answers prompts in words of its own."""

from typing import Any, Unpack

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from peft import TaskType
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_hybridop.metrics import SpanExactMatch, SpanF1
from lightning_hybridop.modules.answers import answer_logits, answer_loss, loaded
from lightning_hybridop.modules.fine_tuning import (
    FineTuningOptions,
    hyperparameters,
    warmed_up_optimizer,
    with_adapters,
)
from lightning_hybridop.modules.language_models import SMOLLM2
from lightning_hybridop.modules.prompts import IGNORED
from lightning_hybridop.modules.scores import log_scores, log_train_loss, update

TextBatch = dict[str, Any]
"""See `TextAnswerer`."""


class TextAnswerer(LightningModule):
    """An ordinary LightningModule: LoRA adapters of a causal language model learn the answers to prompts.

    `model` is a loaded model or what `load_language_model` takes, `tokenizer` a tokenizer or what `load_tokenizer`
    takes (default: the model's). `longest_answer` is how many tokens a generated answer may have. `options` are those
    of `FineTuningOptions`.

    Batches hold `input_ids`, `attention_mask` and `labels`, int64 (rows, tokens), padded on the left, with the
    answer's tokens at the end, the end-of-text token among them, and labels of -100 elsewhere; and `answers`, a list
    with a list of all accepted texts per row.

    Logs `train_loss` each step and `val_loss` each epoch; the same as `test_*`. With `generate`, validation and test
    also write answers, which costs a forward pass per token, and log SQuAD's `val_exact_match` and `val_f1`.
    Prediction always writes them.
    """

    def __init__(
        self,
        model: PreTrainedModel | str = SMOLLM2,
        tokenizer: PreTrainedTokenizerBase | str | None = None,
        *,
        generate: bool = False,
        longest_answer: int = 32,
        **options: Unpack[FineTuningOptions],
    ) -> None:
        super().__init__()
        own = {"generate": generate, "longest_answer": longest_answer}
        self.save_hyperparameters(own | hyperparameters(model, tokenizer, **options))
        language_model, self.tokenizer = loaded(model, tokenizer)
        self.model = with_adapters(language_model, TaskType.CAUSAL_LM, self.hparams)
        self.val_scores, self.test_scores = _scores(generate), _scores(generate)

    def training_step(self, batch: TextBatch, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy over the tokens of the batch's answers."""
        loss = answer_loss(answer_logits(self.model, batch), batch["labels"])
        log_train_loss(self, loss, batch_size=len(batch["labels"]))
        return loss

    def validation_step(self, batch: TextBatch, batch_idx: int) -> None:
        """Log the loss of a batch and, if asked for, the scores of the answers written to it."""
        self._evaluate("val", batch, self.val_scores)

    def test_step(self, batch: TextBatch, batch_idx: int) -> None:
        """Log the loss of a batch and, if asked for, the scores of the answers written to it."""
        self._evaluate("test", batch, self.test_scores)

    def predict_step(self, batch: TextBatch, batch_idx: int) -> list[str]:
        """Return an answer to each row; the batch may come without labels, all of it being prompts then."""
        return self._written(batch)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer over the trainable parameters and, if asked for, the warm-up."""
        return warmed_up_optimizer(self.parameters(), self.hparams)

    def _written(self, batch: TextBatch) -> list[str]:
        input_ids, attention_mask = prompts_of(batch, padding_token=self.tokenizer.pad_token_id)
        written = self.model.generate(  # type: ignore[no-untyped-call]
            input_ids=input_ids,
            attention_mask=attention_mask,
            max_new_tokens=self.hparams["longest_answer"],
            do_sample=False,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        texts = self.tokenizer.batch_decode(written[:, input_ids.shape[1] :], skip_special_tokens=True)
        return [text.strip() for text in texts]

    def _evaluate(self, prefix: str, batch: TextBatch, scores: nn.ModuleDict) -> None:
        loss = answer_loss(answer_logits(self.model, batch), batch["labels"])
        if self.hparams["generate"]:
            update(scores, self._written(batch), batch["answers"])
        labelled = int((batch["labels"] != IGNORED).sum())
        log_scores(self, prefix, scores, losses={"loss": loss}, batch_size=labelled)


def _scores(generate: bool) -> nn.ModuleDict:
    return nn.ModuleDict({"exact_match": SpanExactMatch(), "f1": SpanF1()} if generate else {})


def prompts_of(batch: TextBatch, *, padding_token: int) -> tuple[Tensor, Tensor]:
    """Return a batch's tokens and attention mask without its answers, int64 (rows, tokens), padded on the left."""
    tokens, mask = batch["input_ids"], batch["attention_mask"]
    if "labels" not in batch:
        return tokens, mask
    answers = batch["labels"] != IGNORED
    length = tokens.shape[1]
    # An answer extends from its first label token to the end; rows move right by as much.
    shifts = torch.where(answers.any(dim=-1), length - answers.int().argmax(dim=-1), 0)
    sources = torch.arange(length, device=tokens.device) - shifts[:, None]
    moved = tokens.gather(1, sources.clamp(min=0)).masked_fill(sources < 0, padding_token)
    moved_mask = mask.gather(1, sources.clamp(min=0)).masked_fill(sources < 0, 0)
    longest = int(moved_mask.sum(dim=-1).max())
    return moved[:, length - longest :], moved_mask[:, length - longest :]
