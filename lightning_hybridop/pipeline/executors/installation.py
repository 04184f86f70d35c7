"""Puts an executor in the place of a stage's blocks."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

from rich.console import Console
from torch import Tensor, nn

from lightning_hybridop.pipeline.executors.blocks import BlockRun, stand_in
from lightning_hybridop.pipeline.executors.buckets import DEFAULT_LENGTHS
from lightning_hybridop.pipeline.executors.executor import ExecutorError
from lightning_hybridop.pipeline.executors.graph_executor import GraphExecutor
from lightning_hybridop.pipeline.executors.onnxruntime import ONNXRuntime
from lightning_hybridop.pipeline.executors.openvino import OpenVINO
from lightning_hybridop.pipeline.executors.parameters import BlockParameters, block_parameters
from lightning_hybridop.pipeline.executors.probe import run_on_tokens
from lightning_hybridop.pipeline.executors.refusals import refuse_dropout, refuse_hooks
from lightning_hybridop.pipeline.executors.runtime import Runtime
from lightning_hybridop.pipeline.executors.stage_blocks import StageBlocks
from lightning_hybridop.pipeline.executors.storage import stored_weights
from lightning_hybridop.pipeline.stage import StageModel
from lightning_hybridop.pipeline.stand_ins import StageInputError
from lightning_hybridop.planning.plan import Estimator, Stage


def install_for(model: StageModel, stage: Stage, *, estimator: Estimator) -> None:
    """Have what a plan's stage names do the arithmetic of its blocks; torch does already. Errors as `install`."""
    if stage.executor != "torch":
        install(
            model,
            executor=stage.executor,
            dtype=stage.dtype,
            weights=stage.weights,
            needs_vjp=stage.role == "zo" and estimator == "adjoint",
        )


def install(
    model: StageModel,
    *,
    executor: str,
    dtype: str | None = None,
    weights: str | None = None,
    needs_vjp: bool = False,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
) -> GraphExecutor:
    """Have an inference runtime do the arithmetic of a stage's own blocks, and return what does it.

    The blocks' frozen weights go to a file in the cache and are released; their trainable parameters stay where they are.

    Args:
        model: the stage, on the CPU.
        executor: "openvino" or "onnxruntime".
        dtype: the precision of the runtime's arithmetic, "float32" if None.
        weights: "int8" for weights of eight bits, None for weights of `dtype`.
        needs_vjp: whether gradients will be asked for.
        lengths: what sequences are padded to.

    Raises:
        ExecutorError: the runtime is not installed, or cannot run these blocks.
    """
    runtime = make_runtime(executor, dtype or "float32")
    if needs_vjp and not runtime.has_vjp:
        raise ExecutorError(
            f"{runtime.description} computes no vector-Jacobian products, which estimator=adjoint needs; use another estimator, or "
            "executor=torch for this stage."
        )
    numbered = model.own_blocks()
    refuse_dropout(numbered)
    refuse_hooks(numbered)
    first, blocks = min(numbered), list(numbered.values())
    parameters = block_parameters(blocks, first=first)
    stage = StageBlocks(
        first=first,
        blocks=blocks,
        names=parameters.names,
        frozen={name: tensor.detach().to("meta") for name, tensor in parameters.frozen.items()},
        weights=stored_weights(blocks, parameters, dtype or "float32", weights, needs_vjp=needs_vjp),
    )
    made = GraphExecutor(stage, runtime, lengths=lengths, progress=_shown)
    run = BlockRun(made, parameters.adapters, _linears(blocks, parameters))
    stand_in(model, run)

    def check(hidden_BTD: Tensor) -> None:
        try:
            made.check(hidden_BTD, run.recorder.taken(), parameters.adapters, needs_vjp=needs_vjp)
        except (ExecutorError, StageInputError):
            raise
        except Exception as error:  # not to be taken for a model that refuses bare tokens
            raise ExecutorError(
                f"On {runtime.description}, {stage.describe()} cannot run: {type(error).__name__}: {error}"
            ) from error

    with run.instead(check):
        run_on_tokens(model, rows=1, length=2)
    model.release_own_blocks()
    return made


def make_runtime(executor: str, dtype: str) -> Runtime:
    """Return the runtime of a name.

    Raises:
        ExecutorError: there is none, it is not installed, or has no such precision.
    """
    if executor == "openvino":
        return OpenVINO(dtype=dtype)
    if executor == "onnxruntime":
        return ONNXRuntime(dtype=dtype)
    raise ExecutorError(f"executor: found {executor!r}, expected openvino or onnxruntime.")


def _linears(blocks: Sequence[nn.Module], parameters: BlockParameters) -> dict[str, nn.Linear]:
    """Return the linear layers whose weight is trained, by its name."""
    return {
        own[f"{name}.weight"]: module
        for block, own in zip(blocks, parameters.names, strict=True)
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and own[f"{name}.weight"] in parameters.adapters
    }


def _shown(sentence: str) -> AbstractContextManager[object]:
    return Console(stderr=True).status(sentence)
