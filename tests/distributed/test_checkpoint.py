"""One ordinary checkpoint, whatever the split; and logs that agree on every rank."""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor

from lightning_hybridop import Plan, Stage
from tests.distributed.harness import run_ranks
from tests.distributed.runs import Job, Run, fit, run_jobs
from tests.tiny import TinyModule, loader

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

TRAIN = partial(loader, 16, shuffle=True)
EPOCHS = 4


def split(*sizes: int, zo_stages: int = 0) -> Plan:
    bounds = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    stages = tuple(
        Stage(first=first, last=last, role="zo" if index < zo_stages else "bp")
        for index, (first, last) in enumerate(pairwise(bounds))
    )
    return Plan(blocks=6, stages=stages, micro_batches=2)


def straight(plan: Plan, epochs: int = EPOCHS) -> Job:
    return Job(strategy={"plan": plan, "seed": 7}, train=TRAIN, trainer={"max_epochs": epochs})


def saving(plan: Plan, folder: Path) -> Job:
    return Job(
        strategy={"plan": plan, "seed": 7},
        train=TRAIN,
        trainer={"max_epochs": EPOCHS // 2, "enable_checkpointing": True},
        callbacks=lambda: [ModelCheckpoint(dirpath=folder, filename="half")],
    )


def resuming(plan: Plan, folder: Path) -> Job:
    return Job(
        strategy={"plan": plan, "seed": 7},
        train=TRAIN,
        trainer={"max_epochs": EPOCHS},
        checkpoint=str(folder / "half.ckpt"),
    )


def _save_and_resume(folder: Path) -> dict[str, Run]:
    early, late = split(2, 4), split(4, 2)
    mixed = split(2, 4, zo_stages=1)
    fit(saving(early, folder / "bp"))
    fit(saving(mixed, folder / "mixed"))
    return {
        "straight": fit(straight(late)),
        "other split": fit(resuming(late, folder / "bp")),
        "straight mixed": fit(straight(mixed)),
        "resumed mixed": fit(resuming(mixed, folder / "mixed")),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Run]]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, run_ranks(_save_and_resume, 2, folder)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=tolerance, rtol=tolerance)


def test_a_checkpoint_is_one_ordinary_file_with_global_names(
    saved: tuple[Path, list[dict[str, Run]]],
) -> None:
    folder, _ = saved
    module = TinyModule()
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    optimizer = module.configure_optimizers()
    for kind in ("bp", "mixed"):
        assert [path.name for path in (folder / kind).iterdir()] == ["half.ckpt"]
        checkpoint = torch.load(folder / kind / "half.ckpt", weights_only=True)
        assert checkpoint["state_dict"].keys() == trainable.keys()
        assert checkpoint["global_step"] == 4
        (state,) = checkpoint["optimizer_states"]
        assert sorted(state["state"]) == list(range(len(trainable)))
        optimizer.load_state_dict(state)  # as one process with the unsplit model would
        for name, parameter in trainable.items():
            moments = optimizer.state[parameter]
            assert moments["step"] == 4
            assert moments["exp_avg"].shape == parameter.shape
            assert moments["exp_avg"].any(), name


def test_training_resumes_on_another_split_as_if_it_had_never_stopped(
    saved: tuple[Path, list[dict[str, Run]]],
) -> None:
    for runs in saved[1]:
        resumed, whole = runs["other split"], runs["straight"]
        assert resumed.global_step == whole.global_step == 8
        assert resumed.losses == pytest.approx(whole.losses[4:], abs=1e-6)
        assert_equal(resumed.parameters, whole.parameters, 1e-6)


def test_a_resumed_zo_stage_draws_the_directions_it_would_have_drawn(
    saved: tuple[Path, list[dict[str, Run]]],
) -> None:
    for runs in saved[1]:
        resumed, whole = runs["resumed mixed"], runs["straight mixed"]
        assert resumed.losses == whole.losses[4:]
        assert resumed.derivatives == whole.derivatives[4:]
        assert_equal(resumed.parameters, whole.parameters, 0.0)


def _resume_in_one_process(folder: Path) -> Run:
    return fit(resuming(split(6), folder / "bp"))


def test_training_resumes_in_one_process(saved: tuple[Path, list[dict[str, Run]]]) -> None:
    folder, answers = saved
    (run,) = run_ranks(_resume_in_one_process, 1, folder)
    whole = answers[0]["straight"]
    assert run.global_step == 8
    # One process draws its batches from torch's global state, so it sees the rows in another order.
    assert run.parameters.keys() == whole.parameters.keys()
    assert all(
        not value.equal(dict(TinyModule().named_parameters())[name]) for name, value in run.parameters.items()
    )


class Lenient(TinyModule):
    strict_loading = False


