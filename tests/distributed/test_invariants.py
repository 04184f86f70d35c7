"""What must hold whatever the data: parameters are put back exactly, z is replayed exactly, noise is not signal."""

import hashlib
import math
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_hybridop import HybridOPStrategy, Plan, Stage
from lightning_hybridop.estimation.directions import DirectionKey, direction
from tests.distributed.harness import run_ranks
from tests.distributed.runs import Job, Run, SgdModule, fit, run_jobs, trainer_for
from tests.tiny import TinyModule, loader

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]


# Parameters are put back exactly.

STEPS = 300
STILL = partial(TinyModule, blocks=2, learning_rate=0.0)
BFLOAT16_STAGE = Stage(first=0, last=1, role="zo", dtype="bfloat16")


def _stand_still() -> list[tuple[list[str], int, int]]:
    """Return, for each kind of arithmetic: the parameters that changed, the steps, how many estimates were not 0."""
    jobs: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
        (STEPS, {"zo_stages": 1, "micro_batches": 1}, {}),
        (STEPS, {"zo_stages": 1, "micro_batches": 1}, {"precision": "bf16-true"}),
        # Frozen weights in bfloat16, adapters in float32.
        (30, {"plan": Plan(blocks=2, stages=(BFLOAT16_STAGE, Stage(first=1, last=2)), micro_batches=2)}, {}),
    ]
    found = []
    for steps, strategy, trainer in jobs:
        train = partial(loader, 2 * steps, batch_size=2, length=4)
        run = fit(Job(strategy=strategy, module=STILL, train=train, trainer=trainer))
        before = {name: p for name, p in STILL().named_parameters() if p.requires_grad}
        assert run.parameters.keys() == before.keys()
        assert run.global_step == steps
        changed = [
            name for name, value in run.parameters.items() if not value.equal(before[name].to(value.dtype))
        ]
        estimated = sum(any(g != 0.0 for g in derivatives) for derivatives in run.derivatives)
        found.append((changed, steps, estimated))
    return found


def test_a_learning_rate_of_0_leaves_parameters_bitwise_equal() -> None:
    for found in run_ranks(_stand_still, 2):
        for changed, steps, estimated in found:
            assert changed == []
            assert estimated > 0.9 * steps  # so parameters have been away and came back


# The z that perturbed is the z that is replayed.

QUERIES = 4


