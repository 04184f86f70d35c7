"""Hidden states on the wire: a pipeline is the unsplit model with its cuts rounded as the format says."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_hybridop import HybridOPStrategy
from lightning_hybridop.estimation.directions import DirectionKey
from tests.distributed.harness import run_ranks
from tests.distributed.reference import label_shares, loss, moved_loss, sliced
from tests.distributed.runs import (
    Batch,
    Gradients,
    Job,
    Run,
    assert_gradients_close,
    block_of,
    fit,
    quiet_trainer,
)
from tests.tiny import TinyModule, loader

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

WIRES = ("bfloat16", "float16", "int8")
QUERIES = 2
MICRO_BATCHES = 3
SIZES = (3, 3, 2)
EPSILON = 0.05
ELEMENTS = 8 * 7 * 16
TOKENS = 8 * 7


def in_steps_of_a_row(hidden_BTD: Tensor) -> Tensor:
    step = hidden_BTD.abs().max(dim=-1, keepdim=True).values / 127
    return torch.round(hidden_BTD / step) * step


ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "bfloat16": lambda hidden_BTD: hidden_BTD.bfloat16().float(),
    "float16": lambda hidden_BTD: hidden_BTD.half().float(),
    "int8": in_steps_of_a_row,
}


class Cut(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, hidden_BTD: Tensor, wire: str) -> Tensor:
        return ROUNDED[wire](hidden_BTD)

    @staticmethod
    def backward(context: Any, gradient_BTD: Tensor) -> tuple[Tensor, None]:
        return gradient_BTD.bfloat16().float(), None


@contextmanager
def cut_after(module: TinyModule, blocks: Sequence[int], wire: str) -> Iterator[None]:
    """Inside the block what these blocks give goes through `Cut`."""
    layers = module.model.get_base_model().model.layers

    def rounded(_: Any, __: Any, output: Any) -> Any:
        return Cut.apply(output, wire)

    hooks = [layers[block].register_forward_hook(rounded) for block in blocks]
    yield
    for hook in hooks:
        hook.remove()


class Writer(TinyModule):
    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        torch.manual_seed(0)
        written_BT: Tensor = self.model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=4,
            do_sample=False,
        )
        return written_BT


class Sent(Callback):
    seen: ClassVar[list[tuple[float, ...]]] = []

    def on_fit_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self.seen.append(trainer.strategy.sent_mib)


def fit_and_write(wires: Sequence[str]) -> list[tuple[Run, tuple[float, ...], Tensor]]:
    results = []
    for wire in wires:
        options = {
            "zo_stages": 1,
            "micro_batches": MICRO_BATCHES,
            "queries": QUERIES,
            "epsilon": EPSILON,
            "seed": 5,
            "wire": wire,
        }
        run = fit(
            Job(
                strategy=options,
                train=lambda: loader(8),
                validation=lambda: loader(8),
                callbacks=lambda: [Sent()],
                trainer={"num_sanity_val_steps": 1, "max_steps": 1},
            )
        )
        strategy = HybridOPStrategy(**options)
        (written_BT,) = quiet_trainer(strategy, devices=3).predict(Writer(), loader(8))
        results.append((run, Sent.seen[-1], written_BT))
    return results


def expected_of(wire: str) -> tuple[Gradients, dict[str, float], Tensor, list[float]]:
    """Return gradients of bp stages, losses, tokens and directional derivatives of the unsplit model with rounded cuts."""
    module = Writer()
    batch: Batch = next(iter(loader(8)))
    micro_batches = sliced(batch, SIZES)
    shares = label_shares(micro_batches)
    with cut_after(module, (1, 3), wire):
        validated = loss(module, batch)
        written_BT = module.predict_step(batch, 0)
        bases = [module.model(**rows).loss for rows in micro_batches]
        for base, share in zip(bases, shares, strict=True):
            (base * share).backward()
        names = [n for n, p in module.named_parameters() if p.requires_grad and block_of(n) < 2]
        derivatives = [
            (
                moved_loss(
                    module, names, rows, DirectionKey(seed=5, step=0, micro_batch=m, query=query), EPSILON
                )
                - float(bases[m].detach())
            )
            / EPSILON
            for m, rows in enumerate(micro_batches)
            for query in range(QUERIES)
        ]
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None and block_of(n) >= 2}
    trained = float(sum(share * float(base.detach()) for base, share in zip(bases, shares, strict=True)))
    return gradients, {"train": trained, "val": validated}, written_BT, derivatives


def test_a_pipeline_is_the_unsplit_model_with_rounded_cuts() -> None:
    by_rank = run_ranks(fit_and_write, 3, WIRES)
    plain = backwards_without_wire()
    for index, wire in enumerate(WIRES):
        runs = [results[index][0] for results in by_rank]
        gradients, losses, written_BT, derivatives = expected_of(wire)
        assert runs[0].losses == pytest.approx([losses["train"]], abs=1e-5)
        own = {name: g for run in runs[1:] for name, g in run.gradients[0].items()}
        assert_gradients_close(own, gradients, 1e-5)
        assert sorted(runs[0].derivatives[0]) == pytest.approx(sorted(derivatives), abs=2e-4)
        # It is a rounding that shows, else the test could not fail.
        assert any((own[name] - plain[name]).abs().max() > 1e-5 for name in own)
        sent = [round(mib * 2**20) for mib in by_rank[0][index][1]]
        hidden = ELEMENTS + 4 * TOKENS if wire == "int8" else 2 * ELEMENTS
        assert sent == [(1 + QUERIES) * hidden, (1 + QUERIES) * hidden, 2 * ELEMENTS]
        for results in by_rank:
            assert torch.equal(results[index][2], written_BT)


def backwards_without_wire() -> Gradients:
    module = TinyModule()
    module.model(**next(iter(loader(8)))).loss.backward()
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
