"""A pipeline learns what one process with the unsplit model would."""

import dataclasses
from functools import partial
from typing import Any

import pytest

from lightning_hybridop import Plan, Stage, even_plan
from tests.distributed.reference import backpropagated, estimated
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
ANSWERS = (1, 5, 2, 3, 8, 1, 4, 2, 3, 3, 7, 1, 1, 2, 6, 5)
TRAIN = partial(answers_loader, ANSWERS, batch_size=8)
# A power of two: eps * z is exact, so theta + eps * z has one value however it is evaluated.
EPSILON = 0.125
SEED = 3


def job(**strategy: Any) -> Job:
    # A learning rate of 0: the second mini-batch is a second trial, with other data and other directions.
    module = partial(TinyModule, learning_rate=0.0)
    return Job(strategy={"seed": SEED, "epsilon": EPSILON, **strategy}, module=module, train=TRAIN)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_back_propagated_gradients_equal_those_of_the_whole_mini_batch(stages: int) -> None:
    schedules = ("hybridop", "gpipe", "1f1b")
    results = run_jobs([job(schedule=schedule) for schedule in schedules], stages)

    for schedule, runs in zip(schedules, results, strict=True):
        for step, batch in enumerate(TRAIN()):
            loss, gradients = backpropagated(TinyModule(), batch)
            for run in runs:
                assert run.losses[step] == pytest.approx(loss, abs=1e-6), (schedule, run.stage)
            assert_gradients_close(merged_gradients(runs, step), gradients, 1e-6)


LAYOUTS = {
    "2 zo + 2 bp": (4, 2),
    "1 zo + 1 bp": (2, 1),
    "all zo": (2, 2),
}
LOSS_DIFFERENCES: list[dict[str, Any]] = [
    {"directions": directions, "difference": difference, "queries": queries}
    for directions in ("microbatch", "minibatch")
    for difference in ("forward", "central")
    for queries in (1, 3)
]
OTHER_SCHEDULES: list[dict[str, Any]] = [
    {"queries": 2, "exit_queries": 1, "schedule": schedule} for schedule in ("gpipe", "1f1b")
]
EARLY_EXITS: list[dict[str, Any]] = [
    {"queries": 1, "exit_queries": 2, "exit_baseline": "exit"},
    {"queries": 1, "exit_queries": 2, "exit_baseline": "full"},
    {"queries": 0, "exit_queries": 2, "exit_baseline": "exit"},
    {"queries": 0, "exit_queries": 1, "exit_baseline": "full"},
    {"queries": 1, "exit_queries": 1, "exit_baseline": "exit", "directions": "minibatch"},
    {"queries": 1, "exit_queries": 1, "exit_baseline": "full", "directions": "minibatch"},
    {"queries": 1, "exit_queries": 1, "difference": "central"},
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_estimated_gradients_equal_the_formula_in_one_process(layout: str) -> None:
    stages, zo_stages = LAYOUTS[layout]
    cases = [*LOSS_DIFFERENCES, *OTHER_SCHEDULES, *EARLY_EXITS]
    # The second epoch has the same rows and other directions; one layout shows it.
    epochs = 2 if layout == "2 zo + 2 bp" else 1
    train = partial(answers_loader, ANSWERS[:8], batch_size=8)
    (batch,) = train()
    limited = [
        dataclasses.replace(job(zo_stages=zo_stages, **case), train=train, trainer={"max_epochs": epochs})
        for case in cases
    ]
    results = run_jobs(limited, stages)
    zo_blocks = range(even_plan(blocks=BLOCKS, stages=stages).stages[zo_stages - 1].last)

    for case, runs in zip(cases, results, strict=True):
        formula = {name: value for name, value in case.items() if name != "schedule"}
        for step in range(epochs):
            loss, gradients = backpropagated(TinyModule(), batch)
            found = merged_gradients(runs, step)
            estimate = estimated(
                batch=batch,
                sizes=(2,) * 4,
                zo_blocks=zo_blocks,
                step=step,
                epsilon=EPSILON,
                seed=SEED,
                **formula,
            )
            assert all(run.losses[step] == pytest.approx(loss, abs=1e-6) for run in runs), case
            assert_gradients_close(_in(found, zo_blocks), estimate, 1e-5)
            bp_blocks = range(zo_blocks.stop, BLOCKS)
            assert_gradients_close(_in(found, bp_blocks), _in(gradients, bp_blocks), 1e-6)


def test_no_queries_leave_the_zo_stages_as_they_are() -> None:
    (runs,) = run_jobs([dataclasses.replace(job(zo_stages=1, queries=0), module=TinyModule)], 2)

    before = dict(TinyModule().named_parameters())
    assert runs[0].gradients == [{}, {}]
    for name, value in runs[0].parameters.items():
        assert value.equal(before[name]) == (block_of(name) < 3), name


def test_a_frozen_stage_learns_nothing_and_moves_along_no_direction() -> None:
    stages = (
        Stage(first=0, last=2, role="frozen"),
        Stage(first=2, last=4, role="zo"),
        Stage(first=4, last=6),
    )
    plan = Plan(blocks=BLOCKS, stages=stages, queries=2, exit_queries=1)
    ((*runs,), learning) = run_jobs(
        [job(plan=plan), dataclasses.replace(job(plan=plan), module=TinyModule)], 3
    )

    batch = next(iter(TRAIN()))
    found = merged_gradients(runs)
    assert runs[0].gradients[0] == {}
    expected = estimated(
        batch=batch,
        sizes=(2,) * 4,
        zo_blocks=range(2, 4),
        queries=2,
        exit_queries=1,
        epsilon=EPSILON,
        seed=SEED,
    )
    assert_gradients_close(_in(found, range(2, 4)), expected, 1e-5)
    assert_gradients_close(
        _in(found, range(4, 6)), _in(backpropagated(TinyModule(), batch)[1], range(4, 6)), 1e-6
    )
    before = dict(TinyModule().named_parameters())
    for name, value in learning[0].parameters.items():
        assert value.equal(before[name]) == (block_of(name) < 2), name


def _in(gradients: Gradients, blocks: range) -> Gradients:
    return {name: value for name, value in gradients.items() if block_of(name) in blocks}
