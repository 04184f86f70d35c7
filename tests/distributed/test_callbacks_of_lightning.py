"""Lightning's own callbacks and the Trainer's switches over a pipeline whose first stage is `zo`.

Each case runs in one process with Lightning's own strategy too, and gives the same there.
"""

import io
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import (
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PyTorchProfiler
from torch import Tensor

from lightning_hybridop import HybridOPStrategy, even_plan
from tests.distributed.compare import assert_close
from tests.distributed.harness import run_ranks
from tests.distributed.runs import Batch, trainer_for
from tests.tiny import TinyModule, loader

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(240),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
]

RANKS = 3
SCORES = [3.0, 1.0, 2.0, 1.5, 4.0, 5.0, 6.0, 7.0]

MakeTrainer = Callable[..., lightning.Trainer]
Result = dict[str, Any]


class Scored(TinyModule):
    """Logs, behind the model and so on the last stage alone, a score that the epoch decides."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.tokens = torchmetrics.MeanMetric()
        self.rows = torchmetrics.SumMetric()  # shows a pass that is counted twice

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.tokens(batch["input_ids"].float())
        self.log("tokens", self.tokens, on_step=True, on_epoch=True, prog_bar=True)
        self.rows(len(batch["input_ids"]))
        self.log("rows", self.rows, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.model(**batch)
        self.log("score", SCORES[self.current_epoch], prog_bar=True)


class Count(Callback):
    """Counts batches."""

    def __init__(self) -> None:
        self.batches = dict.fromkeys(("train", "validation", "test", "predict"), 0)

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches["train"] += 1

    def on_validation_batch_end(self, *_: Any) -> None:
        self.batches["validation"] += 1

    def on_test_batch_end(self, *_: Any) -> None:
        self.batches["test"] += 1

    def on_predict_batch_end(self, *_: Any) -> None:
        self.batches["predict"] += 1


def progress(trainer: lightning.Trainer) -> Result:
    return {"step": trainer.global_step, "epoch": trainer.current_epoch}


# The cases: each fits on its own and returns what must be equal on all ranks and in one process.


def early_stopping(make: MakeTrainer, folder: Path) -> Result:
    stop = EarlyStopping("score", patience=2, mode="min")
    trainer = make(max_epochs=8, callbacks=[stop])
    trainer.fit(Scored(), loader(8, batch_size=4), loader(4))
    return {**progress(trainer), "stopped": stop.stopped_epoch, "best": float(stop.best_score)}


def checkpoints(make: MakeTrainer, folder: Path) -> Result:
    best = ModelCheckpoint(
        folder, "{epoch}-{score:.1f}", monitor="score", mode="min", save_top_k=2, save_last=True
    )
    trainer = make(max_epochs=5, callbacks=[best], enable_checkpointing=True)
    trainer.fit(Scored(), loader(8, batch_size=4), loader(4))
    scores = {Path(path).name: float(score) for path, score in best.best_k_models.items()}
    return {
        "best": Path(best.best_model_path).name,
        "kept": scores,
        "files": sorted(path.name for path in folder.glob("*.ckpt")),
    }


def every_five_steps_of_twelve(make: MakeTrainer, folder: Path) -> Result:
    checkpoint = ModelCheckpoint(folder, "{step}", every_n_train_steps=5, save_top_k=-1)
    trainer = make(
        max_steps=12, max_epochs=-1, callbacks=[checkpoint], enable_checkpointing=True, all_zo=True
    )
    trainer.fit(TinyModule(), loader(16, batch_size=4))
    return {**progress(trainer), "files": sorted(path.name for path in folder.glob("*.ckpt"))}


def limits(make: MakeTrainer, folder: Path) -> Result:
    count = Count()
    trainer = make(
        max_epochs=2,
        limit_train_batches=3,
        limit_val_batches=0.5,
        limit_test_batches=2,
        limit_predict_batches=0.25,
        num_sanity_val_steps=1,
        callbacks=[count],
    )
    module = Evaluates()
    data = partial(loader, 16, batch_size=4)
    trainer.fit(module, data(), data())
    trainer.test(module, data(), verbose=False)
    predictions = trainer.predict(module, data())
    assert predictions is not None
    return {**count.batches, "predictions": [tuple(part.shape) for part in predictions]}


class Evaluates(TinyModule):
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("test_loss", self.model(**batch).loss)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits: Tensor = self.model(**batch).logits
        return logits


def overfitting(make: MakeTrainer, folder: Path) -> Result:
    count = Count()
    trainer = make(max_epochs=3, overfit_batches=2, callbacks=[count])
    trainer.fit(TinyModule(), loader(16, batch_size=4), loader(16, batch_size=4))
    return {**progress(trainer), **count.batches}


def fast_dev_run(make: MakeTrainer, folder: Path) -> Result:
    count = Count()
    trainer = make(fast_dev_run=2, callbacks=[count])
    module = Evaluates()
    trainer.fit(module, loader(16, batch_size=4), loader(16, batch_size=4))
    trainer.test(module, loader(16, batch_size=4), verbose=False)
    return {**progress(trainer), **count.batches}


def steps_and_epochs(make: MakeTrainer, folder: Path) -> Result:
    steps = make(max_steps=3, max_epochs=-1)
    steps.fit(TinyModule(), loader(8, batch_size=4))
    epochs = make(min_epochs=3, max_epochs=5, callbacks=[EarlyStopping("score", patience=1, mode="max")])
    epochs.fit(Scored(), loader(4), loader(4))
    return {"steps": progress(steps), "epochs": progress(epochs)}


class Leaves(TinyModule):
    """Leaves each epoch before its third batch."""

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:  # type: ignore[override]
        return -1 if batch_idx == 2 else None


def skipping(make: MakeTrainer, folder: Path) -> Result:
    trainer = make(max_epochs=2)
    trainer.fit(Leaves(), loader(16, batch_size=4))
    return progress(trainer)


class Transfers(Evaluates):
    """Counts how often Lightning hands it a batch, and changes each."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {"before": 0, "after": 0}
        self.seen: list[int] = []

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        self.calls["before"] += 1
        return {**batch, "labels": batch["labels"].clone()}

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        self.calls["after"] += 1
        batch["labels"][:, :3] = -100
        return batch

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.seen.append(int((batch["labels"] == -100).sum()))


