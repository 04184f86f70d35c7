"""Pipelines side by side learn what one pipeline with all their micro-batches does, and what one process does."""

from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_hybridop import HybridOPStrategy
from tests.distributed.harness import run_ranks
from tests.distributed.reference import backpropagated
from tests.distributed.runs import (
    Batch,
    Job,
    Run,
    SgdModule,
    answers_loader,
    assert_gradients_close,
    block_of,
    fit,
    quiet_trainer,
)
from tests.tiny import TinyModule, loader

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]


class Noting(SgdModule):
    """Logs in several ways, and reads what its steps return."""

    def __init__(self, **options: Any) -> None:
        super().__init__(learning_rate=0.05, **options)
        self.read: list[Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:  # type: ignore[override]
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        self.log("largest", loss, reduce_fx="max", on_step=True)
        self.log("first_token", batch["input_ids"][:, 0].float().mean(), batch_size=len(batch["input_ids"]))
        return {"loss": loss, "tokens": batch["input_ids"][:, :2], "mean": loss.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.read += [outputs["tokens"].clone(), torch.as_tensor(outputs["mean"])]

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        written_BT: Tensor = self.model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=3,
            do_sample=False,
        )
        return written_BT


class Note(Callback):
    """Keeps what a rank holds at the end of training, before the stages tell each other."""

    own: ClassVar[list[dict[str, Tensor]]] = []
    read: ClassVar[list[list[Tensor]]] = []

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        strategy: Any = trainer.strategy
        owned = strategy._assembly.owned[strategy.stage_index]
        self.own.append({name: parameter.detach().clone() for name, parameter in owned.items()})
        self.read.append(list(getattr(pl_module, "read", ())))

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if self.folder is not None and trainer.global_step == 2:
            trainer.save_checkpoint(f"{self.folder}/replicas.ckpt")


# Of 11 rows with 4 in a mini-batch the last one has 3. With 6 the second one has 5, and of 7 the last one has 1.
LOSS = {"estimator": "loss", "queries": 2, "exit_queries": 1, "epsilon": 0.01}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Any, dict[str, Any]]] = {
    # options of the strategy, of the model, the loader, options of the Trainer
    "loss": ({**LOSS, "exit_baseline": "running"}, {"dropout": 0.2}, partial(loader, 11, batch_size=4), {}),
    "central": ({**LOSS, "difference": "central"}, {}, partial(loader, 8), {}),
    "shared directions": ({**LOSS, "directions": "minibatch"}, {}, partial(loader, 8), {}),
    "rows": (
        {
            "estimator": "boundary",
            "queries": 3,
            "queries_per_forward": 2,
            "directions": "row",
            "epsilon": 0.01,
        },
        {},
        partial(loader, 10),
        {"gradient_clip_val": 0.3},
    ),
    "boundary": (
        {"estimator": "boundary", "queries": 2, "exit_queries": 1, "epsilon": 0.01, "wire": "bfloat16"},
        {},
        partial(loader, 7, batch_size=6),
        {},
    ),
    "adjoint": ({"estimator": "adjoint"}, {"dropout": 0.2}, partial(loader, 16), {}),
    "answers": (
        {"estimator": "loss", "queries": 1, "epsilon": 0.01, "schedule": "gpipe"},
        {},
        partial(answers_loader, [1, 8, 1, 1, 3, 1, 1, 5, 2, 1, 1], batch_size=3),
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    ),
}


