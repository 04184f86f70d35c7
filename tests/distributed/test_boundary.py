"""Forward-only stages that learn from the gradient at their boundary, and the exact adjoint."""

import dataclasses
from functools import partial
from typing import Any

import pytest

from lightning_hybridop import Plan, Stage, even_plan
from tests.distributed.boundary_reference import boundary_estimate
from tests.distributed.reference import backpropagated
from tests.distributed.runs import (
    Gradients,
    Job,
    answers_loader,
    assert_gradients_close,
    block_of,
    merged_gradients,
    run_jobs,
)
from tests.tiny import TinyModule

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
    return Job(
        strategy={"seed": SEED, "epsilon": EPSILON, "estimator": "boundary", **strategy},
        module=module,
        train=TRAIN,
    )


def of_blocks(gradients: Gradients, blocks: range) -> Gradients:
    return {name: gradient for name, gradient in gradients.items() if block_of(name) in blocks}


@pytest.mark.parametrize(("stages", "zo_stages"), [(2, 1), (4, 2), (4, 3)])
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
