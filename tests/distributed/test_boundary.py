"""Forward-only stages that learn from the gradient at their boundary, and the exact adjoint."""

import dataclasses
import re
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from peft import LoraConfig, get_peft_model

from lightning_hybridop import Plan, Stage, even_plan
from tests.distributed.boundary_reference import boundary_estimate
from tests.distributed.harness import run_ranks
from tests.distributed.reference import backpropagated
from tests.distributed.runs import (
    Gradients,
    Job,
    Run,
    answers_loader,
    assert_gradients_close,
    block_of,
    fit_each,
    merged_gradients,
    run_jobs,
)
from tests.tiny import TinyModule, bare_llama

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

BLOCKS = 6
# Label tokens per row, so that micro-batches of two rows have unequal weights.
ANSWERS = (1, 5, 2, 3, 8, 1, 4, 2)
TRAIN = partial(answers_loader, ANSWERS, batch_size=8)
# A power of two: eps * z is exact, so theta + eps * z has one value however it is evaluated.
EPSILON = 0.125
SEED = 3

CASES: list[dict[str, Any]] = [
    {"directions": "microbatch", "queries": 1},
    {"directions": "microbatch", "queries": 3, "difference": "central"},
    {"directions": "microbatch", "queries": 3, "difference": "antithetic"},
    {"directions": "microbatch", "queries": 5, "queries_per_forward": 2},
    {"directions": "minibatch", "queries": 3},
    {"directions": "minibatch", "queries": 3, "queries_per_forward": 3, "difference": "central"},
    {"directions": "row", "queries": 1},
    {"directions": "row", "queries": 3, "distribution": "rademacher"},
    {"directions": "row", "queries": 4, "queries_per_forward": 2, "difference": "antithetic"},
    {"directions": "row", "queries": 2, "shrinkage": True},
    {"directions": "microbatch", "queries": 2, "shrinkage": True, "distribution": "rademacher"},
    {"directions": "row", "queries": 3, "queries_per_forward": 2, "schedule": "gpipe"},
    {"directions": "microbatch", "queries": 3, "schedule": "1f1b"},
]


def job(**strategy: Any) -> Job:
    module = partial(TinyModule, learning_rate=0.0)
    estimator = {} if "plan" in strategy else {"estimator": "boundary"}
    return Job(
        strategy={"seed": SEED, "epsilon": EPSILON, **estimator, **strategy},
        module=module,
        train=TRAIN,
    )


def of_blocks(gradients: Gradients, blocks: range) -> Gradients:
    return {name: gradient for name, gradient in gradients.items() if block_of(name) in blocks}


@pytest.mark.parametrize(("stages", "zo_stages"), [(2, 1), (4, 3)])
def test_boundary_estimates_equal_the_formula_in_one_process(stages: int, zo_stages: int) -> None:
    results = run_jobs([job(zo_stages=zo_stages, **case) for case in CASES], stages)
    zo_blocks = range(even_plan(blocks=BLOCKS, stages=stages).stages[zo_stages - 1].last)
    (batch,) = TRAIN()
    loss, gradients = backpropagated(TinyModule(), batch)

    for case, runs in zip(CASES, results, strict=True):
        formula = {
            name: value for name, value in case.items() if name not in ("schedule", "queries_per_forward")
        }
        estimate = boundary_estimate(
            batch=batch, sizes=(2,) * 4, zo_blocks=zo_blocks, epsilon=EPSILON, seed=SEED, **formula
        )
        found = merged_gradients(runs)
        assert all(run.losses == [pytest.approx(loss, abs=1e-6)] for run in runs), case
        assert_gradients_close(of_blocks(found, zo_blocks), estimate, 1e-5)
        bp_blocks = range(zo_blocks.stop, BLOCKS)
        assert_gradients_close(of_blocks(found, bp_blocks), of_blocks(gradients, bp_blocks), 1e-6)


ADJOINT = [
    {"zo_stages": 1},
    {"zo_stages": 2, "schedule": "gpipe"},
    {"zo_stages": 2, "schedule": "1f1b", "micro_batches": 3},
]


def test_the_adjoint_equals_back_propagation_in_one_process() -> None:
    frozen = Plan(
        blocks=BLOCKS,
        stages=(
            Stage(first=0, last=2, role="frozen"),
            Stage(first=2, last=4, role="zo"),
            Stage(first=4, last=6),
        ),
        estimator="adjoint",
    )
    cases = [*({"estimator": "adjoint", **case} for case in ADJOINT), {"plan": frozen}]
    clipped = [dataclasses.replace(job(**case), trainer={"gradient_clip_val": 0.01}) for case in cases]
    results = run_jobs(clipped, 3)
    (batch,) = TRAIN()
    loss, gradients = backpropagated(TinyModule(), batch)

    for case, runs in zip(cases, results, strict=True):
        expected = of_blocks(gradients, range(2, 6)) if "plan" in case else gradients
        assert all(run.losses == [pytest.approx(loss, abs=1e-6)] for run in runs), case
        assert_gradients_close(merged_gradients(runs), expected, 1e-6)
        # One norm over all stages, as one process has: nothing was estimated.
        norm = sum(float(g.square().sum()) for g in expected.values()) ** 0.5
        small = {name: gradient * 0.01 / (norm + 1e-6) for name, gradient in expected.items()}
        found = {name: g for run in runs for name, g in run.clipped[0].items()}
        assert_gradients_close(found, small, 1e-6)


