"""A run that is interrupted, wherever and by whatever, and resumed ends as if it had never been."""

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from lightning_hybridop import HybridOPStrategy, Plan
from tests.distributed.harness import run_ranks
from tests.distributed.runs import Job, Run, fit, trainer_for
from tests.distributed.test_checkpoint import split
from tests.tiny import TinyModule, TokenRows, loader

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

STEPS_PER_EPOCH, EPOCHS = 3, 2
TRAIN = partial(loader, 10, batch_size=4, shuffle=True)
HELD_OUT = partial(loader, 6, batch_size=4)
MODULE = partial(TinyModule, dropout=0.2)


def every_step(folder: Path, **options: Any) -> list[ModelCheckpoint]:
    return [ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1, **options)]


def job(plan: Plan, *, folder: Path | None = None, checkpoint: Path | None = None, **strategy: Any) -> Job:
    """Return a run over two epochs that validates in the middle of each and, with `folder`, saves at every step."""
    return Job(
        strategy={"plan": plan, "seed": 7, **strategy},
        train=TRAIN,
        module=MODULE,
        validation=HELD_OUT,
        trainer={
            "max_epochs": EPOCHS,
            "val_check_interval": 2,
            "check_val_every_n_epoch": None,
            "enable_checkpointing": folder is not None,
        },
        callbacks=list if folder is None else partial(every_step, folder),
        checkpoint=None if checkpoint is None else str(checkpoint),
    )


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].equal(value), name


# At every step of a run.


def _resume_everywhere(folder: Path) -> dict[int, Run]:
    mixed = split(3, 3, zo_stages=1)
    runs = {0: fit(job(mixed, folder=folder))}
    for step in range(1, EPOCHS * STEPS_PER_EPOCH):
        runs[step] = fit(job(mixed, checkpoint=folder / f"step={step}.ckpt"))
    return runs


@pytest.mark.slow
def test_resuming_at_any_step_equals_going_straight_bit_for_bit(tmp_path: Path) -> None:
    for runs in run_ranks(_resume_everywhere, 2, tmp_path):
        straight = runs.pop(0)
        for step, run in runs.items():
            assert run.global_step == straight.global_step == EPOCHS * STEPS_PER_EPOCH
            assert run.losses == straight.losses[step:], step
            assert run.derivatives == straight.derivatives[step:], step
            assert_equal(run.parameters, straight.parameters)
            assert run.metrics["val_loss"] == straight.metrics["val_loss"]


# On other splits, and in one process.


def unshuffled(plan: Plan, *, checkpoint: Path | None = None, folder: Path | None = None) -> Job:
    """Return a run whose rows one process draws in the same order; its `bp` stages alone are the same on any split."""
    return Job(
        strategy={"plan": plan},
        train=partial(loader, 16, batch_size=4),
        trainer={"max_epochs": 2 if folder is None else 1, "enable_checkpointing": folder is not None},
        callbacks=list if folder is None else partial(every_step, folder),
        checkpoint=None if checkpoint is None else str(checkpoint),
    )


def _fit(runs: list[Job]) -> list[Run]:
    return [fit(one) for one in runs]


@pytest.mark.slow
def test_one_checkpoint_resumes_on_any_split(tmp_path: Path) -> None:
    last = tmp_path / "step=4.ckpt"
    saved = run_ranks(_fit, 2, [unshuffled(split(2, 4)), unshuffled(split(2, 4), folder=tmp_path)])
    straight = saved[0][0]
    resumed = {
        "4 + 2": run_ranks(_fit, 2, [unshuffled(split(4, 2), checkpoint=last)]),
        "2 + 2 + 2": run_ranks(_fit, 3, [unshuffled(split(2, 2, 2), checkpoint=last)]),
        "one process": run_ranks(_fit, 1, [unshuffled(split(6), checkpoint=last)]),
    }
    for name, answers in resumed.items():
        for (run,) in answers:
            assert run.losses == pytest.approx(straight.losses[4:], abs=1e-6), name
            for key, value in straight.parameters.items():
                torch.testing.assert_close(run.parameters[key], value, atol=1e-6, rtol=1e-6)


# The best one, its size, and what is in it.


def _best(folder: Path) -> dict[str, Any]:
    strategy = HybridOPStrategy(plan=split(3, 3))
    best = ModelCheckpoint(folder, monitor="val_loss", mode="max", filename="{epoch}")
    trainer = trainer_for(strategy, callbacks=[best], max_epochs=3, enable_checkpointing=True)
    module = TinyModule(learning_rate=0.05)
    trainer.fit(module, TRAIN(), HELD_OUT())
    last = float(trainer.callback_metrics["val_loss"])
    (validated,) = trainer.validate(module, HELD_OUT(), ckpt_path="best", verbose=False)
    return {
        "path": best.best_model_path,
        "score": float(best.best_model_score),
        "last": last,
        "validated": validated["val_loss"],
    }


