"""Stages whose blocks an inference runtime runs, in a pipeline with stages on torch."""

import importlib.util
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hybridop import Plan, Stage
from tests.distributed.harness import RankError, run_ranks
from tests.distributed.runs import (
    Job,
    Run,
    answers_loader,
    assert_gradients_close,
    fit_each,
    merged_gradients,
)
from tests.tiny import TinyModule

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("openvino") is None or importlib.util.find_spec("onnxruntime") is None,
        reason="needs the extras openvino and onnx",
    ),
]

BLOCKS, STEPS = 6, 20
TRAIN = partial(answers_loader, (1, 5, 2, 3, 8, 1, 4, 2), batch_size=4)


def plan(executor: str, **options: Any) -> Plan:
    zo = Stage(first=0, last=3, role="zo", executor=executor)  # type: ignore[arg-type]
    return Plan(blocks=BLOCKS, stages=(zo, Stage(first=3, last=BLOCKS)), **{"micro_batches": 2, **options})


def fit_with_cache(folder: str, jobs: Sequence[Job]) -> list[Run]:
    os.environ["HYBRIDOP_CACHE"] = folder
    return fit_each(jobs)


def run_jobs(folder: Path, jobs: Sequence[Job]) -> list[Run]:
    """Return what rank 0, the zo stage, has after each job."""
    runs: list[Run] = run_ranks(fit_with_cache, 2, str(folder), list(jobs), timeout=240.0)[0]
    return runs


def test_the_adjoint_on_a_runtime_gives_the_loss_curve_of_one_process(tmp_path: Path) -> None:
    module = partial(TinyModule, learning_rate=0.05)
    options = {"module": module, "train": TRAIN, "trainer": {"max_steps": STEPS, "max_epochs": -1}}
    jobs = [
        Job(strategy={"plan": plan(executor, estimator="adjoint")}, **options)
        for executor in ("openvino", "onnxruntime")
    ]

    (alone,) = run_ranks(fit_each, 1, [Job(strategy={"stages": 1}, **options)])[0]
    for run in run_jobs(tmp_path, jobs):
        assert len(run.losses) == STEPS
        assert run.losses == pytest.approx(alone.losses, abs=1e-4)
        for name, value in run.parameters.items():
            torch.testing.assert_close(value, alone.parameters[name], atol=1e-3, rtol=1e-3)
    # A curve, not a line: the first of the two mini-batches, at both ends.
    assert alone.losses[-2] < alone.losses[0] - 0.1


ESTIMATES: list[dict[str, Any]] = [
    {"estimator": "loss", "queries": 2, "exit_queries": 1},
    {"estimator": "boundary", "queries": 3},
    {"estimator": "boundary", "queries": 3, "queries_per_forward": 2},
]


def test_estimates_on_a_runtime_are_those_on_torch(tmp_path: Path) -> None:
    module = partial(TinyModule, learning_rate=0.0)
    cases = [*({"options": one} for one in ESTIMATES), {"options": ESTIMATES[1], "directions": "row"}]
    jobs = [
        Job(
            strategy={
                "plan": plan(executor, **case["options"]),
                "epsilon": 0.125,
                "directions": case.get("directions", "microbatch"),
            },
            module=module,
            train=TRAIN,
        )
        for case in cases
        for executor in ("torch", "openvino")
    ]
    runs = run_jobs(tmp_path, jobs)

    for on_torch, on_runtime in zip(runs[::2], runs[1::2], strict=True):
        assert on_runtime.losses == pytest.approx(on_torch.losses, abs=1e-5)
        assert_gradients_close(merged_gradients([on_runtime]), merged_gradients([on_torch]), 1e-4)


def test_dropout_on_a_runtime_is_refused_before_training(tmp_path: Path) -> None:
    job = Job(strategy={"plan": plan("openvino")}, module=partial(TinyModule, dropout=0.1), train=TRAIN)

    with pytest.raises(RankError, match=r"lora_dropout.*of block 0 drops values at random") as caught:
        run_jobs(tmp_path, [job])
    assert "set that dropout to 0" in str(caught.value)
