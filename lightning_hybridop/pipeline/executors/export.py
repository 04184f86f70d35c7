"""A stage's graphs as ONNX files, for compilers of other devices."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_hybridop.pipeline.executors.arguments import BatchTensors
from lightning_hybridop.pipeline.executors.blocks import BlockRun, stand_in
from lightning_hybridop.pipeline.executors.executor import ExecutorError
from lightning_hybridop.pipeline.executors.onnx_model import OPSET, onnx_model
from lightning_hybridop.pipeline.executors.parameters import block_parameters
from lightning_hybridop.pipeline.executors.probe import run_on_tokens
from lightning_hybridop.pipeline.executors.refusals import refuse_dropout, refuse_hooks
from lightning_hybridop.pipeline.executors.storage import write_stage_weights
from lightning_hybridop.pipeline.executors.tracing import trace
from lightning_hybridop.pipeline.stage import StageModel

if TYPE_CHECKING:
    import onnx

FORWARD, ADJOINT = "forward.onnx", "adjoint.onnx"
DESCRIPTION = "stage.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedGraph:
    """What was written: how often the graph has each type of operator."""

    path: Path
    operators: Mapping[str, int]


def export_stage(
    model: StageModel,
    folder: Path,
    *,
    rows: int,
    length: int,
    dtype: str = "float32",
    weights: str | None = None,
) -> list[ExportedGraph]:
    """Write the forward and the adjoint of a stage's own blocks, for batches of one shape, and what their inputs are.

    Both graphs compute in float32 and read their frozen weights, kept in `dtype` or as "int8", from one file. The folder must
    exist.

    Raises:
        ExecutorError: the package onnx is missing, or blocks cannot be written.
    """
    onnx = _imported()
    numbered = model.own_blocks()
    refuse_dropout(numbered)
    refuse_hooks(numbered)
    first, blocks = min(numbered), list(numbered.values())
    parameters = block_parameters(blocks, first=first)
    run = BlockRun(None, {}, {})
    recorded: list[tuple[Tensor, BatchTensors]] = []
    stand_in(model, run)
    try:
        with run.instead(lambda hidden_BTD: recorded.append((hidden_BTD, run.recorder.taken()))):
            run_on_tokens(model, rows=rows, length=length)
    finally:
        model.replace_own_blocks(numbered)
    if not recorded:
        raise ExecutorError(
            "The model does not take bare tokens (input_ids and attention_mask), so nothing shows how it calls its blocks; export "
            "a language model."
        )
    hidden_BTD, batch = recorded[0]
    file = write_stage_weights(folder, blocks, parameters, dtype, weights, needs_vjp=True)
    described: dict[str, Any] = {
        "blocks": [first, max(numbered) + 1],
        "opset": OPSET,
        "weights": file.path.name,
    }
    exported = []
    for name, adjoint in ((FORWARD, False), (ADJOINT, True)):
        traced = trace(
            blocks,
            parameters.names,
            batch.calls,
            hidden=hidden_BTD,
            tensors=dict(zip(batch.names, batch.tensors, strict=True)),
            adapters=parameters.adapters,
            frozen=parameters.frozen,
            adjoint=adjoint,
        )
        written = onnx_model(traced, file)
        onnx.save(written, folder / name)
        onnx.checker.check_model(folder / name, full_check=True)
        described[name] = {
            "inputs": [_described(onnx, each) for each in written.graph.input],
            "outputs": [_described(onnx, each) for each in written.graph.output],
        }
        exported.append(
            ExportedGraph(
                path=folder / name, operators=dict(Counter(node.op_type for node in written.graph.node))
            )
        )
    (folder / DESCRIPTION).write_text(json.dumps(described, indent=1), encoding="utf-8")
    return exported


def _described(onnx: Any, value: "onnx.ValueInfoProto") -> dict[str, Any]:
    tensor = value.type.tensor_type
    return {
        "name": value.name,
        "shape": [dim.dim_value for dim in tensor.shape.dim],
        "dtype": onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name,
    }


def _imported() -> Any:
    try:
        import onnx
    except ImportError as error:
        raise ExecutorError(
            "Exporting needs the package onnx, which is not installed; install lightning-hybridop[onnx]."
        ) from error
    return onnx
