"""Loggers over a pipeline: each metric once, with the steps and values of one process."""

import csv
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger

from lightning_hybridop import HybridOPStrategy
from tests.distributed.compare import assert_close
from tests.distributed.harness import run_ranks
from tests.distributed.runs import Batch, answers_loader, trainer_for
from tests.tiny import TinyModule, loader

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240), pytest.mark.slow]

RANKS = 3
Logged = dict[tuple[str, int], list[float]]  # by metric and step


class LogsAll(TinyModule):
    """Logs from steps, from the ends of epochs and straight to its logger."""

    def __init__(self) -> None:
        super().__init__(learning_rate=0.0)
        self.save_hyperparameters()
        self.tokens = torchmetrics.MeanMetric()
        self.most = torchmetrics.MaxMetric()

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.tokens(batch["input_ids"].float())
        self.log("tokens", self.tokens, on_step=True, on_epoch=True)
        self.log("twice", 2 * loss, on_epoch=True)
        self.log("unseen", loss, logger=False)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("epochs", float(self.current_epoch))
        assert self.logger is not None
        self.logger.log_metrics({"straight": 1.0 + self.current_epoch}, step=self.global_step)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.most.update(batch["input_ids"])
        self.log("most", self.most)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        loss = self.model(**batch).loss
        self.log_dict({"test_loss": loss, "test_twice": 2 * loss}, on_step=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def session(alone: bool, folder: Path) -> None:
    """Fit and test with every logger at once."""
    loggers: list[Any] = [CSVLogger(folder), TensorBoardLogger(folder)]
    if find_spec("mlflow"):
        import os

        os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # MLflow 3 advises a database
        loggers.append(MLFlowLogger(tracking_uri=f"file:{folder}/mlruns"))
    strategy: Any = "auto" if alone else HybridOPStrategy(zo_stages=1, micro_batches=3, queries=2)
    trainer = trainer_for(
        strategy, max_epochs=2, logger=loggers, log_every_n_steps=2, callbacks=[LearningRateMonitor()]
    )
    module = LogsAll()
    trainer.fit(module, loader(18, batch_size=4), answers_loader([1, 5, 2, 1, 1], batch_size=3))
    trainer.test(module, answers_loader([1, 5, 2, 1, 1], batch_size=3), verbose=False)


# What the files hold, read without Lightning.


def of_csv(folder: Path) -> Logged:
    (file,) = folder.rglob("metrics.csv")
    logged: Logged = {}
    with file.open() as text:
        for row in csv.DictReader(text):
            step = int(row.pop("step"))
            for name, value in row.items():
                if value and name != "epoch":
                    logged.setdefault((name, step), []).append(float(value))
    return logged


def of_tensorboard(folder: Path) -> Logged:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (run,) = {file.parent for file in folder.rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(run), size_guidance={"scalars": 0})
    events.Reload()
    logged: Logged = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            if name not in (
                "epoch",
                "hp_metric",
            ):  # the latter is TensorBoard's own, once per call of the Trainer
                logged.setdefault((name, event.step), []).append(event.value)
    return logged


def of_mlflow(folder: Path) -> Logged:
    (run,) = (path.parent for path in folder.glob("mlruns/*/*/meta.yaml"))
    logged: Logged = {}
    for file in (path for path in (run / "metrics").rglob("*") if path.is_file()):
        for line in file.read_text().splitlines():
            _, value, step = line.split()
            name = str(file.relative_to(run / "metrics"))
            if name != "epoch":
                logged.setdefault((name, int(step)), []).append(float(value))
    return logged


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders that one process and a pipeline logged into."""
    alone, pipeline = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("pipeline")
    run_ranks(session, 1, True, alone)
    run_ranks(session, RANKS, False, pipeline)
    return alone, pipeline


@pytest.mark.parametrize(
    ("package", "read"), [("csv", of_csv), ("tensorboard", of_tensorboard), ("mlflow", of_mlflow)]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_each_metric_is_logged_once_per_step_with_the_value_of_one_process(
    package: str, read: Callable[[Path], Logged], folders: tuple[Path, Path]
) -> None:
    pytest.importorskip(package)
    expected, found = (read(folder) for folder in folders)

    assert {len(values) for values in found.values()} == {1}
    files = [sorted(path.suffix for path in folder.rglob("*") if path.is_file()) for folder in folders]
    assert len(files[0]) == len(files[1])
    assert_close(dict(sorted(found.items())), dict(sorted(expected.items())))
    times = Counter(name for name, _ in found)
    assert times["train_loss"] == times["tokens_step"] == times["twice_step"] == 5
    assert times["tokens_epoch"] == times["most"] == times["epochs"] == 2
    assert times["test_loss_step"] == 2
    assert times["test_loss_epoch"] == 1
    assert times["unseen"] == 0
    # self.logger is the first one.
    assert times["straight"] == (2 if package == "csv" else 0)
    assert times["lr-Adam"] == 2