def _wide(folder: Path) -> int:
    strategy = HybridOPStrategy(plan=split(3, 3))
    trainer = trainer_for(strategy, callbacks=every_step(folder), enable_checkpointing=True)
    module = TinyModule(rank=64)
    trainer.fit(module, TRAIN())
    return sum(
        parameter.numel() * parameter.element_size() for parameter in strategy.trainable_state_dict().values()
    )


def test_the_best_checkpoint_is_the_same_on_all_ranks_and_loads(tmp_path: Path) -> None:
    answers = run_ranks(_best, 2, tmp_path)
    assert answers[0] == answers[1]
    # The worst epoch was asked for, which is the first one.
    assert Path(answers[0]["path"]).name == "epoch=0.ckpt"
    assert answers[0]["validated"] == pytest.approx(answers[0]["score"], abs=1e-7)
    assert answers[0]["validated"] > answers[0]["last"]


def test_a_checkpoint_is_little_more_than_adapters_and_optimizer_state(tmp_path: Path) -> None:
    adapters = run_ranks(_wide, 2, tmp_path)[0]
    (path, *_) = tmp_path.glob("*.ckpt")
    assert adapters > 50_000
    assert 3 * adapters < path.stat().st_size < 2 * 3 * adapters  # Adam holds two numbers for each parameter


# After an exception on one rank: all ranks meet once more, to save what they hold.


class BreaksOnce(TinyModule):
    broken = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.global_step == 4 and self.global_rank == 1 and not BreaksOnce.broken:
            BreaksOnce.broken = True
            raise ArithmeticError("once")
        return super().training_step(batch, batch_idx)


def _saving_on_exception(folder: Path) -> list[ModelCheckpoint]:
    return [ModelCheckpoint(folder, filename="{step}", save_on_exception=True)]


def _break_and_resume(folder: Path) -> tuple[str, Run, Run]:
    plan = split(2, 2, 2, zo_stages=1)
    options = {"max_epochs": EPOCHS}
    strategy = {"plan": plan, "seed": 7}
    straight = fit(Job(strategy=strategy, train=TRAIN, trainer=options))
    saving = partial(_saving_on_exception, folder)
    try:
        fit(
            Job(
                strategy=strategy,
                train=TRAIN,
                module=BreaksOnce,
                trainer={**options, "enable_checkpointing": True},
                callbacks=saving,
            )
        )
    except Exception as error:
        said = f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
    resumed = fit(
        Job(strategy=strategy, train=TRAIN, trainer=options, checkpoint=str(folder / "step=4.ckpt"))
    )
    return said, straight, resumed


@pytest.mark.slow
def test_an_exception_on_one_rank_leaves_a_checkpoint_that_goes_on_as_if_nothing_had_been(
    tmp_path: Path,
) -> None:
    answers = run_ranks(_break_and_resume, 3, tmp_path)
    for rank, (said, straight, resumed) in enumerate(answers):
        assert "Stage 1 (bp, blocks 2 to 3)" in said
        assert ("ArithmeticError: once" in said) or rank != 1
        assert resumed.losses == straight.losses[4:]
        assert_equal(resumed.parameters, straight.parameters)


# Weights that share their storage, and a part of an adapter that is drawn at random and never trained.


class Tied(TinyModule):
    """SmolLM2's kind: the head is the embedding; and LoRA-FA's: A stays as it is drawn."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed=seed)
        base = self.model.get_base_model()
        base.lm_head.weight = base.model.embed_tokens.weight
        for name, parameter in self.named_parameters():
            if "lora_A" in name:
                parameter.requires_grad_(False)


def _tied(folder: Path) -> dict[str, Any]:
    """Train, then validate the checkpoint in a module that has drawn other adapters."""
    strategy = HybridOPStrategy(plan=split(6) if os.environ["WORLD_SIZE"] == "1" else split(3, 3))
    trainer = trainer_for(strategy, callbacks=every_step(folder), enable_checkpointing=True)
    path = folder / "step=3.ckpt"
    if not path.exists():
        trainer.fit(Tied(), TRAIN(), HELD_OUT())
    other = Tied(seed=1)
    frozen = {name: value.clone() for name, value in Tied().state_dict().items() if "lora" not in name}
    other.load_state_dict(frozen, strict=False)
    again = trainer_for(HybridOPStrategy(plan=strategy.plan))
    (metrics,) = again.validate(other, HELD_OUT(), ckpt_path=str(path), verbose=False)
    return {"fit": trainer.callback_metrics.get("val_loss"), "validated": metrics["val_loss"]}


def test_a_checkpoint_holds_all_of_an_adapter_and_loads_in_one_process(tmp_path: Path) -> None:
    pipelined = run_ranks(_tied, 2, tmp_path)
    (alone,) = run_ranks(_tied, 1, tmp_path)
    for answer in (*pipelined, alone):
        assert answer["validated"] == pytest.approx(float(pipelined[0]["fit"]), abs=1e-6)


# A configuration of OmegaConf among the hyperparameters.


class Configured(TinyModule):
    def __init__(self, lora: Any) -> None:
        super().__init__(rank=lora.rank)
        self.save_hyperparameters()


def _configured(folder: Path) -> list[Run]:
    module = partial(Configured, OmegaConf.create({"rank": 3}))
    first = Job(
        strategy={"plan": split(3, 3)},
        train=TRAIN,
        module=module,
        trainer={"enable_checkpointing": True},
        callbacks=partial(every_step, folder),
    )
    again = replace(
        first,
        trainer={"max_epochs": 2, "enable_checkpointing": True},
        callbacks=partial(every_step, folder / "again"),
        checkpoint=str(folder / "step=3.ckpt"),
    )
    return [fit(first), fit(again)]


def test_a_configuration_among_the_hyperparameters_does_not_stop_resuming(tmp_path: Path) -> None:
    for first, again in run_ranks(_configured, 2, tmp_path):
        assert (first.global_step, again.global_step) == (3, 6)
    checkpoint = torch.load(tmp_path / "again" / "step=6.ckpt", weights_only=True)
    assert checkpoint["hyper_parameters"] == {"lora": {"rank": 3}}


# Data that only rank 0 reads.


def _other_rows() -> DataLoader[dict[str, Tensor]]:
    """Return other rows on every rank, in an order of the user's own that depends on global randomness."""
    rows = TokenRows(10, length=7, seed=int(os.environ.get("RANK", "0")))
    order = RandomSampler(rows, generator=torch.Generator().manual_seed(torch.randint(99, ()).item()))
    return DataLoader(rows, batch_size=4, sampler=order)


