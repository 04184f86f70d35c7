"""The arithmetic of a stage's blocks as a graph of elementary operators, forwards and backwards."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_hybridop.estimation.grouped import multiplying_by_group
from lightning_hybridop.pipeline.executors.arguments import Call
from lightning_hybridop.pipeline.executors.attention import PlainAttention
from lightning_hybridop.pipeline.executors.decompositions import decompositions
from lightning_hybridop.pipeline.executors.executor import ExecutorError
from lightning_hybridop.pipeline.executors.simplification import simplified


class TraceError(ExecutorError):
    """What the blocks do cannot be written down as one graph; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A graph and what its inputs and outputs are, in order.

    The inputs are the hidden state, the batch's tensors, the adapters, the frozen weights and, of an adjoint, the
    gradient. Floating-point tensors are float32.
    """

    graph: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def run_blocks(
    blocks: Sequence[nn.Module],
    names: Sequence[Mapping[str, str]],
    calls: Sequence[Call],
    hidden_BTD: Tensor,
    tensors: Sequence[Tensor],
    parameters: Mapping[str, Tensor],
) -> Tensor:
    """Run `blocks` one after the other as pure functions of their `parameters`; `names` are as in BlockParameters."""
    for block, own, call in zip(blocks, names, calls, strict=True):
        arguments, keywords = call.filled(hidden_BTD, tensors)
        values = {name: parameters[known] for name, known in own.items()}
        with _grouped_products(block, values) as values:
            output = torch.func.functional_call(block, values, arguments, keywords)
        hidden_BTD = output if isinstance(output, Tensor) else output[0]
    return hidden_BTD


def trace(
    blocks: Sequence[nn.Module],
    names: Sequence[Mapping[str, str]],
    calls: Sequence[Call],
    *,
    hidden: Tensor,
    tensors: Mapping[str, Tensor],
    adapters: Mapping[str, Tensor],
    frozen: Mapping[str, Tensor],
    adjoint: bool,
) -> Traced:
    """Return the graph of the blocks' forward, or of its vector-Jacobian product.

    Nothing is computed: of all tensors only shapes and dtypes count, so they may lie on `meta`.
    Raises TraceError where what the blocks do depends on values.
    """
    groups = (tensors, adapters, frozen)

    def split(inputs: Sequence[Tensor]) -> tuple[Tensor, list[dict[str, Tensor]]]:
        rest = iter(inputs[1:])
        return inputs[0], [{name: next(rest) for name in group} for group in groups]

    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        hidden_BTD, (rest, own, weights) = split(inputs)
        return (run_blocks(blocks, names, calls, hidden_BTD, list(rest.values()), {**own, **weights}),)

    def vjp(*inputs: Tensor) -> tuple[Tensor, ...]:
        hidden_BTD, (rest, own, weights) = split(inputs)
        hidden_BTD = hidden_BTD.detach().requires_grad_()
        own = {name: adapter.detach().requires_grad_() for name, adapter in own.items()}
        with torch.enable_grad():
            output = run_blocks(blocks, names, calls, hidden_BTD, list(rest.values()), {**own, **weights})
        # An adapter that the blocks do not use has a gradient of zeros.
        return torch.autograd.grad(
            output, [hidden_BTD, *own.values()], inputs[-1], allow_unused=True, materialize_grads=True
        )

    given = [
        hidden,
        *(tensor for group in groups for tensor in group.values()),
        *([hidden] if adjoint else []),
    ]
    with FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True):
        made = [torch.empty(tensor.shape, dtype=_wide(tensor.dtype)) for tensor in given]
        # Whatever precision the user's step runs in: a runtime has its own.
        plain = torch.autocast("cpu", enabled=False)
        with plain, evaluating(blocks), PlainAttention():
            try:
                graph = make_fx(vjp if adjoint else forward, decomposition_table=decompositions())(*made)
            except Exception as error:  # whatever the blocks raise when they find no values
                raise TraceError(f"its operators cannot be traced ({_first_line(error)})") from error
    outputs = ("hidden_gradient", *(f"{name}.gradient" for name in adapters)) if adjoint else ("output",)
    return Traced(
        graph=simplified(graph),
        inputs=("hidden", *tensors, *adapters, *frozen, *(("gradient",) if adjoint else ())),
        outputs=outputs,
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point else dtype


@contextmanager
def evaluating(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Inside the block all modules of `blocks` are in evaluation mode."""
    modules = [module for block in blocks for module in block.modules()]
    modes = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode


@contextmanager
def _grouped_products(block: nn.Module, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Have the linear layers whose weight is [groups, out, in] multiply each group of rows by its own matrix."""
    ordinary = dict(values)
    with ExitStack() as stack:
        for name, module in block.named_modules():
            weight = ordinary.get(f"{name}.weight")
            if isinstance(module, nn.Linear) and weight is not None and weight.dim() == 3:
                stack.enter_context(multiplying_by_group(module, weight))
                del ordinary[f"{name}.weight"]
        yield ordinary


def output_of(graph: fx.GraphModule) -> Sequence[Any]:
    """Return what a graph returns, in order."""
    outputs: Sequence[Any] = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    return outputs
