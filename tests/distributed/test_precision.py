"""Half precision on the CPU: a pipeline computes what one process computes in the same precision."""

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import optim

from lightning_hybridop import HybridOPStrategy, Plan, Stage
from lightning_hybridop.estimation.estimators import DEFAULT_EPSILON
from tests.distributed.alone import Outcome, learn, learn_together
from tests.distributed.runs import Job
from tests.tiny import TinyModule, loader

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

PRECISIONS = {"bf16-true": torch.bfloat16, "bf16-mixed": torch.float32, "64-true": torch.float64}
LAYOUTS: dict[str, dict[str, Any]] = {"bp": {}, "zo": {"zo_stages": 1, "queries": 2}}


class Kinds(TinyModule):
    """Notes the dtypes of its weights, of its loss and of the perturbation's size."""

    def __init__(self) -> None:
        super().__init__(blocks=2, learning_rate=1e-2)
        self.notes: dict[str, Any] = {}

    def on_train_start(self) -> None:
        self.notes["weights"] = sorted({str(p.dtype) for p in self.parameters()})
        strategy = self.trainer.strategy
        if isinstance(strategy, HybridOPStrategy):
            self.notes["epsilon"] = strategy._estimator_settings().epsilon
            self.notes["resolution"] = strategy._estimator_settings().resolution

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.AdamW(self.parameters(), lr=self.learning_rate)


class Resolves(Callback):
    """Notes whether the perturbed losses differ from each other."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        result = trainer.strategy.last_result if isinstance(trainer.strategy, HybridOPStrategy) else None
        if result is not None and result.estimate is not None:
            pl_module.notes.setdefault("derivatives", []).extend(g for _, g in result.estimate.derivatives)


def _resolves() -> list[Callback]:
    return [Resolves()]


def _job(precision: str, layout: str) -> Job:
    return Job(
        strategy={"micro_batches": 2, **LAYOUTS[layout]},
        module=Kinds,
        train=partial(loader, 16, batch_size=8),
        trainer={"precision": precision, "gradient_clip_val": 1.0, "max_epochs": 2},
        callbacks=_resolves,
    )


# Frozen weights of the zo stage in half precision: adapters stay in float32.
MIXED_PLAN = Plan(
    blocks=2,
    stages=(Stage(first=0, last=1, role="zo", dtype="bfloat16"), Stage(first=1, last=2)),
    micro_batches=2,
    queries=2,
)


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, str], list[Outcome]]:
    cases = [(precision, layout) for precision in PRECISIONS for layout in LAYOUTS]
    jobs = [_job(*case) for case in cases]
    planned = Job(strategy={"plan": MIXED_PLAN}, module=Kinds, train=partial(loader, 8), callbacks=_resolves)
    found = learn_together([*jobs, planned], 2)
    return dict(zip([*cases, ("planned", "zo")], found, strict=True))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_losses_and_dtypes_are_those_of_one_process(
    precision: str, outcomes: dict[tuple[str, str], list[Outcome]]
) -> None:
    expected = learn(_job(precision, "bp"), alone=True)
    # A pass over a micro-batch rounds as one over the mini-batch, but the mean of losses is taken in another order.
    tolerance = 1e-6 if precision == "64-true" else 2e-2
    for outcome in outcomes[precision, "bp"]:
        assert outcome.losses == pytest.approx(expected.losses, abs=tolerance)
        assert outcome.notes["weights"] == expected.notes["weights"] == [str(PRECISIONS[precision])]
        assert outcome.parameters.keys() == expected.parameters.keys()
        for name, value in expected.parameters.items():
            found = outcome.parameters[name]
            assert found.dtype == value.dtype == PRECISIONS[precision]
            cosine = torch.nn.functional.cosine_similarity(
                found.double().flatten(), value.double().flatten(), dim=0
            )
            assert cosine > 0.99, name
    assert expected.losses[-1] != pytest.approx(expected.losses[0], abs=1e-3)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_zo_stage_perturbs_by_what_its_arithmetic_resolves(
    precision: str, outcomes: dict[tuple[str, str], list[Outcome]]
) -> None:
    arithmetic = "float64" if precision == "64-true" else "bfloat16"
    for outcome in outcomes[precision, "zo"]:
        assert outcome.notes["epsilon"] == DEFAULT_EPSILON[arithmetic]
        assert outcome.notes["resolution"] == torch.finfo(getattr(torch, arithmetic)).eps
        assert all(value.isfinite().all() for value in outcome.parameters.values())
        assert {value.dtype for value in outcome.parameters.values()} == {PRECISIONS[precision]}
        derivatives = outcome.notes["derivatives"]
        assert len(derivatives) == 4 * 2 * 2  # steps, micro-batches, queries
        assert sum(g != 0.0 for g in derivatives) > len(derivatives) / 2
    before = Kinds()
    for name, value in outcomes[precision, "zo"][0].parameters.items():
        assert not value.double().equal(before.get_parameter(name).to(value.dtype).double()), name


def test_a_stage_of_another_dtype_keeps_its_adapters(
    outcomes: dict[tuple[str, str], list[Outcome]],
) -> None:
    first, second = outcomes["planned", "zo"]
    assert first.notes["epsilon"] == second.notes["epsilon"] == DEFAULT_EPSILON["bfloat16"]
    assert first.notes["weights"] == ["torch.bfloat16", "torch.float32"]
    assert {value.dtype for value in first.parameters.values()} == {torch.float32}
