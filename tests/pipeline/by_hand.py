"""Runs a cut model stage by stage in one process, as several devices would run it."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybridop.pipeline.anatomy import read_anatomy
from lightning_hybridop.pipeline.stage import StageModel

Step = Callable[[nn.Module], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """What one forward and backward gave: the step's output and every gradient by its ordinary name."""

    output: Any
    gradients: dict[str, Tensor]


def cut(module: nn.Module, ranges: Sequence[tuple[int, int]]) -> list[StageModel]:
    """Return one stage per range of blocks, each cut from a copy of its own; the last one from `module` itself."""
    anatomy = read_anatomy(module)
    copies = [copy.deepcopy(module) for _ in ranges[1:]]
    return [
        StageModel(part, anatomy, first=first, last=last)
        for part, (first, last) in zip([*copies, module], ranges, strict=True)
    ]


def unsplit_gradients(module: nn.Module, step: Step) -> Gradients:
    """Run `step` and its backward on the whole model, and take the gradients away."""
    output = step(module)
    output.loss.backward()
    gradients = _gradients(module)
    module.zero_grad()
    return Gradients(output=output, gradients=gradients)


def forward_by_hand(stages: Sequence[StageModel], step: Step) -> Any:
    """Run `step` through the stages without gradients and return the last stage's output."""
    received_BTD: Tensor | None = None
    with torch.no_grad():
        for stage in stages[:-1]:
            received_BTD = stage.hidden(lambda: step(stage.module), received_BTD)  # noqa: B023  # called at once
        return stages[-1].output(lambda: step(stages[-1].module), received_BTD)


def evaluation_by_hand(stages: Sequence[StageModel], step: Step, *, micro_batch_steps: Sequence[Step]) -> Any:
    """Run micro-batches to the end of the blocks, then `step` on the whole mini-batch behind them."""
    ended: list[Tensor] = []
    last = stages[-1]
    with torch.no_grad():
        for run in micro_batch_steps:
            received_BTD: Tensor | None = None
            for stage in stages[:-1]:
                received_BTD = stage.hidden(lambda: run(stage.module), received_BTD)  # noqa: B023  # called at once
            assert received_BTD is not None
            ended.append(last.through_blocks(lambda: run(last.module), received_BTD))  # noqa: B023
        with last.behind_blocks():
            return last.output(lambda: step(last.module), torch.cat(ended))


def split_gradients(stages: Sequence[StageModel], step: Step) -> Gradients:
    """Run `step` forwards through the stages and its backward back through them."""
    sent: list[Tensor] = []
    received: list[Tensor | None] = [None]
    for stage in stages[:-1]:
        sent.append(stage.hidden(lambda: step(stage.module), received[-1]))  # noqa: B023  # called at once
        received.append(sent[-1].detach().requires_grad_())
    output = stages[-1].output(lambda: step(stages[-1].module), received[-1])
    output.loss.backward()
    for end, start in zip(reversed(sent), reversed(received), strict=False):
        assert start is not None
        end.backward(start.grad)
    merged = {name: gradient for stage in stages for name, gradient in _gradients(stage.module).items()}
    return Gradients(output=output, gradients=merged)


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
