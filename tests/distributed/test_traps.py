"""The traps that have caught other pipelines: numbers 1 to 10 of the design, each with real processes."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hybridop import HybridOPStrategy, Plan, PlanError, even_plan, load_plan, save_plan
from lightning_hybridop.estimation.directions import DirectionKey
from tests.distributed.harness import RankError, run_ranks
from tests.distributed.reference import backpropagated, estimated, loss, moved_loss
from tests.distributed.runs import (
    DifferentLengths,
    Gradients,
    Job,
    SgdModule,
    answers_loader,
    assert_gradients_close,
    block_of,
    fit,
    lengths_loader,
    merged_gradients,
    pad,
    run_jobs,
    trainer_for,
)
from tests.tiny import TinyModule, loader

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

STILL = partial(TinyModule, learning_rate=0.0)


# 1. Gradient accumulation and micro-batches.

ACCUMULATIONS = ((1, 4), (2, 2), (4, 1))


def test_accumulation_and_micro_batches_give_the_same_gradients_on_every_stage() -> None:
    jobs = [
        Job(
            strategy={"zo_stages": zo_stages, "micro_batches": micro_batches, "seed": 4, "epsilon": 0.125},
            module=STILL,
            train=partial(loader, 8, batch_size=8 // batches),
            trainer={"accumulate_grad_batches": batches},
        )
        for zo_stages in (0, 2)
        for batches, micro_batches in ACCUMULATIONS
    ]
    results = run_jobs(jobs, 4)
    _, expected = backpropagated(TinyModule(), next(iter(loader(8))))

    for runs in results[:3]:
        assert [len(run.gradients) for run in runs] == [1] * 4  # one optimizer step
        assert_gradients_close(merged_gradients(runs), expected, 1e-6)
    zo_blocks = range(4)
    for (batches, micro_batches), runs in zip(ACCUMULATIONS, results[3:], strict=True):
        found = merged_gradients(runs)
        assert_gradients_close(
            {name: g for name, g in found.items() if block_of(name) >= 4},
            {name: g for name, g in expected.items() if block_of(name) >= 4},
            1e-6,
        )
        # Each mini-batch draws directions of its own, so zo gradients differ between the three; each is the mean of
        # its mini-batches' estimates.
        parts = [
            estimated(
                batch=batch,
                sizes=(2,) * micro_batches,
                zo_blocks=zo_blocks,
                step=step,
                queries=1,
                epsilon=0.125,
                seed=4,
            )
            for step, batch in enumerate(loader(8, batch_size=8 // batches))
        ]
        mean: Gradients = {name: sum(part[name] for part in parts) / batches for name in parts[0]}  # type: ignore[misc]
        assert_gradients_close({name: g for name, g in found.items() if block_of(name) < 4}, mean, 1e-5)


# 2. Answers of different lengths.


def test_rows_with_1_1_1_and_30_label_tokens_give_one_loss_for_any_number_of_micro_batches() -> None:
    train = partial(answers_loader, (1, 1, 1, 30), batch_size=4, length=40)
    epsilon = 0.0625
    counts = (1, 2, 4)
    jobs = [
        Job(
            strategy={
                "zo_stages": 1,
                "micro_batches": count,
                "queries": 2,
                "directions": "minibatch",  # the same z for any number of micro-batches
                "epsilon": epsilon,
                "seed": 6,
            },
            module=STILL,
            train=train,
        )
        for count in counts
    ]
    (batch,) = train()
    module = TinyModule()
    whole = loss(module, batch)
    names = [name for name, p in module.named_parameters() if p.requires_grad and block_of(name) < 3]
    moved = [
        moved_loss(module, names, batch, DirectionKey(seed=6, step=0, micro_batch=None, query=query), epsilon)
        for query in range(2)
    ]

    for runs in run_jobs(jobs, 2):
        for run in runs:
            assert run.losses == pytest.approx([whole], abs=1e-6)
            losses = [run.losses[0] + epsilon * g for g in run.derivatives[0]]
            assert losses == pytest.approx(moved, abs=1e-6)
    assert abs(moved[0] - whole) > 1e-4  # else the perturbed losses would show nothing


# 3. A last batch of fewer rows.


class CountsRows(TinyModule):
    def __init__(self) -> None:
        super().__init__(learning_rate=0.0)
        self.rows = torchmetrics.SumMetric()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.rows(len(batch["input_ids"]))
        self.log("rows", self.rows)


def test_a_last_batch_of_fewer_rows_neither_hangs_nor_loses_rows() -> None:
    ten_rows = partial(loader, 10, batch_size=4)
    jobs = [
        Job(
            strategy={"zo_stages": zo_stages, "micro_batches": 4},
            module=CountsRows,
            train=ten_rows,
            validation=ten_rows,
        )
        for zo_stages in (0, 1)
    ]
    module = TinyModule()
    batches = list(ten_rows())
    losses = [loss(module, batch) for batch in batches]
    validation_loss = sum(value * len(b["input_ids"]) for value, b in zip(losses, batches, strict=True)) / 10

    assert [len(batch["input_ids"]) for batch in batches] == [4, 4, 2]
    for runs in run_jobs(jobs, 3):
        for run in runs:
            assert run.losses == pytest.approx(losses, abs=1e-6)
            assert run.metrics["rows"] == 10
            assert run.metrics["val_loss"] == pytest.approx(validation_loss, abs=1e-6)


# 4. Any number of micro-batches.


def test_one_to_five_micro_batches_on_four_stages() -> None:
    jobs = [
        Job(strategy={"zo_stages": zo_stages, "micro_batches": count}, module=STILL, train=partial(loader, 8))
        for count in range(1, 6)
        for zo_stages in (0, 2)
    ]
    expected, _ = backpropagated(TinyModule(), next(iter(loader(8))))

    for job, runs in zip(jobs, run_jobs(jobs, 4), strict=True):
        for run in runs:
            assert run.losses == pytest.approx([expected], abs=1e-6)
            if job.strategy["zo_stages"]:
                assert len(run.derivatives[0]) == job.strategy["micro_batches"]


# 5. Other lengths in every batch.


def test_lengths_of_5_to_200_give_the_losses_of_one_process_for_30_steps() -> None:
    train = partial(lengths_loader, 120, batch_size=4)
    (runs,) = run_jobs([Job(strategy={"micro_batches": 4}, train=train)], 4)

    module = TinyModule()
    optimizer = module.configure_optimizers()
    expected = []
    widths = set()
    for batch in train():
        widths.add(batch["input_ids"].shape[1])
        value, _ = backpropagated(module, batch)
        optimizer.step()
        expected.append(value)
    assert len(expected) == 30
    assert len(widths) > 15
    for run in runs:
        assert run.losses == pytest.approx(expected, abs=2e-5)


# 6. Labels travel with their micro-batch.


class ChecksRows(TinyModule):
    """Every stage checks the rows that it is given, perturbed and validation passes included."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self._check(batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._check(batch)
        super().validation_step(batch, batch_idx)

    def _check(self, batch: dict[str, Tensor]) -> None:
        labelled = batch["labels"] != -100
        assert labelled.any()
        assert batch["labels"][labelled].equal(batch["input_ids"][labelled])


