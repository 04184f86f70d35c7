"""A tiny model whose middle blocks run on an inference runtime, and the same model in torch."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybridop.pipeline.executors import install
from lightning_hybridop.pipeline.executors.graph_executor import GraphExecutor
from lightning_hybridop.pipeline.stage import StageModel
from tests.pipeline.by_hand import Gradients, Step, cut, split_gradients, unsplit_gradients

RUNTIMES = ("openvino", "onnxruntime")


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A model cut into three stages, the middle one on a runtime; `reference` is the whole model in torch."""

    reference: nn.Module
    stages: list[StageModel]
    executor: GraphExecutor

    def both(self, step: Step) -> tuple[Gradients, Gradients]:
        """Return what a step gives in torch and in stages."""
        for stage in self.stages:
            stage.module.zero_grad()
        return unsplit_gradients(self.reference, step), split_gradients(self.stages, step)

    def hidden(self, step: Step) -> tuple[Tensor, Tensor]:
        """Return the hidden state behind the middle stage, in torch and on the runtime, without gradients."""
        found: list[Tensor] = []
        name = f"{self.stages[1].anatomy.blocks_name}.{max(self.stages[1].own_blocks())}"
        last = self.reference.get_submodule(name)
        handle = last.register_forward_hook(
            lambda _, __, output: found.append(output if isinstance(output, Tensor) else output[0])
        )
        with torch.no_grad():
            step(self.reference)
            handle.remove()
            received = self.stages[0].hidden(lambda: step(self.stages[0].module), None)
            return found[0], self.stages[1].hidden(lambda: step(self.stages[1].module), received)


def staged(model: nn.Module, executor: str, *, blocks: int = 6, **options: Any) -> Staged:
    """Cut a model of `blocks` blocks around its blocks 1 and 2, which go to the executor."""
    stages = cut(copy.deepcopy(model), [(0, 1), (1, 3), (3, blocks)])
    return Staged(reference=model, stages=stages, executor=install(stages[1], executor=executor, **options))


def padded_step(*, rows: int = 3, length: int = 7, seed: int = 1, vocabulary: int = 60) -> Step:
    """Return a causal step on rows of which the last two end, or begin, in padding."""
    tokens = torch.randint(3, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(tokens)
    mask[-1, length // 2 :] = 0
    if rows > 1:
        mask[-2, : length // 3] = 0
    tokens = tokens * mask
    return lambda model: model(
        input_ids=tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100)
    )


def plain_step(*, rows: int = 2, length: int = 7, seed: int = 1, **inputs: Any) -> Step:
    """Return a causal step on whole rows, without a mask."""
    tokens = torch.randint(3, 60, (rows, length), generator=torch.Generator().manual_seed(seed))
    return lambda model: model(input_ids=tokens, labels=tokens, **inputs)


def worst_difference(found: Gradients, expected: Gradients, where: Callable[[str], bool]) -> float:
    """Return the largest difference of gradients, each as a part of its tensor's largest value."""
    differences = [
        float((found.gradients[name] - gradient).abs().max() / gradient.abs().max())
        for name, gradient in expected.gradients.items()
        if where(name) and gradient.abs().max() > 0
    ]
    assert differences
    return max(differences)