def _shared(folder: Path) -> dict[str, Run]:
    plan = split(3, 3, zo_stages=1)
    own = {"strategy": {"plan": plan, "seed": 7, "data": "broadcast"}, "train": _other_rows}
    torch.manual_seed(int(os.environ["RANK"]))
    return {
        "same": fit(job(plan)),
        "broadcast": fit(job(plan, folder=folder, data="broadcast")),
        "resumed": fit(job(plan, checkpoint=folder / "step=4.ckpt", data="broadcast")),
        "other rows": fit(Job(**own, validation=_other_rows)),
    }


@pytest.mark.slow
def test_batches_of_rank_0_reach_all_ranks(tmp_path: Path) -> None:
    answers = run_ranks(_shared, 2, tmp_path)
    for runs in answers:
        assert runs["broadcast"].losses == runs["same"].losses
        assert_equal(runs["broadcast"].parameters, runs["same"].parameters)
        assert runs["resumed"].losses == runs["same"].losses[4:]
        assert_equal(runs["resumed"].parameters, runs["same"].parameters)
        assert runs["other rows"].global_step == 3
        assert runs["other rows"].losses == answers[0]["other rows"].losses


def _other_order() -> str:
    torch.manual_seed(int(os.environ["RANK"]))
    try:
        fit(Job(strategy={"plan": split(3, 3)}, train=_other_rows))
    except Exception as error:
        return str(error)
    return "nothing was refused"


def test_rows_in_another_order_are_refused_at_the_first_step_that_differs() -> None:
    for said in run_ranks(_other_order, 2):
        assert said == (
            "Every rank must read the same batch, but rank 1 (stage 1) read another one than rank 0; give all hosts the same "
            "data files and samplers a seeded generator of their own, or pass HybridOPStrategy(data='broadcast')."
        )


def _unequal(lengths: tuple[int, int], **strategy: Any) -> str:
    rows = lengths[int(os.environ["RANK"])]
    try:
        fit(Job(strategy=strategy, train=partial(loader, rows, batch_size=4)))
    except Exception as error:
        return str(error)
    return "nothing was refused"


def test_loaders_of_unequal_length_are_refused_by_name() -> None:
    for said in run_ranks(_unequal, 2, (16, 12)):
        assert said == (
            "Every rank must read the same batches, but rank 0's DataLoader has 4 of them while rank 1 (stage 1) has 3; "
            "give all hosts the same data files, or pass HybridOPStrategy(data='broadcast')."
        )


class Endless(IterableDataset[dict[str, Tensor]]):
    """Rows that do not say how many they are."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        rows = TokenRows(self.rows)
        yield from (rows[index] for index in range(self.rows))


def _without_length(rows: tuple[int, int], **strategy: Any) -> str:
    own = DataLoader(Endless(rows[int(os.environ["RANK"])]), batch_size=4)
    try:
        run = fit(Job(strategy=strategy, train=lambda: own))
    except Exception as error:
        return str(error)
    return f"{run.global_step} steps"


def test_loaders_without_a_length_must_end_together() -> None:
    assert run_ranks(_without_length, 2, (12, 12)) == ["3 steps", "3 steps"]
    for said in run_ranks(_without_length, 2, (16, 8)):
        assert said == (
            "Every rank must read the same batches, but those of rank 1 ended before the others'; give all hosts the same "
            "data files, or pass HybridOPStrategy(data='broadcast')."
        )
