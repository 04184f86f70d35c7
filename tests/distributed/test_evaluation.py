"""Validation, test and prediction on one to four stages against one process with Lightning's own strategy."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import BasePredictionWriter, Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hybridop import HybridOPStrategy
from tests.distributed.compare import assert_close
from tests.distributed.harness import run_ranks
from tests.distributed.runs import Batch, answers_loader, trainer_for
from tests.tiny import TinyModule, loader

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

# Rows of different numbers of label tokens, in batches of 4, 4 and 3: means over tokens and over rows differ.
ANSWERS = [1, 1, 1, 7, 2, 5, 1, 3, 8, 1, 2]


def rows() -> DataLoader[Batch]:
    return answers_loader(ANSWERS, batch_size=4)


def other_rows() -> DataLoader[Batch]:
    return answers_loader([3, 1, 6, 2, 1], batch_size=3, length=12)


class Everything(TinyModule):
    """Logs in every way there is, returns outputs and collects some of its own."""

    def __init__(self, kind: str = "tensor", **options: Any) -> None:
        super().__init__(**options)
        self.kind = kind
        classification = torchmetrics.classification
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(4, average="micro")
        self.auroc = torchmetrics.classification.BinaryAUROC()  # keeps all values, not sums
        self.both = torchmetrics.MetricCollection(
            {
                "precision": classification.MulticlassPrecision(4, average="macro"),
                "recall": classification.MulticlassRecall(4, average="macro"),
            },
            prefix="of_",
        )
        self.never_logged = torchmetrics.MeanMetric()
        self.losses: list[Tensor] = []
        self.rows = 0

    def evaluate(self, batch: Batch, prefix: str) -> dict[str, Tensor]:
        output = self.model(**batch)
        predicted, expected = output.logits[:, -1].argmax(-1) % 4, batch["input_ids"][:, 0] % 4
        loss = output.loss
        per_row = output.logits[:, -1].max(-1).values
        self.accuracy(predicted, expected)
        self.log(f"{prefix}_accuracy", self.accuracy, on_step=True, on_epoch=True, prog_bar=True)
        self.auroc.update(output.logits[:, -1, 0].sigmoid(), batch["input_ids"][:, 0] % 2)
        self.log(f"{prefix}_auroc", self.auroc)
        self.both(predicted, expected)
        self.log_dict(self.both)
        self.never_logged.update(per_row)
        self.log(f"{prefix}_loss", loss, batch_size=len(expected))
        self.log(f"{prefix}_step_only", 2 * loss, on_step=True, on_epoch=False)
        self.log(f"{prefix}_both", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log(f"{prefix}_most", loss, reduce_fx="max")
        self.log(f"{prefix}_least", per_row.mean(), reduce_fx=torch.min)
        self.log(f"{prefix}_sum", loss, reduce_fx="sum")
        self.log(f"{prefix}_per_token", loss, batch_size=int((batch["labels"] != -100).sum()))
        self.log_dict(
            {f"{prefix}_rows": float(len(expected)), f"{prefix}_per_row": per_row.mean()}, prog_bar=True
        )
        self.log(f"{prefix}_only_bar", per_row.mean(), True, False)
        self.log(f"{prefix}_nowhere", per_row.sum(), logger=False)
        self.losses.append(loss.detach())
        self.rows += len(expected)
        return {"loss": loss, "predicted": predicted}

    def summarise(self, prefix: str) -> None:
        self.log(f"{prefix}_collected", torch.stack(self.losses).mean())
        self.log(f"{prefix}_counted", float(self.rows))
        self.log(f"{prefix}_computed", self.never_logged.compute())
        self.losses.clear()
        self.rows = 0
        self.never_logged.reset()

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("loader", float(dataloader_idx))
        return self.evaluate(batch, "val")

    def on_validation_epoch_end(self) -> None:
        self.summarise("val")

    def test_step(self, batch: Batch) -> Any:  # type: ignore[override]  # Lightning lets the index be left out
        return self.evaluate(batch, "test")

    def on_test_epoch_end(self) -> None:
        self.summarise("test")

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Any:
        logits = self.model(**batch).logits[:, -1]
        words = [f"{dataloader_idx}/{batch_idx}/{token}" for token in logits.argmax(-1).tolist()]
        outputs = {
            "tensor": logits,
            "dict": {"logits": logits, "words": words, "most": logits.max()},
            "words": words,
            "tuple": (logits, words, float(logits.max())),
            "none": None,
        }
        return outputs[self.kind]


class TwoTests(Everything):
    def test_step(self, batch: Batch, batch_idx: int, dataloader_idx: int) -> Any:  # type: ignore[override]
        return self.evaluate(batch, "test")


class Outputs(Callback):
    """Keeps what evaluation steps returned, and when validation ran."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.validations: list[tuple[bool, int, int]] = []

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self.validations.append((trainer.sanity_checking, trainer.current_epoch, trainer.global_step))

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.outputs.append(_plain(outputs))

    def on_test_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.outputs.append(_plain(outputs))