def _bytes(parameters: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(parameters):
        digest.update(name.encode() + parameters[name].detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


class OneLossPerStep(SgdModule):
    """Step k has a loss of 1 for query k and of 0 otherwise, so its gradient is z of that query, divided by Q.

    The parameters are 0 and epsilon is 1: while perturbed, they are z themselves.
    """

    def __init__(self) -> None:
        super().__init__(learning_rate=0.0, blocks=4)
        # Perturbed passes leave no trace in other attributes than those whose name begins with an underscore.
        self._calls = 0
        self._seen: list[str] = []
        for parameter in self.parameters():
            if parameter.requires_grad:
                torch.nn.init.zeros_(parameter)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        own = {name: p for name, p in self.named_parameters() if p.requires_grad}
        if self.trainer.strategy.stage_index == 0:  # type: ignore[attr-defined]
            first = {name: p for name, p in own.items() if ".layers.0." in name or ".layers.1." in name}
            if all(p.any() for p in first.values()):
                self._seen.append(_bytes(first))
        loss = self.model(**batch).loss
        # Only the last stage gets here: the base forward first, then the queries in order.
        query = self._calls % (1 + QUERIES) - 1
        self._calls += 1
        return loss * 0.0 + float(query == batch_idx)


def _perturbed_and_replayed() -> tuple[list[str], list[str]]:
    strategy = HybridOPStrategy(zo_stages=1, micro_batches=1, queries=QUERIES, epsilon=1.0, seed=5)
    module = OneLossPerStep()
    replayed: list[str] = []

    class Replayed(Callback):
        def on_before_optimizer_step(
            self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
        ) -> None:
            if strategy.stage_index == 0:
                own = {
                    name: p.grad
                    for name, p in pl_module.named_parameters()
                    if name in strategy._assembly.owned[0]
                }
                replayed.append(_bytes({name: QUERIES * gradient for name, gradient in own.items()}))

    trainer_for(strategy, callbacks=[Replayed()]).fit(module, loader(2 * QUERIES, batch_size=2))
    return module._seen, replayed


def test_the_z_that_perturbed_is_the_z_that_is_replayed() -> None:
    seen, replayed = run_ranks(_perturbed_and_replayed, 2)[0]

    assert len(seen) == QUERIES * QUERIES
    assert len(set(seen)) == len(seen)  # every query of every step has a direction of its own
    assert replayed == [seen[step * QUERIES + step] for step in range(QUERIES)]


# Noise is not signal.


def test_dropout_alone_gives_a_derivative_of_exactly_0() -> None:
    module = partial(TinyModule, dropout=0.5, learning_rate=0.0)
    train = partial(loader, 16)
    unmoved = {"epsilon": 1e-30, "seed": 1}  # too small to change a parameter in float32
    jobs = [
        Job(strategy={**unmoved, "zo_stages": 1, "queries": 2}, module=module, train=train),
        Job(strategy={**unmoved, "zo_stages": 2, "exit_queries": 1}, module=module, train=train),
        Job(
            strategy={**unmoved, "zo_stages": 3, "exit_queries": 1, "difference": "central"},
            module=module,
            train=train,
        ),
        # A zo stage that has nothing to move.
        Job(
            strategy={"zo_stages": 1, "queries": 2},
            module=partial(TinyModule, dropout=0.5, layers=[4, 5]),
            train=train,
        ),
    ]
    for job, runs in zip(jobs, run_jobs(jobs, 3), strict=True):
        for run in runs:
            derivatives = [g for step in run.derivatives for g in step]
            assert len(derivatives) == 2 * 4 * 2, job
            assert set(derivatives) == {0.0}, job
        if job.strategy["zo_stages"] > 1:
            assert all(not gradient.any() for run in runs[:2] for gradient in run.gradients[0].values())


def test_every_micro_batch_and_step_has_dropout_masks_of_its_own() -> None:
    """Else the test above would pass with dropout off."""
    same_rows = partial(_repeated_rows, 8)
    strategy = {"zo_stages": 1, "micro_batches": 4}
    jobs = [
        Job(
            strategy=strategy,
            module=partial(TinyModule, dropout=dropout, learning_rate=0.0),
            train=same_rows,
            trainer={"max_epochs": 2},
        )
        for dropout in (0.0, 0.5)
    ]
    (without, *_), (masked, *_) = run_jobs(jobs, 2)
    assert without.losses[0] == without.losses[1]
    assert masked.losses[0] != masked.losses[1]
    assert masked.losses[0] != pytest.approx(without.losses[0], abs=1e-4)


def _repeated_rows(rows: int) -> Any:
    row = loader(1).dataset[0]
    return torch.utils.data.DataLoader([row] * rows, batch_size=rows)


# A loss that is not finite.


class LossNotFinite(SgdModule):
    """On the last stage, the calls of `training_step` numbered in `broken` return infinity or NaN."""

    def __init__(self, broken: dict[int, float]) -> None:
        super().__init__(blocks=4)
        self.broken = broken
        self._calls = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self._calls += 1
        return loss * self.broken.get(self._calls - 1, 1.0)


def _drop(broken: dict[int, float], directions: str) -> tuple[Run, list[str]]:
    strategy = {"zo_stages": 1, "micro_batches": 2, "queries": 2, "epsilon": 0.125, "directions": directions}
    job = Job(
        strategy=strategy, module=partial(LossNotFinite, broken), train=partial(loader, 4, batch_size=4)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = fit(job)
    return run, [
        str(warning.message) for warning in caught if "directions gave a loss" in str(warning.message)
    ]


def _drop_each(cases: list[tuple[dict[int, float], str]]) -> list[tuple[Run, list[str]]]:
    return [_drop(*case) for case in cases]


def test_a_direction_whose_loss_is_not_finite_is_dropped() -> None:
    # The last stage runs F0 F1, then the queries: P(m=0, q=0), P(1, 0), P(0, 1), P(1, 1).
    cases: list[tuple[dict[int, float], str]] = [
        ({}, "microbatch"),
        ({2: math.inf}, "microbatch"),
        ({3: math.nan}, "minibatch"),
        (dict.fromkeys(range(2, 6), math.nan), "microbatch"),
    ]
    by_rank = run_ranks(_drop_each, 2, cases)
    for answers in by_rank:
        (sound, none), (one, one_warning), (shared, shared_warning), (all_lost, all_warning) = answers
        assert none == []
        assert len(sound.derivatives[0]) == 4
        assert len(one.derivatives[0]) == 3
        assert one_warning[0].startswith("1 of 4 directions gave a loss that is not finite and were dropped")
        assert len(shared.derivatives[0]) == 1
        assert shared_warning[0].startswith("1 of 2 directions")
        assert all_lost.derivatives == [[]]
        assert all_warning[0].startswith("4 of 4 directions")
        for run in (one, shared, all_lost):
            assert math.isfinite(run.losses[0])
            assert all(value.isfinite().all() for value in run.parameters.values())

    # What is left is the mean of what is usable: query 1 alone for micro-batch 0, both for micro-batch 1.
    sound = by_rank[0][0][0]
    g = dict(zip([(0, 0), (0, 1), (1, 0), (1, 1)], sound.derivatives[0], strict=True))
    expected = {(0, 1): g[0, 1] / 2, (1, 0): g[1, 0] / 4, (1, 1): g[1, 1] / 4}
    for name, found in by_rank[0][1][0].gradients[0].items():
        z = {
            (m, q): direction(DirectionKey(seed=0, step=0, micro_batch=m, query=q), name, found.shape)
            for m, q in expected
        }
        formula = sum((coefficient * z[key] for key, coefficient in expected.items()), torch.zeros(()))
        torch.testing.assert_close(found, formula, atol=1e-5, rtol=1e-5)

    before = dict(LossNotFinite({}).named_parameters())
    assert by_rank[0][3][0].gradients == [{}]
    for name, value in by_rank[0][3][0].parameters.items():
        assert value.equal(before[name]) == (".layers.0." in name or ".layers.1." in name), name


# Clipping and learning rates go by role.


CLIP = 0.03


def test_each_role_is_clipped_by_its_own_norm_and_has_its_own_learning_rate() -> None:
    module = partial(SgdModule, learning_rate=0.5)
    job = Job(
        strategy={"zo_stages": 2, "queries": 2, "zo_lr_scale": 0.25},
        module=module,
        train=partial(loader, 8),
        trainer={"gradient_clip_val": CLIP},
    )
    generous = Job(
        strategy={"zo_stages": 2}, module=module, train=partial(loader, 8), trainer={"gradient_clip_val": 1e6}
    )
    clipped, unclipped = run_jobs([job, generous], 4)

    for stages in (clipped[:2], clipped[2:]):
        gradients = [gradient for run in stages for gradient in run.clipped[0].values()]
        before = [gradient for run in stages for gradient in run.gradients[0].values()]
        assert _norm(before) > 2 * CLIP
        assert _norm(gradients) == pytest.approx(CLIP, rel=1e-4)
        # One factor for the whole role: the gradient keeps its direction.
        factors = [float(after.norm() / first.norm()) for after, first in zip(gradients, before, strict=True)]
        assert factors == pytest.approx([factors[0]] * len(factors), rel=1e-4)
    zo, bp = (
        _norm([g for run in part for g in run.gradients[0].values()]) for part in (clipped[:2], clipped[2:])
    )
    assert zo > 2 * bp  # so a norm over both roles would have left next to nothing of the bp gradients
    for run in unclipped:
        assert all(run.clipped[0][name].equal(gradient) for name, gradient in run.gradients[0].items())

    before_step = dict(module().named_parameters())
    for run in clipped:
        rate = 0.5 * (0.25 if run.stage < 2 else 1.0)
        for name, gradient in run.clipped[0].items():
            expected = before_step[name].detach() - rate * gradient
            torch.testing.assert_close(clipped[0].parameters[name], expected, atol=1e-6, rtol=1e-5)


def _norm(tensors: list[Tensor]) -> float:
    return float(torch.cat([tensor.reshape(-1) for tensor in tensors]).norm())
