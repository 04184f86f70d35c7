"""Learning rates follow their schedulers on all ranks as in one process, and zo stages scale them unseen."""

import csv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, optim
from torch.optim import lr_scheduler

from lightning_hybridop import HybridOPMixin
from tests.distributed.alone import Outcome, assert_close, learn, learn_together
from tests.distributed.runs import Job, block_of
from tests.tiny import TinyModule, loader

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(240)]

BLOCKS = 2
EPOCHS = 4
TRAIN = partial(loader, 12, batch_size=4)
STEPS = 3 * EPOCHS


class Scheduled(TinyModule):
    """Two blocks, the optimizer and the scheduler's configuration made by what is given."""

    def __init__(self, make: Callable[..., optim.Optimizer], schedule: Callable[[Any], Any]) -> None:
        super().__init__(blocks=BLOCKS)
        self.make = make
        self.schedule = schedule

    def configure_optimizers(self) -> Any:
        optimizer = self.make([p for p in self.parameters() if p.requires_grad])
        return {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer)}


class StepsBackwards(Scheduled):
    """Steps its scheduler in a way of its own: only every other time."""

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if self.global_step % 2 == 0:
            scheduler.step()


def _warm_up(optimizer: Any) -> Any:
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    return {"scheduler": schedule, "interval": "step"}


def _warm_up_then_cosine(optimizer: Any) -> Any:
    first = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4)
    second = lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS - 4)
    chained = lr_scheduler.SequentialLR(optimizer, [first, second], milestones=[4])
    return {"scheduler": chained, "interval": "step"}


def _per_epoch(optimizer: Any) -> Any:
    return lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def _every_second_step(optimizer: Any) -> Any:
    schedule = lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    return {"scheduler": schedule, "interval": "step", "frequency": 2}


def _one_cycle(optimizer: Any) -> Any:
    schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1)
    return {"scheduler": schedule, "interval": "step"}


def _plateau(monitor: str, interval: str) -> Callable[[Any], Any]:
    return partial(_on_plateau, monitor, interval)


def _on_plateau(monitor: str, interval: str, optimizer: Any) -> Any:
    # Improvements this large never come, so every look at the metric lowers the rate.
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0, threshold=0.5)
    return {"scheduler": schedule, "monitor": monitor, "interval": interval}


SGD = partial(optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(optim.AdamW, lr=1e-2, weight_decay=0.1)
SCHEDULES: dict[str, tuple[Callable[..., Any], Callable[..., optim.Optimizer], Callable[[Any], Any]]] = {
    "warm-up": (Scheduled, ADAM, _warm_up),
    "warm-up, then a cosine": (Scheduled, SGD, _warm_up_then_cosine),
    "per epoch": (Scheduled, SGD, _per_epoch),
    "every second step": (Scheduled, SGD, _every_second_step),
    "one cycle of rate and momentum": (Scheduled, SGD, _one_cycle),
    "one cycle of rate and beta": (Scheduled, ADAM, _one_cycle),
    "a plateau of the validation loss": (Scheduled, SGD, _plateau("val_loss", "epoch")),
    "a plateau of the training loss": (Scheduled, SGD, _plateau("train_loss", "step")),
    "a step of the user's own": (StepsBackwards, SGD, _every_second_step),
}
EXACT = {"precision": "64-true", "max_epochs": EPOCHS}


def _job(name: str, **strategy: Any) -> Job:
    kind, make, schedule = SCHEDULES[name]
    validation = partial(loader, 4, batch_size=4) if "plateau" in name else None
    return Job(
        strategy={"micro_batches": 2, **strategy},
        module=partial(kind, make, schedule),
        train=TRAIN,
        validation=validation,
        trainer=EXACT,
    )


SCALED = {"zo_stages": 1, "zo_lr_scale": 0.25, "queries": 2, "seed": 3}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[list[Outcome], list[Outcome]]]:
    """Every schedule on two bp stages, and on a zo stage with a scale of its own and a bp stage behind it."""
    jobs = [_job(name) for name in SCHEDULES] + [_job(name, **SCALED) for name in SCHEDULES]
    found = learn_together(jobs, 2)
    count = len(SCHEDULES)
    return dict(zip(SCHEDULES, zip(found, found[count:], strict=False), strict=True))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_followed_as_in_one_process(
    name: str, outcomes: dict[str, tuple[list[Outcome], list[Outcome]]]
) -> None:
    expected = learn(_job(name), alone=True)
    rates = [groups[0]["lr"] for groups in expected.groups]
    assert len(rates) == STEPS + 1
    assert len(set(rates)) > 2

    backward, mixed = outcomes[name]
    for outcome in backward:
        assert outcome.groups == expected.groups
        assert outcome.losses == pytest.approx(expected.losses, abs=1e-6)
        assert_close(outcome.parameters, expected.parameters, 1e-6)
    # A scheduler that follows no metric does not see that a stage in front takes smaller steps.
    if "plateau" not in name:
        assert [outcome.groups for outcome in mixed] == [expected.groups] * 2
    assert mixed[0].groups == mixed[1].groups
    if "cycle" in name:
        momenta = [group.get("momentum", group.get("betas")) for (group,) in expected.groups]
        assert len(set(momenta)) >= STEPS