def test_with_dropout_both_estimators_measure_the_same_change() -> None:
    small = {"epsilon": 1e-3, "queries": 4, "zo_stages": 1}
    module = partial(TinyModule, learning_rate=0.0, dropout=0.5)
    jobs = [
        dataclasses.replace(job(**small, estimator=estimator), module=module)
        for estimator in ("loss", "boundary")
    ]
    by_loss, at_boundary = run_jobs(jobs, 2)

    # Other masks in the perturbed forwards would make differences of the loss, over eps, in the thousands.
    expected, found = by_loss[0].derivatives[0], at_boundary[0].derivatives[0]
    assert len(found) == 16
    assert found == pytest.approx(expected, rel=0.05, abs=0.05 * max(map(abs, expected)))


def test_bfloat16_stages_take_their_products_in_float32() -> None:
    plan = even_plan(blocks=BLOCKS, stages=2, zo_stages=1, estimator="boundary", queries=3)
    half = dataclasses.replace(plan.stages[0], dtype="bfloat16")
    jobs = [
        job(plan=plan, epsilon=0.25),
        job(plan=dataclasses.replace(plan, stages=(half, plan.stages[1])), epsilon=0.25),
    ]
    full, low = run_jobs(jobs, 2)

    expected = torch.tensor(full[0].derivatives[0])
    found = torch.tensor(low[0].derivatives[0])
    assert float((found - expected).norm() / expected.norm()) < 0.2


def fit_with_notices(jobs: Sequence[Job]) -> tuple[list[Run], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs = fit_each(jobs)
    return runs, [str(warning.message) for warning in caught]


class DoraModule(TinyModule):
    """A module whose adapter is more than two factors."""

    def __init__(self, **options: Any) -> None:
        super().__init__(learning_rate=0.0)
        lora = LoraConfig(r=2, target_modules=["q_proj"], use_dora=True, task_type="CAUSAL_LM")
        self.model = get_peft_model(bare_llama(), lora)


@pytest.mark.parametrize("cause", ["DoRA", "dropout"])
def test_where_groups_are_not_possible_a_notice_says_so_and_training_goes_on(cause: str) -> None:
    module = DoraModule if cause == "DoRA" else partial(TinyModule, learning_rate=0.0, dropout=0.5)
    grouped = job(zo_stages=1, queries=2, directions="row", queries_per_forward=2)
    plain = job(zo_stages=1, queries=2, directions="microbatch" if cause == "DoRA" else "row")
    jobs = [dataclasses.replace(one, module=module) for one in (grouped, plain)]
    answers = run_ranks(fit_with_notices, 2, jobs)

    first, _ = answers
    (with_groups, without), notices = first
    told = [notice for notice in notices if "LoRA" in notice or "dropout" in notice]
    assert with_groups.derivatives == without.derivatives
    rows = "is not a factor of plain LoRA on a linear layer"
    reasons = {
        "DoRA": [
            f"{rows}.*Queries run one after the other",
            f"{rows}.*Each micro-batch has its own directions",
        ],
        "dropout": ["lora_dropout.default would give each query another dropout mask"],
    }
    assert len(told) == len(reasons[cause])
    for notice, reason in zip(told, reasons[cause], strict=True):
        assert re.search(reason, notice)


def test_the_running_mean_of_exit_losses_saves_a_forward_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    options = {
        "estimator": "loss",
        "zo_stages": 1,
        "queries": 1,
        "exit_queries": 2,
        "exit_baseline": "running",
    }
    train = partial(answers_loader, ANSWERS * 3, batch_size=8)
    whole = dataclasses.replace(job(**options), train=train, module=TinyModule)
    saving = partial(_last_checkpoint, tmp_path)
    first = dataclasses.replace(
        whole, trainer={"max_steps": 2, "enable_checkpointing": True}, callbacks=saving
    )
    rest = dataclasses.replace(whole, checkpoint=str(tmp_path / "last.ckpt"))
    (at_once, _), (stopped, _), (resumed, _) = run_jobs([whole, first, rest], 2)

    assert stopped.derivatives + resumed.derivatives == at_once.derivatives


def _last_checkpoint(folder: Path) -> list[Callback]:
    return [ModelCheckpoint(folder, save_last=True, every_n_train_steps=1, enable_version_counter=False)]


def test_exits_between_the_perturbed_forwards_of_unlike_stages_end() -> None:
    # The first stage fills its gaps with exits, which the slower second one takes only behind all perturbed forwards.
    plan = Plan(
        blocks=BLOCKS,
        stages=(
            Stage(first=0, last=2, role="zo", speed=2.0),
            Stage(first=2, last=4, role="zo"),
            Stage(first=4, last=6),
        ),
        estimator="boundary",
        queries=6,
        exit_queries=1,
    )
    ((*runs,),) = run_jobs([job(plan=plan, timeout=20)], 3)

    assert len(runs[0].derivatives[0]) == 4 * 7