class Writer(BasePredictionWriter):
    """Notes each write in a file, so that a second one is seen, on whichever rank it happens."""

    def __init__(self, folder: Path, interval: Any) -> None:
        super().__init__(interval)
        self.file = folder / f"{interval}.txt"

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, batch: Any, *numbers: int
    ) -> None:
        with self.file.open("a") as file:
            file.write(f"{numbers} {list(batch_indices)} {_form(prediction)}\n")

    def write_on_epoch_end(
        self, trainer: Any, pl_module: Any, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        with self.file.open("a") as file:
            file.write(f"{batch_indices} {_form(predictions)}\n")


@dataclass(slots=True)
class Session:
    """What one process has after a session; `fitted` holds the metrics as of the end of the fit."""

    fitted: dict[str, dict[str, float]] = field(default_factory=dict)
    validations: list[tuple[bool, int, int]] = field(default_factory=list)
    every_second_epoch: list[tuple[bool, int, int]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    returned: list[Any] = field(default_factory=list)
    bars: list[dict[str, float]] = field(default_factory=list)
    predictions: list[Any] = field(default_factory=list)
    returns_none: list[Any] = field(default_factory=list)


def _plain(value: Any) -> Any:
    """Return tensors as lists, so that values compare."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return type(value)(_plain(item) for item in value) if isinstance(value, (list, tuple)) else value


def _form(value: Any) -> str:
    """Return how a prediction is built: values are compared elsewhere, and not to their last digit."""
    if isinstance(value, Tensor):
        return str(tuple(value.shape))
    if isinstance(value, dict):
        return str({key: _form(item) for key, item in value.items()})
    return str([_form(item) for item in value]) if isinstance(value, (list, tuple)) else type(value).__name__


def session(options: dict[str, Any] | None, folder: Path, learning_rate: float) -> Session:
    """Fit, validate, test and predict, with Lightning's own strategy where there are no `options` of ours."""

    def trainer(**arguments: Any) -> lightning.Trainer:
        strategy: Any = "auto" if options is None else HybridOPStrategy(**options)
        return trainer_for(strategy, **arguments)

    done = Session()
    watch = Outputs()
    module = Everything(learning_rate=learning_rate)
    first = trainer(max_epochs=2, val_check_interval=0.5, callbacks=[watch], log_every_n_steps=1)
    first.fit(module, loader(16, batch_size=4), [rows(), other_rows()])
    for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
        done.fitted[name] = {key: float(value) for key, value in getattr(first, name).items()}
    done.validations = list(watch.validations)

    done.returned.append(first.validate(module, rows(), verbose=False))
    done.returned.append(first.test(module, rows(), verbose=False))
    done.bars.append({key: float(value) for key, value in first.progress_bar_metrics.items()})
    done.outputs = watch.outputs

    second = trainer(callbacks=[Writer(folder, "batch"), Writer(folder, "epoch")])
    predictor = Everything(learning_rate=0.0)
    for kind in ("tensor", "dict", "words", "tuple"):
        predictor.kind = kind
        done.predictions.append(
            _plain(second.predict(predictor, [rows(), other_rows()] if kind != "dict" else rows()))
        )
    done.returns_none.append(second.predict(predictor, rows(), return_predictions=False))

    watch = Outputs()
    third = trainer(max_epochs=4, check_val_every_n_epoch=2, num_sanity_val_steps=0, callbacks=[watch])
    two = TwoTests(learning_rate=learning_rate)
    third.fit(two, loader(4, batch_size=2), other_rows())
    done.every_second_epoch = watch.validations
    done.returned.append(third.test(two, [rows(), other_rows()], verbose=False))
    return done


@cache
def one_process(learning_rate: float, folder: Path) -> Session:
    folder.mkdir()
    return session(None, folder, learning_rate)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options", "learning_rate"),
    [
        (1, {"zo_stages": 1}, 0.0),
        (2, {}, 1e-2),
        (3, {"zo_stages": 1, "micro_batches": 3, "queries": 2}, 0.0),
        (4, {"micro_batches": 5}, 1e-2),
    ],
)
@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
def test_evaluation_gives_what_one_process_gives_on_every_rank(
    ranks: int,
    options: dict[str, Any],
    learning_rate: float,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    alone = tmp_path_factory.getbasetemp() / f"alone-{learning_rate}"
    expected = one_process(learning_rate, alone)
    sessions = run_ranks(session, ranks, options, tmp_path, learning_rate)

    for found in sessions:
        assert found == sessions[0]  # bit for bit
        for name in Session.__dataclass_fields__:
            assert_close(getattr(found, name), getattr(expected, name))
    for interval in ("batch", "epoch"):
        written, meant = ((folder / f"{interval}.txt").read_text() for folder in (tmp_path, alone))
        assert written == meant
    # The numbers tell something apart: a mean over rows from one over tokens, both from those of micro-batches.
    metrics = expected.returned[0][0]
    assert abs(metrics["val_loss"] - metrics["val_per_token"]) > 1e-4
    assert abs(metrics["val_collected"] - metrics["val_loss"]) > 1e-4
    assert 0.0 < metrics["val_accuracy_epoch"] < 1.0
    assert metrics["val_counted"] == len(ANSWERS)
    assert [sanity for sanity, _, _ in expected.validations] == [True, False, False, False, False]
    assert [epoch for _, epoch, _ in expected.every_second_epoch] == [1, 3]