def test_labels_travel_with_their_micro_batch_under_a_prefetching_loader() -> None:
    answers = [1 + row % 7 for row in range(24)]
    rows = partial(answers_loader, answers, batch_size=6, workers=2)
    module = partial(ChecksRows, learning_rate=0.0)
    strategy = {"zo_stages": 1, "micro_batches": 3}
    (runs,) = run_jobs([Job(strategy=strategy, module=module, train=rows, validation=rows)], 2)

    reference = TinyModule()
    expected = [loss(reference, batch) for batch in answers_loader(answers, batch_size=6)]
    for run in runs:
        assert run.losses == pytest.approx(expected, abs=1e-6)
        assert run.metrics["val_loss"] == pytest.approx(sum(expected) / 4, abs=1e-6)


# 7. Splits that do not come out even.


def _calls_of_blocks(plan: Plan) -> tuple[list[int], float]:
    """Return which blocks this rank ran in one step of one micro-batch."""
    module = TinyModule(blocks=30, learning_rate=0.0)
    layers = module.model.get_base_model().model.layers
    calls: list[int] = []
    for index, block in enumerate(layers):
        block.register_forward_hook(lambda *_, index=index: calls.append(index))

    class Forget(Callback):
        def on_train_start(self, *_: Any) -> None:
            calls.clear()

    strategy = HybridOPStrategy(plan)
    trainer_for(strategy, callbacks=[Forget()]).fit(module, loader(2, batch_size=2))
    assert strategy.last_result is not None
    return calls, strategy.last_result.loss