def transfers(make: MakeTrainer, folder: Path) -> Result:
    trainer = make(max_epochs=1, num_sanity_val_steps=0)
    module = Transfers()
    trainer.fit(module, loader(12, batch_size=4), loader(6, batch_size=4))
    trainer.test(module, loader(6, batch_size=4), verbose=False)
    return {**module.calls, "seen": module.seen}


class Extras(TinyModule):
    """Returns more than the loss."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        output = self.model(**batch)
        rows = batch["input_ids"][:, 0]
        return {
            "loss": output.loss,
            "first": rows,
            "twice": 2 * output.loss,
            "words": [str(int(r)) for r in rows],
        }


class Outputs(Callback):
    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        assert not outputs["loss"].requires_grad
        plain = {
            key: value.tolist() if isinstance(value, Tensor) else value for key, value in outputs.items()
        }
        self.outputs.append(plain)


def outputs_of_training(make: MakeTrainer, folder: Path) -> Result:
    result: Result = {}
    for name, module, accumulate in (("extras", Extras, 1), ("alone", TinyModule, 2)):
        watch = Outputs()
        trainer = make(max_epochs=1, callbacks=[watch], accumulate_grad_batches=accumulate)
        trainer.fit(module(learning_rate=0.0), loader(10, batch_size=4))
        result[name] = watch.outputs
    return result


class Collects(TinyModule):
    """Collects during training what it logs at the end of an epoch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.losses: list[Tensor] = []
        self.rows = 0

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.rows += len(batch["input_ids"])
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean_loss", torch.stack(self.losses).mean())
        self.log("rows", float(self.rows))
        self.losses.clear()


def collected_in_training(make: MakeTrainer, folder: Path) -> Result:
    # Micro-batches of equal size, so that their mean is that of the mini-batches.
    trainer = make(max_epochs=2)
    trainer.fit(Collects(learning_rate=0.0), loader(12, batch_size=6))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def anomalies(make: MakeTrainer, folder: Path) -> Result:
    trainer = make(max_epochs=1, detect_anomaly=True)
    trainer.fit(TinyModule(), loader(8, batch_size=4), loader(4))
    return progress(trainer)


def profilers(make: MakeTrainer, folder: Path) -> Result:
    found = {}
    for name in ("simple", "advanced", "pytorch"):
        profiler: Any = name
        if name == "pytorch":
            profiler = PyTorchProfiler(
                folder, "pytorch", export_to_chrome=True, activities=[torch.profiler.ProfilerActivity.CPU]
            )
        trainer = make(max_steps=2, max_epochs=-1, profiler=profiler, default_root_dir=folder)
        trainer.fit(TinyModule(), loader(8, batch_size=4))
        found[name] = progress(trainer)
    return found


