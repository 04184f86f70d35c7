"""A traced graph as an ONNX model whose frozen weights lie in the stage's file."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import fx

from lightning_hybridop.pipeline.executors.onnx_operators import CONVERTERS, OperatorError, value_of
from lightning_hybridop.pipeline.executors.tracing import Traced, output_of
from lightning_hybridop.pipeline.executors.weights_file import TRANSPOSED, StoredTensor, WeightsFile

if TYPE_CHECKING:
    import onnx

OPSET = 17
_IR_VERSION = 8  # the one that came with this operator set

_ELEMENTS = {
    torch.float32: "FLOAT",
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
    torch.int8: "INT8",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.uint8: "UINT8",
    torch.bool: "BOOL",
}


def onnx_model(traced: Traced, weights: WeightsFile) -> "onnx.ModelProto":
    """Return the model of a traced graph; it is to be saved in the folder of `weights`.

    Inputs that the graph does not use are left out.
    Raises OperatorError for an operator that has no converter.
    """
    writer = _ModelWriter(weights)
    for name, node in zip(traced.inputs, _inputs(traced.graph), strict=True):
        writer.take(name, node)
    for node in traced.graph.graph.nodes:
        if node.op == "get_attr":
            writer.names[node] = writer.tensor(getattr(traced.graph, node.target))
        elif node.op == "call_function" and not _is_only_transposed_for_products(node):
            converter = CONVERTERS.get(node.target)
            if converter is None:
                raise OperatorError(f"the operator {node.target} has no form in ONNX that is known here")
            writer.names[node] = converter(writer, node)
    return writer.model(traced.outputs, output_of(traced.graph))


def _inputs(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def _is_only_transposed_for_products(node: fx.Node) -> bool:
    """Tell whether a transposed matrix is read by products only, which read the matrix itself."""
    return (
        node.target is torch.ops.aten.permute.default
        and [axis % 2 for axis in node.args[1]] == [1, 0]  # type: ignore[union-attr, operator]
        and value_of(node).dim() == 2
        and all(user.target is torch.ops.aten.mm.default for user in node.users)
    )


class _ModelWriter:
    """Collects nodes and constants; see Writer of onnx_operators."""

    def __init__(self, weights: WeightsFile) -> None:
        import onnx

        self._onnx = onnx
        self._weights = weights
        self.names: dict[fx.Node, str] = {}
        self._weight_names: dict[fx.Node, str] = {}
        self._copies: dict[fx.Node, str | None] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._constants: dict[Any, str] = {}
        self._read: set[str] = set()
        self._initializers: list[onnx.TensorProto] = []
        self._nodes: list[onnx.NodeProto] = []

    def take(self, name: str, node: fx.Node) -> None:
        """Make an input of the graph an input of the model, or read it from the weights' file."""
        if not node.users:
            return
        if name in self._weights.tensors:
            self.names[node] = self._weight(name)
            self._weight_names[node] = name
        else:
            self.names[node] = name
            self._inputs.append(self._info(name, value_of(node).dtype, value_of(node).shape))

    def model(self, outputs: Sequence[str], nodes: Sequence[Any]) -> "onnx.ModelProto":
        """Return the model with these outputs."""
        infos = []
        for name, node in zip(outputs, nodes, strict=True):
            self._nodes.append(
                self._onnx.helper.make_node("Identity", [self.operand(node)], [name], name=name)
            )
            infos.append(self._info(name, value_of(node).dtype, value_of(node).shape))
        graph = self._onnx.helper.make_graph(
            self._nodes, "stage", self._inputs, infos, initializer=self._initializers
        )
        return self._onnx.helper.make_model(
            graph,
            opset_imports=[self._onnx.helper.make_opsetid("", OPSET)],
            ir_version=_IR_VERSION,
            producer_name="lightning_hybridop",
        )

    def add(self, kind: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add a node with one output and return the output's name."""
        name = f"{kind}_{len(self._nodes)}"
        self._nodes.append(self._onnx.helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, value: Any, dtype: torch.dtype) -> str:
        """Return the name of a constant tensor."""
        key = (repr(value), dtype)
        if key not in self._constants:
            self._constants[key] = self.tensor(torch.tensor(value, dtype=dtype))
        return self._constants[key]

    def tensor(self, tensor: torch.Tensor) -> str:
        """Return the name of a tensor that is part of the model."""
        name = f"constant_{len(self._initializers)}"
        array = np.asarray(tensor.detach().contiguous().numpy())
        self._initializers.append(self._onnx.numpy_helper.from_array(array, name))
        return name

    def indices(self, values: Sequence[int]) -> str:
        """Return the name of a constant list of int64."""
        return self.constant([int(value) for value in values], torch.int64)

    def operand(self, value: Any, dtype: torch.dtype | None = None) -> str:
        """Return the name of a node's value, or of a number as a constant, cast to `dtype` if that is another."""
        if not isinstance(value, fx.Node):
            return self.constant(value, torch.float32 if dtype is None else dtype)
        name = self.names[value]
        return name if dtype in (None, value_of(value).dtype) else self.cast(name, dtype)

    def cast(self, name: str, dtype: torch.dtype | None) -> str:
        """Return the name of a value cast to `dtype`."""
        assert dtype is not None
        return self.add("Cast", [name], to=self._element(dtype))

    def transposed_copy(self, node: fx.Node) -> str | None:
        """Return the name of the transposed copy of a frozen weight that has one, else None."""
        if node not in self._copies:
            name = f"{self._weight_names.get(node)}{TRANSPOSED}"
            self._copies[node] = self._weight(name) if name in self._weights.tensors else None
        return self._copies[node]

    def _weight(self, name: str) -> str:
        stored = self._weights.tensors[name]
        if stored.scale is None:
            own = self._external(name, stored)
            return self.cast(own, torch.float32) if stored.dtype in ("float16", "bfloat16") else own
        scale = self._external(stored.scale, self._weights.tensors[stored.scale])
        return self.add("DequantizeLinear", [self._external(name, stored), scale], axis=stored.axis)

    def _external(self, name: str, stored: StoredTensor) -> str:
        if name in self._read:  # the scale of a weight and of its transposed copy
            return name
        self._read.add(name)
        tensor = self._onnx.TensorProto(
            name=name,
            data_type=self._element(getattr(torch, stored.dtype)),
            dims=stored.shape,
            data_location=self._onnx.TensorProto.EXTERNAL,
        )
        for key, value in (
            ("location", self._weights.path.name),
            ("offset", str(stored.offset)),
            ("length", str(stored.length)),
        ):
            tensor.external_data.add(key=key, value=value)
        self._initializers.append(tensor)
        return name

    def _element(self, dtype: torch.dtype) -> int:
        if dtype not in _ELEMENTS:
            raise OperatorError(
                f"it has values of dtype {dtype}, which have no form in ONNX that is known here"
            )
        return int(getattr(self._onnx.TensorProto, _ELEMENTS[dtype]))

    def _info(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> "onnx.ValueInfoProto":
        return self._onnx.helper.make_tensor_value_info(name, self._element(dtype), list(shape))
