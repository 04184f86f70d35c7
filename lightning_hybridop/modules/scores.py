"""How the ready LightningModules measure and log."""

from collections.abc import Mapping
from typing import Any

from lightning import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_hybridop.modules.prompts import IGNORED


def class_scores(classes: int) -> nn.ModuleDict:
    """Return new metrics `accuracy` and macro-averaged `f1` over all labels other than -100."""
    return nn.ModuleDict(
        {
            "accuracy": MulticlassAccuracy(num_classes=classes, average="micro", ignore_index=IGNORED),
            "f1": MulticlassF1Score(num_classes=classes, average="macro", ignore_index=IGNORED),
        }
    )


def update(scores: nn.ModuleDict, *arguments: object) -> None:
    """Update every metric with the same arguments."""
    for metric in scores.values():
        assert isinstance(metric, Metric)
        metric.update(*arguments)


def log_train_loss(module: LightningModule, loss: Tensor, *, batch_size: int) -> None:
    """Log `train_loss` of a step, a mean over `batch_size` things."""
    module.log("train_loss", loss, on_step=True, on_epoch=False, prog_bar=True, batch_size=batch_size)


def log_scores(
    module: LightningModule,
    prefix: str,
    scores: nn.ModuleDict,
    *,
    losses: Mapping[str, Tensor],
    batch_size: int,
) -> None:
    """Log losses, means over `batch_size` things, and metrics, each once per epoch, as `<prefix>_<name>`."""
    named: dict[str, Any] = {**losses, **scores}
    module.log_dict(
        {f"{prefix}_{name}": value for name, value in named.items()},
        on_step=False,
        on_epoch=True,
        prog_bar=True,
        batch_size=batch_size,
        sync_dist=True,
    )
