"""One job twice: on every rank of a pipeline, and in one process with Lightning's default strategy."""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_hybridop import HybridOPStrategy
from tests.distributed.harness import run_ranks
from tests.distributed.runs import Gradients, Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a process has after a job.

    `parameters` are all trainable ones of the unsplit model, `gradients` those that a callback sees before each
    optimizer step, `groups` the optimizer's settings before each step and at the end, `others` this process's copies
    of what other stages train, before the stages tell each other what they have learned.
    """

    parameters: dict[str, Tensor]
    losses: list[float]
    gradients: list[Gradients]
    groups: list[list[dict[str, Any]]]
    others: dict[str, Tensor]
    metrics: dict[str, float]
    notes: Any


class Watch(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[Gradients] = []
        self.groups: list[list[dict[str, Any]]] = []
        self.others: dict[str, Tensor] = {}

    def on_before_optimizer_step(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        named = pl_module.named_parameters()
        self.gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})
        self._note_groups(optimizer)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        (optimizer,) = trainer.optimizers
        self._note_groups(optimizer)
        if isinstance(trainer.strategy, HybridOPStrategy) and trainer.strategy.pipelined:
            for stage, parameters in enumerate(trainer.strategy._assembly.owned):
                if stage != trainer.strategy.stage_index:
                    self.others |= {name: p.detach().clone() for name, p in parameters.items()}

    def _note_groups(self, optimizer: torch.optim.Optimizer) -> None:
        kept = ("lr", "momentum", "betas", "weight_decay")
        self.groups.append([{k: group[k] for k in kept if k in group} for group in optimizer.param_groups])

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Mapping[str, Any],
        batch: Any,
        batch_idx: int,
    ) -> None:
        self.losses.append(float(outputs["loss"]))


def learn(job: Job, *, alone: bool) -> Outcome:
    """Run a job on this rank, or in this process alone."""
    strategy = None if alone else HybridOPStrategy(**job.strategy)
    watch = Watch()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
    }
    trainer = lightning.Trainer(
        strategy="auto" if strategy is None else strategy,
        accelerator="cpu",
        devices=1 if alone else int(os.environ["WORLD_SIZE"]),
        callbacks=[*job.callbacks(), watch],
        **{**quiet, **job.trainer},
    )
    module = job.module()
    validation = None if job.validation is None else job.validation()
    with warnings.catch_warnings():
        for harmless in ("does not have many workers", "have no `val_dataloader`"):
            warnings.filterwarnings("ignore", message=f".*{harmless}")
        trainer.fit(module, job.train(), validation, ckpt_path=job.checkpoint)
    if strategy is None:
        parameters = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    else:
        parameters = strategy.trainable_state_dict()
    return Outcome(
        parameters={name: value.clone() for name, value in parameters.items()},
        losses=watch.losses,
        gradients=watch.gradients,
        groups=watch.groups,
        others=watch.others,
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
        notes=getattr(module, "notes", None),
    )


def learn_each(jobs: Sequence[Job]) -> list[Outcome]:
    return [learn(job, alone=False) for job in jobs]


def learn_together(jobs: Sequence[Job], ranks: int) -> list[list[Outcome]]:
    """Return, for each job, what every rank has after it; all jobs run in one start of the processes."""
    by_rank = run_ranks(learn_each, ranks, list(jobs))
    return [list(outcomes) for outcomes in zip(*by_rank, strict=True)]


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, atol=tolerance, rtol=0.0, msg=lambda text, name=name: f"{name}: {text}"
        )
