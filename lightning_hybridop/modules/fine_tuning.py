"""What the ready LightningModules share: LoRA adapters, the optimizer with its warm-up, hyperparameters, a loss."""

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LinearLR
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lightning_hybridop.modules.prompts import IGNORED
from lightning_hybridop.pipeline.anatomy import find_blocks

_OPTIMIZERS: dict[str, type[torch.optim.Adam]] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


class FineTuningOptions(TypedDict, total=False):
    """The options of every ready module: `lora_*` are peft's, `learning_rate` is reached with step `warmup_steps`.

    The first `zo_blocks` blocks get adapters of rank `zo_rank` (None: of the same rank as all), scaled alike: an estimate
    of fewer numbers is nearer to the gradient.
    """

    lora_rank: int
    lora_alpha: int
    lora_dropout: float
    lora_targets: Sequence[str]
    learning_rate: float
    optimizer: Literal["adam", "adamw"]
    weight_decay: float
    warmup_steps: int
    zo_rank: int | None
    zo_blocks: int


_DEFAULTS: dict[str, Any] = {
    "lora_rank": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "lora_targets": ["q_proj", "v_proj"],
    "learning_rate": 5e-4,
    "optimizer": "adam",
    "weight_decay": 0.0,
    "warmup_steps": 0,
    "zo_rank": None,
    "zo_blocks": 0,
}


def hyperparameters(
    model: PreTrainedModel | str,
    tokenizer: PreTrainedTokenizerBase | str | None = None,
    **options: Unpack[FineTuningOptions],
) -> dict[str, Any]:
    """Return the options with their defaults, and the names that model and tokenizer were given by, if they were.

    Plain containers only: a checkpoint must load under weights_only. Raises TypeError for an unknown option and
    ValueError for an unknown optimizer.
    """
    unknown = [name for name in options if name not in _DEFAULTS]
    if unknown:
        raise TypeError(f"There is no option {unknown[0]}, expected one of {', '.join(_DEFAULTS)}.")
    settings: dict[str, Any] = {**_DEFAULTS, **options}
    if settings["optimizer"] not in _OPTIMIZERS:
        raise ValueError(f"optimizer is {settings['optimizer']!r}, expected one of {', '.join(_OPTIMIZERS)}.")
    named = {"model": model, "tokenizer": tokenizer}
    return (
        settings
        | {"lora_targets": list(settings["lora_targets"])}
        | {name: given for name, given in named.items() if isinstance(given, str)}
    )


def with_adapters(model: PreTrainedModel, task: TaskType, settings: Mapping[str, Any]) -> PeftModel:
    """Return the model with LoRA adapters, in training mode; a head that the task adds is trained as a whole."""
    adapters = LoraConfig(
        task_type=task,
        r=settings["lora_rank"],
        lora_alpha=settings["lora_alpha"],
        lora_dropout=settings["lora_dropout"],
        target_modules=list(settings["lora_targets"]),
    )
    if settings["zo_rank"] is not None and settings["zo_blocks"] > 0:
        rank, alpha = settings["zo_rank"], settings["lora_alpha"]
        if not isinstance(rank, int) or rank < 1:
            raise ValueError(f"zo_rank is {rank!r}, expected a whole number of at least 1, or None.")
        names = _names_in_blocks(model, settings["zo_blocks"])
        adapters.rank_pattern = {names: rank}
        # What an adapter adds is scaled by alpha / rank.
        adapters.alpha_pattern = {names: alpha * rank / settings["lora_rank"]}
    with warnings.catch_warnings():
        # peft 0.21 asks for an attribute that transformers 5.24 has renamed.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        adapted = get_peft_model(model, adapters)
    assert isinstance(adapted, PeftModel)
    # A loaded model comes in evaluation mode, which Lightning would keep while it fits.
    return adapted.train()


def _names_in_blocks(model: PreTrainedModel, blocks: int) -> str:
    """Return what matches the names of all modules in the first `blocks` blocks, in peft's sense."""
    numbers = "|".join(map(str, range(blocks)))
    return rf"{re.escape(find_blocks(model, None))}\.({numbers})\..*"


def warmed_up_optimizer(
    parameters: Iterable[nn.Parameter], settings: Mapping[str, Any]
) -> OptimizerLRScheduler:
    """Return the optimizer over the trainable parameters and, if asked for, the warm-up."""
    optimizer = _OPTIMIZERS[settings["optimizer"]](
        [parameter for parameter in parameters if parameter.requires_grad],
        lr=settings["learning_rate"],
        weight_decay=settings["weight_decay"],
    )
    steps = settings["warmup_steps"]
    if steps == 0:
        return optimizer
    # Step k of the warm-up, counted from 1, runs at k / steps of the learning rate.
    warmup = LinearLR(optimizer, start_factor=1 / steps, total_iters=steps - 1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


def mean_cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy, float32, over the labels other than -100; 0 without any.

    `scores` (..., classes), `labels` int64 (...).
    """
    total = functional.cross_entropy(
        scores.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total / (labels != IGNORED).sum().clamp(min=1)
