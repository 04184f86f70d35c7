"""What the tests in this folder run on every rank, and what they get back."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_hybridop import HybridOPStrategy
from tests.distributed.harness import run_ranks
from tests.tiny import VOCABULARY, TinyModule

Gradients = dict[str, Tensor]
Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One `Trainer.fit` over a fresh module, strategy and Trainer."""

    strategy: Mapping[str, Any]
    train: Callable[[], Any]
    module: Callable[[], lightning.LightningModule] = TinyModule
    validation: Callable[[], Any] | None = None
    trainer: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    callbacks: Callable[[], Sequence[Callback]] = list


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one rank has after a job; `gradients` are this rank's own before clipping, `clipped` after it."""

    losses: list[float]
    derivatives: list[list[float]]
    gradients: list[Gradients]
    clipped: list[Gradients]
    metrics: dict[str, float]
    parameters: dict[str, Tensor]
    stage: int
    global_step: int


class Watch(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.derivatives: list[list[float]] = []
        self.gradients: list[Gradients] = []
        self.clipped: list[Gradients] = []

    def on_before_optimizer_step(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.gradients.append(_own_gradients(trainer))

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, HybridOPStrategy)
        result = strategy.last_result
        if result is None:  # a single stage, which trains as plain Lightning does
            self.losses.append(float(outputs["loss"]))
            return
        self.losses.append(result.loss)
        self.derivatives.append([g for _, g in result.estimate.derivatives] if result.estimate else [])
        self.clipped.append(_own_gradients(trainer))


def _own_gradients(trainer: lightning.Trainer) -> Gradients:
    """Return those of the rank's own stage: hooks see the gradients of the whole model."""
    strategy = trainer.strategy
    assert isinstance(strategy, HybridOPStrategy)
    named = trainer.lightning_module.named_parameters()
    own = strategy._assembly.owned[strategy.stage_index] if strategy.pipelined else dict(named)
    return {name: p.grad.clone() for name, p in own.items() if p.grad is not None}


def trainer_for(strategy: HybridOPStrategy, **options: Any) -> lightning.Trainer:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    devices = int(os.environ.get("WORLD_SIZE", "1"))
    return lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=devices, **{"max_epochs": 1, **quiet, **options}
    )


def fit(job: Job) -> Run:
    """Run one job on this rank."""
    watch = Watch()
    strategy = HybridOPStrategy(**job.strategy)
    trainer = trainer_for(strategy, callbacks=[watch, *job.callbacks()], **job.trainer)
    validation = None if job.validation is None else job.validation()
    trainer.fit(job.module(), job.train(), validation, ckpt_path=job.checkpoint)
    return Run(
        losses=watch.losses,
        derivatives=watch.derivatives,
        gradients=watch.gradients,
        clipped=watch.clipped,
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
        parameters={name: value.clone() for name, value in strategy.trainable_state_dict().items()},
        stage=strategy.stage_index,
        global_step=trainer.global_step,
    )


def fit_each(jobs: Sequence[Job]) -> list[Run]:
    """Run several jobs, one after the other, on this rank."""
    return [fit(job) for job in jobs]


def run_jobs(jobs: Sequence[Job], ranks: int) -> list[list[Run]]:
    """Return, for each job, what every rank has after it."""
    by_rank = run_ranks(fit_each, ranks, list(jobs))
    return [list(runs) for runs in zip(*by_rank, strict=True)]


def merged(parts: Sequence[Gradients]) -> Gradients:
    """Put together what the stages have; no parameter may have a gradient on two of them."""
    together: Gradients = {}
    for part in parts:
        assert not together.keys() & part.keys()
        together |= part
    return together


def merged_gradients(runs: Sequence[Run], step: int = 0) -> Gradients:
    return merged([run.gradients[step] for run in runs])


def assert_gradients_close(found: Gradients, expected: Gradients, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            found[name],
            expected[name],
            atol=tolerance,
            rtol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def block_of(name: str) -> int:
    """Return the block that a parameter of the tiny Llama lies in."""
    return int(name.partition(".layers.")[2].partition(".")[0])


# Data. Labels are the last tokens of a row, as the answer behind a prompt.


class AnsweredRows(Dataset[Batch]):
    """Rows of one length; row `i` has `answers[i]` label tokens, at its end."""

    def __init__(self, answers: Sequence[int], *, length: int, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(3, VOCABULARY, (len(answers), length), generator=generator)
        self.answers = answers

    def __len__(self) -> int:
        return len(self.answers)

    def __getitem__(self, index: int) -> Batch:
        row = self.tokens[index]
        labels = row.clone()
        labels[: len(row) - self.answers[index]] = -100
        return {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": labels}


def answers_loader(
    answers: Sequence[int], *, batch_size: int, length: int = 9, workers: int = 0
) -> DataLoader[Batch]:
    return DataLoader(
        AnsweredRows(answers, length=length),
        batch_size=batch_size,
        num_workers=workers,
        # Ranks run more threads than one, so their loaders must not fork.
        multiprocessing_context="forkserver" if workers else None,
    )


class DifferentLengths(Dataset[Batch]):
    """Rows of lengths drawn from 5..200, padded per batch by `pad_right`."""

    def __init__(self, rows: int, *, seed: int = 2) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(5, 201, (rows,), generator=generator).tolist()
        self.tokens = torch.randint(3, VOCABULARY, (rows, 200), generator=generator)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Batch:
        row = self.tokens[index, : self.lengths[index]]
        return {"input_ids": row}


def pad(rows: Sequence[Batch], *, side: str = "right") -> Batch:
    longest = max(len(row["input_ids"]) for row in rows)
    batch = {
        "input_ids": torch.zeros(len(rows), longest, dtype=torch.long),
        "attention_mask": torch.zeros(len(rows), longest, dtype=torch.long),
        "labels": torch.full((len(rows), longest), -100),
    }
    for index, row in enumerate(rows):
        tokens = row["input_ids"]
        place = slice(0, len(tokens)) if side == "right" else slice(longest - len(tokens), longest)
        batch["input_ids"][index, place] = tokens
        batch["attention_mask"][index, place] = 1
        batch["labels"][index, place] = tokens
    return batch


def lengths_loader(rows: int, *, batch_size: int, side: str = "right") -> DataLoader[Batch]:
    return DataLoader(DifferentLengths(rows), batch_size=batch_size, collate_fn=partial(pad, side=side))


class SgdModule(TinyModule):
    """Plain steps, so that a parameter's move is its learning rate times its gradient."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.learning_rate)


def quiet_trainer(strategy: HybridOPStrategy, **options: Any) -> lightning.Trainer:
    """Return a Trainer on the CPU that writes nothing by itself."""
    return lightning.Trainer(
        accelerator="cpu",
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **options,
    )