def learning_rates(make: MakeTrainer, folder: Path) -> Result:
    trainer = make(
        max_epochs=2,
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        callbacks=[LearningRateMonitor("step"), DeviceStatsMonitor(cpu_stats=True)],
    )
    trainer.fit(Warms(), loader(8, batch_size=4))
    return {
        "rate": float(trainer.callback_metrics["lr-SGD"]),
        "files": len(list(folder.rglob("metrics.csv"))),
    }


class Warms(TinyModule):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def the_same_metrics(make: MakeTrainer, folder: Path) -> Result:
    trainer = make(max_epochs=2, log_every_n_steps=1)
    trainer.fit(Scored(learning_rate=0.0), loader(10, batch_size=4), loader(6, batch_size=4))
    kinds = ("logged_metrics", "callback_metrics", "progress_bar_metrics")
    return {kind: {name: float(value) for name, value in getattr(trainer, kind).items()} for kind in kinds}


CASES = (
    early_stopping,
    checkpoints,
    every_five_steps_of_twelve,
    limits,
    overfitting,
    fast_dev_run,
    steps_and_epochs,
    skipping,
    transfers,
    outputs_of_training,
    collected_in_training,
    anomalies,
    profilers,
    learning_rates,
    the_same_metrics,
)


# What one process has no equal of: time limits, and what is drawn and printed by whom.


class Slow(TinyModule):
    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]
        time.sleep(0.02)


def time_limit(make: MakeTrainer, folder: Path) -> Result:
    timer = Timer(duration={"seconds": 1}, interval="step")
    by_callback = make(max_epochs=-1, callbacks=[timer])
    by_callback.fit(Slow(), loader(8, batch_size=4))
    by_argument = make(max_epochs=-1, max_time={"seconds": 1})
    by_argument.fit(Slow(), loader(8, batch_size=4))
    return {"callback": by_callback.global_step, "argument": by_argument.global_step}


class Prints(Scored):
    """Prints before the model, behind it and at the end of an epoch."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.print("before the model")
        super().validation_step(batch, batch_idx)
        self.print("behind the model", batch_idx, sep=": ")

    def on_validation_epoch_end(self) -> None:
        self.print("end of the epoch")


def drawings(make: MakeTrainer, folder: Path) -> Result:
    drawn = {}
    for bar in (TQDMProgressBar(), RichProgressBar()):
        text = io.StringIO()
        with redirect_stdout(text), redirect_stderr(text):
            trainer = make(
                max_epochs=2,
                callbacks=[bar],
                enable_progress_bar=True,
                num_sanity_val_steps=0,
                log_every_n_steps=1,
            )
            trainer.fit(Prints(), loader(8, batch_size=4), loader(6, batch_size=4))
        drawn[type(bar).__name__] = text.getvalue()
    return drawn


def summaries(make: MakeTrainer, folder: Path) -> Result:
    shown = {}
    for summary in (ModelSummary(max_depth=2), RichModelSummary(max_depth=1), ModelSummary(max_depth=0)):
        text = io.StringIO()
        with redirect_stdout(text), redirect_stderr(text), log_into(text):
            trainer = make(max_steps=1, callbacks=[summary])
            trainer.fit(TinyModule(), loader(4))
        shown[f"{type(summary).__name__} {summary._max_depth}"] = text.getvalue()
    return shown


class log_into:  # noqa: N801  # used as a function
    """Inside the block Lightning's log goes to `text`."""

    def __init__(self, text: io.StringIO) -> None:
        import logging

        self.handler = logging.StreamHandler(text)
        self.log = logging.getLogger("lightning.pytorch")

    def __enter__(self) -> None:
        self.log.addHandler(self.handler)

    def __exit__(self, *_: Any) -> None:
        self.log.removeHandler(self.handler)


ONLY_HERE = (time_limit, drawings, summaries)