def _plain_lightning(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Resume without the strategy: no further epoch, so the parameters are those of the checkpoint."""
    module = Lenient()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=EPOCHS // 2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, TRAIN(), ckpt_path=folder / "bp" / "half.ckpt")
    found = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    saved = torch.load(folder / "bp" / "half.ckpt", weights_only=True)["state_dict"]
    return found, saved, trainer.global_step


def test_plain_lightning_reads_a_checkpoint_once_the_module_allows_frozen_weights_to_be_missing(
    saved: tuple[Path, list[dict[str, Run]]],
) -> None:
    ((found, expected, steps),) = run_ranks(_plain_lightning, 1, saved[0])
    assert steps == 4
    assert_equal(found, expected, 0.0)


# Logs.


class Measures(TinyModule):
    """Logs numbers, a metric in training and two in validation; early stopping watches one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(4, average="micro")
        self.f1 = torchmetrics.classification.MulticlassF1Score(4, average="macro")
        self.auroc = torchmetrics.classification.BinaryAUROC()  # keeps all values, not sums
        self.train_accuracy = torchmetrics.classification.MulticlassAccuracy(4, average="micro")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.model(**batch)
        self.train_accuracy(*predictions(output.logits, batch))
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        self.log_dict({"train_loss": output.loss, "double": 2 * output.loss}, on_step=True, on_epoch=True)
        return output.loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        output = self.model(**batch)
        predicted, expected = predictions(output.logits, batch)
        self.accuracy(predicted, expected)
        self.f1.update(predicted, expected)
        self.log("val_accuracy", self.accuracy, on_epoch=True)
        self.log("val_f1", self.f1, on_epoch=True)
        self.auroc.update(*scores(output.logits, batch))
        self.log("val_auroc", self.auroc, on_epoch=True)
        self.log("val_loss", output.loss, batch_size=len(expected))


def predictions(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return logits[:, -1].argmax(-1) % 4, batch["input_ids"][:, 0] % 4


def scores(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return logits[:, -1, 0].sigmoid(), batch["input_ids"][:, 0] % 2


def stops_early() -> list[EarlyStopping]:
    return [EarlyStopping("val_loss", patience=1)]


def test_what_the_last_stage_logs_is_known_on_every_rank() -> None:
    validation = partial(loader, 20, batch_size=8)  # 8, 8 and 4 rows
    jobs = [
        Job(
            strategy={"zo_stages": zo_stages},
            module=Measures,
            train=partial(loader, 24),
            validation=validation,
            trainer={"max_epochs": 2, "log_every_n_steps": 1},
            callbacks=stops_early,
        )
        for zo_stages in (0, 1)
    ]
    names = {"train_accuracy", "val_accuracy", "val_auroc", "val_f1", "val_loss"}
    names |= {"train_loss", "train_loss_step", "train_loss_epoch", "double", "double_step", "double_epoch"}
    for runs in run_jobs(jobs, 3):
        assert runs[0].metrics.keys() == names
        assert all(run.metrics == runs[0].metrics for run in runs)
        assert all(run.global_step == 6 for run in runs)
        assert runs[0].metrics["double"] == pytest.approx(2 * runs[0].metrics["train_loss"])
        assert runs[0].metrics["train_loss_epoch"] == pytest.approx(sum(runs[0].losses[3:]) / 3, abs=1e-6)

        trained = Measures()
        trained.load_state_dict(runs[0].parameters, strict=False)
        predicted, expected, losses = [], [], []
        with torch.no_grad():
            for batch in validation():
                output = trained.model(**batch)
                first, second = predictions(output.logits, batch)
                predicted.append(first)
                expected.append(second)
                losses.append(float(output.loss) * len(first))
                trained.auroc.update(*scores(output.logits, batch))
        metrics = runs[0].metrics
        assert metrics["val_loss"] == pytest.approx(sum(losses) / 20, abs=1e-6)
        assert metrics["val_accuracy"] == pytest.approx(
            float(trained.accuracy(torch.cat(predicted), torch.cat(expected)))
        )
        assert metrics["val_f1"] == pytest.approx(
            float(trained.f1(torch.cat(predicted), torch.cat(expected)))
        )
        assert metrics["val_auroc"] == pytest.approx(float(trained.auroc.compute()))
        assert 0 < metrics["val_accuracy"] < 1


class EveryReduction(TinyModule):
    """A batch-wise maximum, a sum and a mean, logged from values that differ between micro-batches."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.model(**batch)
        tokens = batch["input_ids"][:, 0].float()
        self.log("largest", tokens.max(), reduce_fx="max", batch_size=len(tokens))
        self.log("total", tokens.sum(), reduce_fx="sum", batch_size=len(tokens))
        self.log("mean", tokens.mean(), batch_size=len(tokens))


def test_logged_numbers_are_reduced_over_micro_batches_as_the_call_says() -> None:
    validation = partial(loader, 10, batch_size=4)
    (runs,) = run_jobs(
        [Job(strategy={}, module=EveryReduction, train=partial(loader, 8), validation=validation)], 2
    )
    tokens = torch.cat([batch["input_ids"][:, 0] for batch in validation()]).float()
    for run in runs:
        assert run.metrics["largest"] == float(tokens.max())
        assert run.metrics["total"] == float(tokens.sum())
        assert run.metrics["mean"] == pytest.approx(float(tokens.mean()))
