"""Stand-ins for a stage's own blocks: the first ones note their calls, the last one has the executor run them all."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_hybridop.pipeline.executors.arguments import BatchTensors, CallRecorder
from lightning_hybridop.pipeline.executors.executor import Executor
from lightning_hybridop.pipeline.stage import StageModel
from lightning_hybridop.pipeline.stand_ins import BlockStandIn, StageBoundary


class ExecutedBlock(BlockStandIn):
    """Stands for a block whose arithmetic an executor does, with the block's own children, parameters and buffers.

    They keep their names, so that whoever looks for adapters finds them where they were.
    """

    def __init__(
        self,
        replaced: nn.Module,
        *,
        index: int,
        returns_tuple: bool,
        run: "BlockRun",
        is_first: bool,
        is_last: bool,
    ) -> None:
        super().__init__(replaced, index=index, returns_tuple=returns_tuple)
        self._modules = replaced._modules
        self._parameters = replaced._parameters
        self._buffers = replaced._buffers
        self._run = (run,)
        self._is_first = is_first
        self._is_last = is_last
        self.train(replaced.training)

    def forward(self, *arguments: Any, **keywords: Any) -> Tensor | tuple[Tensor]:
        """Note the call; on the stage's last block run all of them."""
        (run,) = self._run
        if self._is_first:  # whatever an interrupted step left behind
            run.recorder.clear()
        hidden_BTD = run.recorder.record(self._replaced[0], arguments, keywords)
        return self.returned(run.all(hidden_BTD) if self._is_last else hidden_BTD)


class BlockRun:
    """Runs a stage's blocks on an executor; without one only what is done `instead` can be.

    `adapters` are their trainable parameters by name, `linears` the linear layers among their owners, whose
    `grouped_weight`, where there is one, takes the place of the weight.
    """

    def __init__(
        self,
        executor: Executor | None,
        adapters: Mapping[str, nn.Parameter],
        linears: Mapping[str, nn.Linear],
    ) -> None:
        self.executor = executor
        self.recorder = CallRecorder()
        self._adapters = adapters
        self._linears = linears
        self._instead: Callable[[Tensor], None] | None = None

    @contextmanager
    def instead(self, action: Callable[[Tensor], None]) -> Iterator[None]:
        """Inside the block, do this with the hidden state before the blocks in the place of running them, and end the step."""
        self._instead = action
        try:
            yield
        finally:
            self._instead = None

    def all(self, hidden_BTD: Tensor) -> Tensor:
        """Run the recorded blocks on a hidden state."""
        if self._instead is not None:
            self._instead(hidden_BTD)
            raise StageBoundary(hidden_BTD)
        assert self.executor is not None
        batch = self.recorder.taken()
        grouped = {
            name: weight
            for name, linear in self._linears.items()
            if (weight := getattr(linear, "grouped_weight", None)) is not None
        }
        if grouped or not torch.is_grad_enabled():
            adapters = {name: grouped.get(name, adapter) for name, adapter in self._adapters.items()}
            with torch.no_grad():
                return self.executor.forward(hidden_BTD, batch, adapters)
        output: Tensor = _Differentiable.apply(  # type: ignore[no-untyped-call]
            self.executor, batch, tuple(self._adapters), hidden_BTD, *self._adapters.values()
        )
        return output


def stand_in(model: StageModel, run: BlockRun) -> None:
    """Put stand-ins for a stage's own blocks in their place, which have `run` run them."""
    blocks = model.own_blocks()
    model.replace_own_blocks(
        {
            index: ExecutedBlock(
                block,
                index=index,
                returns_tuple=model.anatomy.returns_tuple,
                run=run,
                is_first=index == min(blocks),
                is_last=index == max(blocks),
            )
            for index, block in blocks.items()
        }
    )


class _Differentiable(torch.autograd.Function):
    """The blocks as one operator, whose backward is the executor's vector-Jacobian product.

    Only its inputs are kept from one to the other.
    """

    @staticmethod
    def forward(
        ctx: Any,
        executor: Executor,
        batch: BatchTensors,
        names: Sequence[str],
        hidden_BTD: Tensor,
        *adapters: Tensor,
    ) -> Tensor:
        ctx.executor, ctx.batch, ctx.names = executor, batch, names
        ctx.save_for_backward(hidden_BTD, *adapters)
        return executor.forward(hidden_BTD, batch, dict(zip(names, adapters, strict=True)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient_BTD,) = gradients
        hidden_BTD, *adapters = ctx.saved_tensors
        own = dict(zip(ctx.names, adapters, strict=True))
        gradient, of_adapters = ctx.executor.vjp(hidden_BTD, ctx.batch, own, gradient_BTD)
        return (None, None, None, gradient, *(of_adapters[name] for name in ctx.names))