def session(alone: bool, folder: Path) -> dict[str, Result]:
    """Run every case on this rank."""

    def make(all_zo: bool = False, **options: Any) -> lightning.Trainer:
        plan = even_plan(blocks=6, stages=RANKS, zo_stages=RANKS, micro_batches=2)
        strategy: Any = HybridOPStrategy(plan) if all_zo else HybridOPStrategy(zo_stages=1, micro_batches=3)
        return trainer_for("auto" if alone else strategy, **options)  # type: ignore[arg-type]

    results = {}
    for case in CASES if alone else (*CASES, *ONLY_HERE):
        own = folder / case.__name__
        own.mkdir(parents=True, exist_ok=True)
        results[case.__name__] = case(make, own)
    return results


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    (found,) = run_ranks(session, 1, True, tmp_path_factory.mktemp("alone"))
    return dict(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> list[dict[str, Result]]:
    return run_ranks(session, RANKS, False, folder)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_every_rank_sees_what_one_process_sees(
    case: str, alone: dict[str, Result], pipeline: list[dict[str, Result]]
) -> None:
    for rank in pipeline:
        assert rank[case] == pipeline[0][case]  # bit for bit
        assert_close(rank[case], alone[case])


def test_the_cases_say_what_they_are_meant_to(alone: dict[str, Result]) -> None:
    assert alone["early_stopping"] == {"step": 8, "epoch": 4, "stopped": 3, "best": 1.0}
    assert alone["checkpoints"]["best"] == "epoch=1-score=1.0.ckpt"
    assert alone["every_five_steps_of_twelve"]["files"] == ["step=10.ckpt", "step=5.ckpt"]
    assert alone["every_five_steps_of_twelve"]["step"] == 12
    assert alone["limits"]["train"] == 6
    assert alone["skipping"]["step"] == 4
    assert alone["transfers"]["before"] == 3 + 2 + 2
    assert alone["outputs_of_training"]["extras"][2].keys() == {"loss", "first", "twice", "words"}
    assert alone["learning_rates"] == {"rate": 0.125, "files": 1}


def test_a_time_limit_stops_all_ranks_at_one_step(pipeline: list[dict[str, Result]]) -> None:
    for rank in pipeline:
        assert rank["time_limit"] == pipeline[0]["time_limit"]
        assert all(0 < steps < 100 for steps in rank["time_limit"].values())


def test_profilers_write_one_file_for_each_rank(folder: Path, pipeline: list[dict[str, Result]]) -> None:
    names = [path.name for path in (folder / "profilers").rglob("*") if path.is_file()]
    assert len([name for name in names if name.startswith("fit-pytorch") and name.endswith(".json")]) == RANKS


def test_only_rank_0_draws_and_prints(pipeline: list[dict[str, Result]]) -> None:
    first, *others = (rank["drawings"] for rank in pipeline)
    for bar, text in first.items():
        assert "Epoch 1" in text, bar
        assert text.count("before the model") == 4, bar  # two epochs of two batches
        assert text.count("behind the model: 1") == 2, bar
        assert text.count("end of the epoch") == 2, bar
        assert "score" in text
    for drawn in others:
        for text in drawn.values():
            assert "Epoch" not in text
            assert "the model" not in text
            assert "the epoch" not in text


def test_the_summary_shows_the_whole_model_and_who_holds_what(pipeline: list[dict[str, Result]]) -> None:
    first, *others = (rank["summaries"] for rank in pipeline)
    module = TinyModule()
    every = sum(p.numel() for p in module.parameters())
    trainable = sum(p.numel() for p in module.parameters() if p.requires_grad)
    for text in (first["ModelSummary 2"], first["RichModelSummary 1"]):
        lines = [line.split() for line in text.splitlines()]
        assert any("Total params" in line and f"{every / 1000:.1f} K" in line for line in text.splitlines())
        assert any("zo" in words and "0-1" in words for words in lines)
        assert any("bp" in words and "4-5" in words for words in lines)
        (total,) = (words for words in lines if words[:1] == ["all"])
        assert total[1:3] == [f"{every:,}", f"{trainable:,}"]
    assert "Stages" not in first["ModelSummary 0"]
    for shown in others:
        assert not any("Stages" in text or "params" in text for text in shown.values())


# A progress bar reads what was logged on rank 0 alone, before hooks in which all ranks come together.


class ComesTogether(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.largest = torchmetrics.MaxMetric()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss)
        self.largest.update(loss + 100.0)
        self.log("mean", self.mean, on_epoch=True, on_step=False, prog_bar=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.gathered = self.all_gather(torch.tensor([self.global_rank], dtype=torch.int16))
        self.log("largest", self.largest.compute())


def _with_a_bar() -> dict[str, Any]:
    module = ComesTogether()
    trainer = trainer_for(HybridOPStrategy(micro_batches=1), enable_progress_bar=True)
    trainer.fit(module, loader(16))
    return {
        "gathered": module.gathered.tolist(),
        **{name: float(trainer.callback_metrics[name]) for name in ("mean", "largest")},
    }


def test_a_progress_bar_does_not_wait_for_ranks_that_have_none() -> None:
    answers = run_ranks(_with_a_bar, 2)
    assert answers[0] == answers[1]
    assert answers[0]["gathered"] == [[0], [1]]
    assert answers[0]["mean"] < 50.0 < answers[0]["largest"]
