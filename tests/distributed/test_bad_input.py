"""What cannot work ends on every rank, with one sentence that says what to do."""

import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from lightning_hybridop import HybridOPStrategy, even_plan
from tests.distributed.harness import RankError, run_ranks
from tests.distributed.runs import Job, fit, trainer_for
from tests.tiny import TinyModule, loader

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

TRAIN = partial(loader, 16)


def fit_module(module: Callable[[], TinyModule], **strategy: Any) -> None:
    fit(Job(strategy=strategy, module=module, train=TRAIN))


# What is refused in setup, or on all ranks at once: several cases in the same processes.


class TwoOptimizers(TinyModule):
    def configure_optimizers(self) -> Any:
        return [super().configure_optimizers(), super().configure_optimizers()], []


class SecondOrder(TinyModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS([p for p in self.parameters() if p.requires_grad])


class Manual(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Untrainable(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


def _float16() -> None:
    # `precision="16-mixed"` itself becomes bfloat16 on a CPU, with a warning of Lightning's.
    trainer = trainer_for(HybridOPStrategy(), plugins=[MixedPrecision("16-mixed", "cpu")])
    trainer.fit(TinyModule(), TRAIN())


def _module_of_another_trainer() -> None:
    module = TinyModule()
    trainer_for(HybridOPStrategy()).fit(module, TRAIN())
    trainer_for(HybridOPStrategy()).fit(module, TRAIN())


def _odd_rank() -> None:
    def other_rows() -> Any:
        return loader(16, length=7 if os.environ["RANK"] != "1" else 8)

    fit(Job(strategy={}, train=other_rows))


REFUSED: dict[str, tuple[Callable[[], None], str]] = {
    "more stages than blocks": (
        partial(fit_module, partial(TinyModule, blocks=2)),
        "stages: found 3 stages for 2 blocks, expected at most one stage per block; use fewer stages.",
    ),
    "more zo stages than stages": (
        partial(fit_module, TinyModule, zo_stages=4),
        "zo_stages: found 4 of 3 stages; use at most 3.",
    ),
    "plan for more blocks": (
        partial(fit_module, TinyModule, plan=even_plan(blocks=8, stages=3)),
        "The plan is for 8 blocks, but model.base_model.model.model.layers has 6; edit `blocks`",
    ),
    "plan for fewer processes": (
        partial(fit_module, TinyModule, plan=even_plan(blocks=6, stages=2)),
        "The plan has 2 stages, but 3 processes run; start one process per stage.",
    ),
    "unknown list of blocks": (
        partial(fit_module, TinyModule, blocks="encoder"),
        "blocks='encoder' names 0 module lists, expected exactly one of: model.base_model.model.model.layers",
    ),
    "float16": (_float16, "pass precision='bf16-mixed' or '32-true'."),
    "two optimizers": (
        partial(fit_module, TwoOptimizers),
        "configure_optimizers returned several optimizers, but a pipeline steps one",
    ),
    "LBFGS": (partial(fit_module, SecondOrder), "LBFGS evaluates the loss several times per step"),
    "manual optimization": (
        partial(fit_module, Manual),
        "The module optimizes manually (automatic_optimization=False)",
    ),
    "nothing to train": (
        partial(fit_module, Untrainable),
        "The model has no trainable parameter; add a LoRA adapter or unfreeze something.",
    ),
    "cut before": (_module_of_another_trainer, "build a new module for a new Trainer."),
    "ranks that read different batches": (
        _odd_rank,
        "Every rank must read the same batch, but rank 1 (stage 1) read another one than rank 0;",
    ),
}


def _refusals() -> dict[str, str]:
    messages = {}
    for name, (attempt, _) in REFUSED.items():
        try:
            attempt()
        except Exception as error:
            messages[name] = str(error)
        else:
            messages[name] = "nothing was refused"
    return messages


def test_what_cannot_work_is_refused_on_every_rank() -> None:
    for messages in run_ranks(_refusals, 3):
        for name, (_, expected) in REFUSED.items():
            assert expected in messages[name], name
            assert "\n" not in messages[name]


class CompiledBlock(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        layers = self.model.get_base_model().model.layers
        layers[0] = torch.compile(layers[0])


def test_a_compiled_model_is_refused() -> None:
    with pytest.raises(
        RankError, match=r"layers.0 is compiled, and a compiled model cannot be cut into stages"
    ):
        run_ranks(partial(fit_module, CompiledBlock, zo_stages=1), 1)


# What only one stage notices ends the others too. The strategy's timeout is longer than the test may take, so what
# ends them is not that.


def failures(module: Callable[[], TinyModule], ranks: int) -> dict[int, str]:
    """Return what each rank raised."""
    with pytest.raises(RankError) as caught:
        run_ranks(partial(fit_module, module, timeout=1000, zo_stages=1), ranks, timeout=120)
    parts = str(caught.value).split("\nrank ")
    return {int(part.removeprefix("rank ").partition(":")[0]): part for part in parts}


class CallsTwice(TinyModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss + self.model(**batch).loss


class CallsNever(TinyModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return torch.zeros((), requires_grad=True)


class ReturnsNone(TinyModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.model(**batch)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (CallsTwice, "The model was called twice in one step"),
        (CallsNever, "call the model in every step, and exactly once in training_step"),
        (ReturnsNone, "training_step returned NoneType, expected a loss tensor"),
    ],
)
def test_a_step_that_a_stage_cannot_follow_ends_all_ranks(
    module: Callable[[], TinyModule], expected: str
) -> None:
    found = failures(module, 2)
    assert sorted(found) == [0, 1]
    assert any(expected in text for text in found.values())


class Breaks(TinyModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 1 and self.global_rank == 1:
            raise ArithmeticError("the second batch of stage 1")
        return super().training_step(batch, batch_idx)


def test_an_exception_on_one_rank_ends_all_ranks() -> None:
    found = failures(Breaks, 3)
    assert sorted(found) == [0, 1, 2]
    assert "ArithmeticError: the second batch of stage 1" in found[1]


def _port_in_use() -> None:
    if os.environ["RANK"] == "0":
        with socket.socket() as listener:
            listener.bind(("", int(os.environ["MASTER_PORT"])))
            listener.listen()
            fit_module(TinyModule)
    else:
        fit_module(TinyModule)


def test_a_port_in_use_is_named() -> None:
    with pytest.raises(RankError, match=r"Port \d+ on 127.0.0.1 is in use; set MASTER_PORT to a free port"):
        run_ranks(_port_in_use, 2)