def job_of(case: str, *, replicas: int) -> Job:
    options, model, train, trainer = CASES[case]
    micro_batches = 2 * (2 // replicas)
    return Job(
        strategy={"zo_stages": 1, "seed": 3, **options, "replicas": replicas, "micro_batches": micro_batches},
        module=partial(Noting, **model),
        train=train,
        validation=partial(loader, 5, batch_size=3),
        trainer={"num_sanity_val_steps": 1, **trainer},
        callbacks=lambda: [Note()],
    )


def fit_all(replicas: int, folder: str) -> dict[str, Any]:
    runs = {case: fit(job_of(case, replicas=replicas)) for case in CASES}
    own, read = list(Note.own), list(Note.read)
    strategy = HybridOPStrategy(zo_stages=1, replicas=replicas, micro_batches=2)
    written = quiet_trainer(strategy, devices=2 * replicas).predict(Noting(), loader(6))
    micro_batches = 2 * (2 // replicas)
    saved = Job(
        strategy={"zo_stages": 1, "seed": 3, "replicas": replicas, "micro_batches": micro_batches},
        train=partial(loader, 32),
        trainer={"max_steps": 2},
        callbacks=lambda: [Note(folder if replicas > 1 else None)],
    )
    straight = Job(strategy=saved.strategy, train=saved.train, trainer={"max_steps": 4})
    ends = [fit(saved)] if replicas > 1 else [fit(straight)]
    return {"runs": runs, "own": own, "read": read, "written": written, "ends": ends}


def resume(folder: str) -> Run:
    return fit(
        Job(
            strategy={"zo_stages": 1, "seed": 3, "micro_batches": 4},
            train=partial(loader, 32),
            trainer={"max_steps": 4},
            checkpoint=f"{folder}/replicas.ckpt",
        )
    )


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[Any], Path]:
    folder = tmp_path_factory.mktemp("replicas")
    return run_ranks(fit_all, 4, 2, str(folder)), run_ranks(fit_all, 2, 1, str(folder)), folder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_replicas_learn_what_one_pipeline_with_all_their_micro_batches_does(case: str, both: Any) -> None:
    replicas, pipeline, _ = both
    number = list(CASES).index(case)
    for rank, results in enumerate(replicas):
        run, other = results["runs"][case], pipeline[rank % 2]["runs"][case]
        assert run.stage == other.stage == rank % 2
        assert run.global_step == other.global_step > 0
        assert run.losses == pytest.approx(other.losses, abs=1e-6)
        # Later steps start from parameters that differ in their last digit, and so do losses, which epsilon divides.
        for step, (found, expected) in enumerate(zip(run.derivatives, other.derivatives, strict=True)):
            assert found == pytest.approx(expected, abs=1e-6 if step == 0 else 1e-4)
        for found_each, expected_each in ((run.gradients, other.gradients), (run.clipped, other.clipped)):
            for step, (ours, theirs) in enumerate(zip(found_each, expected_each, strict=True)):
                assert_gradients_close(ours, theirs, 1e-6 if step == 0 else 1e-4)
        assert run.metrics == pytest.approx(other.metrics, abs=1e-5)
        read, expected = results["read"][number], pipeline[rank % 2]["read"][number]
        assert len(read) == len(expected) > 0
        for ours, theirs in zip(read, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0.0)


@pytest.mark.slow
def test_replicas_hold_the_same_adapters_bit_for_bit(both: Any) -> None:
    replicas, _, _ = both
    for rank in (0, 1):
        for ours, theirs in zip(replicas[rank]["own"], replicas[rank + 2]["own"], strict=True):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_a_stage_of_replicas_has_the_gradient_of_one_process(both: Any) -> None:
    replicas, _, _ = both
    _, gradients = backpropagated(TinyModule(), next(iter(loader(8))))
    for rank in (1, 3):
        own = replicas[rank]["runs"]["central"].gradients[0]
        assert_gradients_close(own, {n: g for n, g in gradients.items() if block_of(n) >= 3}, 1e-6)


@pytest.mark.slow
def test_replicas_write_what_one_process_writes(both: Any) -> None:
    replicas, _, _ = both
    (batch,) = list(loader(6))
    written_BT = Noting().predict_step(batch, 0)
    for results in replicas:
        assert torch.equal(results["written"][0], written_BT)


@pytest.mark.slow
def test_one_pipeline_goes_on_from_the_checkpoint_of_replicas(both: Any) -> None:
    replicas, pipeline, folder = both
    straight = pipeline[0]["ends"][0]
    first = replicas[0]["ends"][0]
    for run in run_ranks(resume, 2, str(folder)):
        assert [*first.losses, *run.losses] == pytest.approx(straight.losses, abs=2e-4)
        assert_gradients_close(run.parameters, straight.parameters, 2e-3)


def one_stage_each() -> Run:
    return fit(
        Job(
            strategy={"stages": 1, "zo_stages": 0, "replicas": 2, "micro_batches": 1},
            module=SgdModule,
            train=partial(loader, 9, batch_size=5),
            validation=partial(loader, 5),
        )
    )


def test_replicas_of_one_stage_share_the_rows_of_a_mini_batch() -> None:
    batches = list(loader(9, batch_size=5))
    module = SgdModule()
    losses = []
    for batch in batches:
        loss, gradients = backpropagated(module, batch)
        losses.append(loss)
        if len(losses) == 1:
            first = gradients
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name in gradients:
                    parameter -= module.learning_rate * gradients[name]
    with torch.no_grad():
        validated = float(module.model(**next(iter(loader(5)))).loss)
    for run in run_ranks(one_stage_each, 2):
        assert run.losses == pytest.approx(losses, abs=1e-6)
        assert_gradients_close(run.gradients[0], first, 1e-6)
        assert run.metrics["val_loss"] == pytest.approx(validated, abs=1e-6)