def test_steps_of_zo_stages_are_scaled_behind_the_schedulers_back(
    outcomes: dict[str, tuple[list[Outcome], list[Outcome]]],
) -> None:
    for name in SCHEDULES:
        run, _ = outcomes[name][1]
        kind, make, schedule = SCHEDULES[name]
        module = kind(make, schedule).double()
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        parts = {
            scale: {n: p for n, p in trained.items() if (block_of(n) == 0) == (scale != 1.0)}
            for scale in (0.25, 1.0)
        }
        optimizers = {scale: make(list(part.values())) for scale, part in parts.items()}
        settings = [groups[0] for groups in run.groups[:-1]]
        for gradients, setting in zip(run.gradients, settings, strict=True):
            for scale, optimizer in optimizers.items():
                for n, parameter in parts[scale].items():
                    parameter.grad = gradients[n].clone()
                (group,) = optimizer.param_groups
                group.update({**setting, "lr": setting["lr"] * scale})
                optimizer.step()
        assert_close(run.parameters, {n: p.detach() for n, p in trained.items()}, 1e-9)


# The rate that a hook sets is the rate that is scaled.


class SetsItsRate(HybridOPMixin, TinyModule):
    def __init__(self) -> None:
        super().__init__(blocks=BLOCKS)
        self.notes: list[float] = []

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.SGD([p for p in self.parameters() if p.requires_grad], lr=9.0)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        self.notes.append(optimizer.param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.5


def test_a_rate_that_a_hook_sets_is_scaled_and_stays() -> None:
    job = Job(
        strategy={**SCALED, "micro_batches": 1}, module=SetsItsRate, train=partial(loader, 4, batch_size=4)
    )
    ((first, second),) = learn_together([job], 2)

    before = dict(SetsItsRate().named_parameters())
    for name, gradient in first.gradients[0].items():
        rate = 0.5 * (0.25 if block_of(name) == 0 else 1.0)
        expected = before[name].detach() - rate * gradient
        torch.testing.assert_close(first.parameters[name], expected, atol=1e-7, rtol=1e-6)
    for outcome in (first, second):
        assert outcome.groups[-1][0]["lr"] == 0.5
        assert outcome.notes
        assert set(outcome.notes) == {9.0}  # what a step reads is not scaled either


# What a logger is told.


def _monitored(folder: Path) -> Job:
    return Job(
        strategy={**SCALED, "micro_batches": 2},
        module=partial(Scheduled, SGD, _one_cycle),
        train=TRAIN,
        trainer={"max_epochs": EPOCHS, "log_every_n_steps": 1, "logger": CSVLogger(folder, version="run")},
        callbacks=_monitor,
    )


def _monitor() -> list[Callback]:
    return [LearningRateMonitor(logging_interval="step", log_momentum=True)]


def test_the_monitor_logs_the_rates_of_the_schedule(tmp_path: Path) -> None:
    learn_together([_monitored(tmp_path / "pipeline")], 2)
    learn(_monitored(tmp_path / "alone"), alone=True)

    found, expected = (_logged_rates(tmp_path / name) for name in ("pipeline", "alone"))
    assert len(expected) == STEPS
    assert found == expected


def _logged_rates(folder: Path) -> list[tuple[str, str, str]]:
    (path,) = folder.rglob("metrics.csv")
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [(r["step"], r["lr-SGD"], r["lr-SGD-momentum"]) for r in rows if r["lr-SGD"]]