@pytest.mark.parametrize("stages", [4, 7])
def test_thirty_blocks_on_stages_of_unequal_size_run_once_each(stages: int) -> None:
    plan = even_plan(blocks=30, stages=stages, micro_batches=1)
    answers = run_ranks(_calls_of_blocks, stages, plan)

    assert len({stage.last - stage.first for stage in plan.stages}) == 2
    assert [block for calls, _ in answers for block in calls] == list(range(30))
    expected = loss(TinyModule(blocks=30), next(iter(loader(2, batch_size=2))))
    assert [found for _, found in answers] == pytest.approx([expected] * stages, abs=1e-6)


def _fit_thirty_blocks(plan: Plan) -> None:
    fit(Job(strategy={"plan": plan}, module=partial(TinyModule, blocks=30), train=partial(loader, 8)))


def test_a_split_of_29_blocks_is_refused_by_the_name_of_the_missing_one(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    save_plan(even_plan(blocks=30, stages=4), path)
    text = path.read_text(encoding="utf-8")
    assert "last: 30" in text
    path.write_text(text.replace("last: 30", "last: 29"), encoding="utf-8")
    with pytest.raises(PlanError, match="block 29 is in no stage"):
        load_plan(path)

    # A plan that is sound in itself, but made for another model.
    with pytest.raises(
        RankError, match=r"The plan is for 29 blocks, but .*layers has 30, so block 29 is in no stage"
    ):
        run_ranks(_fit_thirty_blocks, 2, even_plan(blocks=29, stages=2))


# 8. Stages without anything to train.

LAST_TWO = partial(TinyModule, layers=[4, 5])


def _fit_in_two_parts(zo_stages: int, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Return the parameters after two epochs, after one and a resumed one, and the names in the checkpoint."""
    strategy = {"zo_stages": zo_stages, "micro_batches": 2}
    train = partial(loader, 16, shuffle=True)
    straight = fit(Job(strategy=strategy, module=LAST_TWO, train=train, trainer={"max_epochs": 2}))
    fit(
        Job(
            strategy=strategy,
            module=LAST_TWO,
            train=train,
            trainer={"max_epochs": 1, "enable_checkpointing": True},
            callbacks=lambda: [ModelCheckpoint(dirpath=folder, filename="first")],
        )
    )
    resumed = fit(
        Job(
            strategy=strategy,
            module=LAST_TWO,
            train=train,
            trainer={"max_epochs": 2},
            checkpoint=str(folder / "first.ckpt"),
        )
    )
    assert straight.global_step == resumed.global_step == 4
    saved = torch.load(folder / "first.ckpt", weights_only=True)
    return straight.parameters, resumed.parameters, sorted(saved["state_dict"])


def _fit_in_two_parts_each(folder: Path) -> list[tuple[dict[str, Tensor], dict[str, Tensor], list[str]]]:
    return [_fit_in_two_parts(zo_stages, folder / str(zo_stages)) for zo_stages in (0, 1, 2)]


def test_stages_without_trainable_parameters_fit_save_and_resume(tmp_path: Path) -> None:
    names = sorted(name for name, p in LAST_TWO().named_parameters() if p.requires_grad)
    before = dict(LAST_TWO().named_parameters())
    for answers in run_ranks(_fit_in_two_parts_each, 3, tmp_path):
        for straight, resumed, saved in answers:
            assert saved == sorted(straight) == names
            assert {block_of(name) for name in saved} == {4, 5}
            for name in names:
                assert resumed[name].equal(straight[name])
                assert not straight[name].equal(before[name])


# 9. Padding.


class Logits(TinyModule):
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


def _padded(side: str) -> DataLoader[dict[str, Tensor]]:
    return lengths_loader(8, batch_size=4, side=side)


def _padded_logits(side: str, zo_stages: int) -> tuple[list[float], list[Tensor]]:
    run = fit(Job(strategy={"zo_stages": zo_stages}, module=STILL, train=partial(_padded, side)))
    strategy = HybridOPStrategy(zo_stages=zo_stages)
    return run.losses, trainer_for(strategy).predict(Logits(), _padded(side))


def _padded_logits_each(cases: Sequence[tuple[str, int]]) -> list[tuple[list[float], list[Tensor]]]:
    return [_padded_logits(*case) for case in cases]


def test_left_and_right_padding_give_the_unsplit_models_logits() -> None:
    cases = [(side, zo_stages) for side in ("left", "right") for zo_stages in (0, 1)]
    module = Logits()
    for answers in run_ranks(_padded_logits_each, 3, cases):
        for (side, _), (losses, logits) in zip(cases, answers, strict=True):
            batches = list(_padded(side))
            assert losses == pytest.approx([loss(module, batch) for batch in batches], abs=1e-6)
            for found, batch in zip(logits, batches, strict=True):
                with torch.no_grad():
                    expected = module.predict_step(batch, 0)
                real = batch["attention_mask"].bool()
                assert not real.all()
                torch.testing.assert_close(found[real], expected[real], atol=1e-6, rtol=1e-6)
    short, long = DifferentLengths(8)[0], DifferentLengths(8)[1]
    assert not pad([short, long], side="left")["input_ids"].equal(pad([short, long])["input_ids"])


# 10. Tied embeddings.


class Tied(SgdModule):
    def __init__(self, *, trainable: bool) -> None:
        super().__init__()
        llama = self.model.get_base_model()
        llama.lm_head.weight = llama.get_input_embeddings().weight
        llama.lm_head.weight.requires_grad_(trainable)


def test_tied_embeddings_work_while_frozen() -> None:
    module = partial(Tied, trainable=False)
    jobs = [
        Job(strategy={"zo_stages": zo_stages}, module=module, train=partial(loader, 8))
        for zo_stages in (0, 1)
    ]
    expected, gradients = backpropagated(module(), next(iter(loader(8))))
    untied, _ = backpropagated(TinyModule(), next(iter(loader(8))))
    assert expected != pytest.approx(untied, abs=1e-4)

    all_bp, mixed = run_jobs(jobs, 3)
    for run in (*all_bp, *mixed):
        assert run.losses == pytest.approx([expected], abs=1e-6)
    assert_gradients_close(merged_gradients(all_bp), gradients, 1e-6)
    assert_gradients_close(
        merged_gradients(mixed[1:]), {name: g for name, g in gradients.items() if block_of(name) >= 2}, 1e-6
    )


def test_tied_embeddings_are_refused_while_trainable() -> None:
    with pytest.raises(RankError) as caught:
        run_jobs([Job(strategy={}, module=partial(Tied, trainable=True), train=partial(loader, 8))], 2)
    message = "are one trainable tensor, which two stages cannot both update; freeze it"
    assert str(caught.value).count(message) >= 2  # on both ranks
    assert "embed_tokens" in str(caught.value)
