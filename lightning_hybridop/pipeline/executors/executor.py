"""What runs a stage's blocks: one small interface, whatever does the arithmetic behind it."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from lightning_hybridop.pipeline.executors.arguments import BatchTensors


class ExecutorError(RuntimeError):
    """A stage's blocks cannot run on the executor asked for; the message says why and what to do."""


class Executor(Protocol):
    """Runs the blocks of one stage.

    `hidden_BTD` is the hidden state before the first of them, `batch` all further tensors that they are called with,
    and `adapters` their trainable parameters by name. Changing the values of any of these compiles nothing anew.
    """

    @property
    def has_vjp(self) -> bool:
        """Whether `vjp` can be called."""
        ...

    def forward(self, hidden_BTD: Tensor, batch: BatchTensors, adapters: Mapping[str, Tensor]) -> Tensor:
        """Return the hidden state [B, T, D] behind the last block."""
        ...

    def vjp(
        self, hidden_BTD: Tensor, batch: BatchTensors, adapters: Mapping[str, Tensor], gradient_BTD: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the gradients of `sum(gradient_BTD * forward(...))` by the hidden state and by each adapter."""
        ...
