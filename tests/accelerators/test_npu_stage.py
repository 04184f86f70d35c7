"""Stages on an NPU that a stand-in plays, which has no backward operators, no bfloat16 and no float64.

What they learn is compared with the same stages on the CPU.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch

from lightning_hybridop import HybridOPStrategy, Plan
from lightning_hybridop.planning.plan import Stage
from tests.distributed.harness import run_ranks
from tests.distributed.runs import SgdModule
from tests.tiny import loader

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

STAND_IN = Path(__file__).parent / "torch_npu_stand_in"

ZO = Stage(first=0, last=3, role="zo", device="npu:0")
BP = Stage(first=3, last=6, role="bp")
PLAN = Plan(blocks=6, stages=(ZO, BP), micro_batches=2, queries=2)


def fitted(
    plan: Plan,
    module: Callable[[], lightning.LightningModule] = SgdModule,
    options: Mapping[str, Any] = {},
    trainer_options: Mapping[str, Any] = {},
    steps: int = 1,
    batches: int = 1,
    validates: bool = False,
) -> dict[str, Any]:
    """Return the losses and the trained parameters after some steps, and where this rank computed.

    The first step of all is compared; later ones add that what it learnt is used, and is enough to see once.
    """
    losses: list[float] = []
    devices: set[str] = set()

    class Losses(lightning.Callback):
        def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
            losses.append(trainer.strategy.last_result.loss)
            devices.update(str(p.device) for p in trainer.lightning_module.parameters() if not p.is_meta)

    strategy = HybridOPStrategy(plan, seed=3, **options)
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="hybridop",
        devices=2,
        max_steps=steps,
        callbacks=[Losses()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=1.0 if validates else 0,
        **trainer_options,
    )
    trainer.fit(module(), loader(8 * batches), loader(4))
    return {
        "losses": losses,
        "validation": float(trainer.callback_metrics.get("val_loss", torch.zeros(()))),
        "parameters": {name: value.cpu() for name, value in strategy.trainable_state_dict().items()},
        "devices": devices,
        "root": str(strategy.root_device),
        "statistics": set(trainer.accelerator.get_device_stats(strategy.root_device)),
    }


def on_cpu(plan: Plan) -> Plan:
    return replace(plan, stages=tuple(replace(stage, device="cpu") for stage in plan.stages))


def with_stand_in(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    sys.path.insert(0, str(STAND_IN))
    return [job() for job in jobs]


CASES: dict[str, Callable[..., dict[str, Any]]] = {
    "loss": partial(fitted, PLAN, steps=2, batches=2, validates=True),
    "central difference, the same directions for all": partial(
        fitted, replace(PLAN, difference="central", queries=1), options={"directions": "minibatch"}
    ),
    "early exits": partial(fitted, replace(PLAN, queries=1, exit_queries=1)),
    "boundary": partial(fitted, replace(PLAN, estimator="boundary", difference="antithetic")),
    "boundary, queries together, directions of rows": partial(
        fitted,
        replace(PLAN, estimator="boundary", queries_per_forward=2),
        options={"directions": "row", "distribution": "rademacher", "shrinkage": True},
    ),
    "dropout, clipping": partial(
        fitted,
        replace(PLAN, queries=1),
        batches=2,
        module=partial(SgdModule, dropout=0.2),
        trainer_options={"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
    ),
    "frozen": partial(fitted, replace(PLAN, stages=(replace(ZO, role="frozen"), BP))),
    "float16 before bfloat16": partial(
        fitted, replace(PLAN, queries=1, stages=(replace(ZO, dtype="float16"), replace(BP, dtype="bfloat16")))
    ),
    "float16 behind bfloat16": partial(
        fitted,
        replace(
            PLAN,
            queries=1,
            stages=(
                replace(ZO, device="cpu", dtype="bfloat16"),
                replace(BP, role="zo", device="npu:0", dtype="float16"),
            ),
        ),
    ),
    "all stages estimate": partial(
        fitted,
        replace(PLAN, queries=1, stages=(replace(ZO, device="cpu"), replace(BP, role="zo", device="npu:0"))),
    ),
}


def on_the_cpu(case: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    assert isinstance(case, partial)
    return partial(fitted, on_cpu(case.args[0]), **case.keywords)


@pytest.mark.slow
def test_stages_on_an_npu_learn_what_they_learn_on_the_cpu() -> None:
    jobs = [job for case in CASES.values() for job in (case, on_the_cpu(case))]
    first, second = run_ranks(with_stand_in, 2, jobs)
    initial = {name: p.detach() for name, p in SgdModule().named_parameters() if p.requires_grad}

    for place, name in enumerate(CASES):
        behind = name in ("all stages estimate", "float16 behind bfloat16")
        pairs = [results[2 * place : 2 * place + 2] for results in (first, second)]
        assert [npu["devices"] for npu, _ in pairs] == (
            [{"cpu"}, {"npu:0"}] if behind else [{"npu:0"}, {"cpu"}]
        )
        for npu, cpu in pairs:
            assert npu["root"] == "cpu"
            assert ("npu_memory_total" in npu["statistics"]) == (npu["devices"] == {"npu:0"})
            assert "cpu_percent" in npu["statistics"]
            if "float16" in name:  # the two attentions round differently
                assert npu["losses"][0] == pytest.approx(cpu["losses"][0], rel=2e-3), name
                continue
            assert npu["losses"] == pytest.approx(cpu["losses"], rel=1e-5), name
            assert npu["validation"] == pytest.approx(cpu["validation"], rel=1e-5), name
            for parameter, value in cpu["parameters"].items():
                torch.testing.assert_close(
                    npu["parameters"][parameter], value, atol=2e-3, rtol=1e-3, msg=f"{name}: {parameter}"
                )
                on_npu = (int(parameter.partition(".layers.")[2].partition(".")[0]) < 3) != behind
                learnt = name != "frozen" or not on_npu
                assert npu["parameters"][parameter].equal(initial[parameter]) != learnt, (
                    f"{name}: {parameter}"
                )


def refusal(job: Callable[[], Any]) -> str:
    try:
        job()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "went through"


def unguarded(job: Callable[[], Any]) -> Any:
    """Run a job without the check that should have stopped it."""
    strategy_module = sys.modules["lightning_hybridop.strategy"]
    kept = strategy_module.refuse_backward_on_npus
    strategy_module.refuse_backward_on_npus = lambda *_: None
    try:
        return job()
    finally:
        strategy_module.refuse_backward_on_npus = kept


class InBfloat16(SgdModule):
    def __init__(self) -> None:
        super().__init__()
        self.model.to(torch.bfloat16)


ADJOINT = replace(PLAN, estimator="adjoint")
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "bp": (
        partial(fitted, replace(PLAN, stages=(replace(ZO, role="bp"), BP))),
        "ValueError: The stage of blocks 0-2 has the role bp on npu:0, but an NPU only runs forward",
    ),
    "adjoint": (
        partial(fitted, ADJOINT),
        "ValueError: The stage of blocks 0-2 is to take exact adjoints by torch's backward on npu:0, but an NPU",
    ),
    "bfloat16 in the plan": (
        partial(fitted, replace(PLAN, stages=(replace(ZO, dtype="bfloat16"), BP))),
        "ValueError: The stage of blocks 0-2 has the dtype bfloat16, but Ascend310B4 (npu:0) has no bfloat16; use",
    ),
    "mixed precision": (
        partial(fitted, PLAN, trainer_options={"precision": "bf16-mixed"}),
        "ValueError: The stage of blocks 0-2 would run with precision='bf16-mixed', but Ascend310B4",
    ),
    "a model in bfloat16": (
        partial(fitted, PLAN, module=InBfloat16),
        "ValueError: The stage of blocks 0-2 holds 0.self_attn.q_proj.base_layer.weight in bfloat16, but Ascend310B4",
    ),
    # The stand-in itself: a stage that touches autograd after all is stopped by it.
    "autograd": (
        partial(unguarded, partial(fitted, ADJOINT)),
        "RefusedOperatorError: aten::",
    ),
}


@pytest.mark.slow
def test_what_an_npu_lacks_is_refused_before_training() -> None:
    first, _ = run_ranks(with_stand_in, 2, [partial(refusal, job) for job, _ in REFUSED.values()])

    for found, (name, (_, expected)) in zip(first, REFUSED.items(), strict=True):
        assert found.startswith(expected), name
    assert "would be recorded by autograd on this NPU" in first[-1]
