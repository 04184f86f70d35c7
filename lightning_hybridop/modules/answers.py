"""Causal language models that learn the end of each row: the answer behind a prompt."""

from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_hybridop.modules.fine_tuning import mean_cross_entropy
from lightning_hybridop.modules.language_models import load_language_model, load_tokenizer
from lightning_hybridop.modules.prompts import IGNORED


def loaded(
    model: PreTrainedModel | str, tokenizer: PreTrainedTokenizerBase | str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a causal language model and its tokenizer, each as it is or loaded by its name.

    Raises ValueError for a loaded model without a tokenizer, and LanguageModelError for an unknown name.
    """
    if isinstance(tokenizer, str):
        tokenizer = load_tokenizer(tokenizer)
    if isinstance(model, str):
        language_model, own_tokenizer = load_language_model(model)
        return language_model, own_tokenizer if tokenizer is None else tokenizer
    if tokenizer is None:
        raise ValueError("A loaded model comes without its tokenizer: pass tokenizer= as well.")
    return model, tokenizer


def answer_logits(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return the logits (rows, kept positions, vocabulary) of the last positions, as many as predict the labels."""
    # The answers stand at the end: the logits of all other positions would be computed for nothing.
    output = model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        logits_to_keep=_answer_length(batch) + 1,
        use_cache=False,
    )
    return cast(Tensor, output.logits)


def answer_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy, float32, over the label tokens that the logits predict; 0 without any.

    `logits` (rows, kept positions, vocabulary) belong to the last positions of `labels` (rows, tokens).
    """
    return mean_cross_entropy(logits[:, :-1], labels[:, labels.shape[1] - logits.shape[1] + 1 :])


def _answer_length(batch: dict[str, Any]) -> int:
    """Return over how many last positions the batch's label tokens extend."""
    if "labels" not in batch:
        return 0
    columns = (batch["labels"] != IGNORED).any(dim=0).nonzero()
    return 0 if columns.numel() == 0 else batch["labels"].shape[1] - int(columns[0])
