"""How each operator of a traced graph is written in ONNX, with operators of the default domain only."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from lightning_hybridop.pipeline.executors.executor import ExecutorError

aten = torch.ops.aten


class OperatorError(ExecutorError):
    """Blocks compute something that has no form in ONNX."""


class Writer(Protocol):
    """Where ONNX nodes are added; values are known by their names."""

    def add(self, kind: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add a node with one output and return the output's name."""
        ...

    def constant(self, value: Any, dtype: torch.dtype) -> str:
        """Return the name of a constant tensor."""
        ...

    def indices(self, values: Sequence[int]) -> str:
        """Return the name of a constant list of int64."""
        ...

    def operand(self, value: Any, dtype: torch.dtype | None = None) -> str:
        """Return the name of a node's value, or of a number as a constant, cast to `dtype` if that is another."""
        ...

    def cast(self, name: str, dtype: torch.dtype) -> str:
        """Return the name of a value cast to `dtype`."""
        ...

    def transposed_copy(self, node: fx.Node) -> str | None:
        """Return the name of the transposed copy of a frozen weight that has one, else None."""
        ...


Node = Any  # fx.Node; what its arguments are depends on the operator
Convert = Callable[[Writer, Node], str]
CONVERTERS: dict[Any, Convert] = {}


def value_of(node: Any) -> Tensor:
    """Return the fake tensor that a node makes: its shape and dtype."""
    value: Tensor = node.meta["val"]
    return value


def _converts(*targets: Any) -> Callable[[Convert], Convert]:
    def register(convert: Convert) -> Convert:
        for target in targets:
            CONVERTERS[target] = convert
        return convert

    return register


def _common_dtype(*operands: Any) -> torch.dtype:
    """Return the dtype in which operands meet, as torch promotes them."""
    return torch.result_type(*(value_of(each) if isinstance(each, fx.Node) else each for each in operands))


def _register_unary(target: Any, kind: str) -> None:
    @_converts(target)
    def convert(writer: Writer, node: Node) -> str:
        return writer.add(kind, [writer.operand(node.args[0], value_of(node).dtype)])


for _target, _kind in {
    aten.neg.default: "Neg",
    aten.exp.default: "Exp",
    aten.log.default: "Log",
    aten.sqrt.default: "Sqrt",
    aten.reciprocal.default: "Reciprocal",
    aten.sin.default: "Sin",
    aten.cos.default: "Cos",
    aten.tanh.default: "Tanh",
    aten.sigmoid.default: "Sigmoid",
    aten.erf.default: "Erf",
    aten.relu.default: "Relu",
    aten.abs.default: "Abs",
    aten.sign.default: "Sign",
    aten.floor.default: "Floor",
    aten.ceil.default: "Ceil",
}.items():
    _register_unary(_target, _kind)


def _register_binary(targets: Sequence[Any], kind: str) -> None:
    @_converts(*targets)
    def convert(writer: Writer, node: Node) -> str:
        first, second = node.args[:2]
        dtype = value_of(node).dtype
        right = writer.operand(second, dtype)
        factor = node.kwargs.get("alpha", 1)
        if factor != 1:
            right = writer.add("Mul", [right, writer.constant(factor, dtype)])
        return writer.add(kind, [writer.operand(first, dtype), right])


for _targets, _kind in (
    ((aten.add.Tensor, aten.add.Scalar), "Add"),
    ((aten.sub.Tensor, aten.sub.Scalar), "Sub"),
    ((aten.mul.Tensor, aten.mul.Scalar), "Mul"),
    ((aten.div.Tensor, aten.div.Scalar), "Div"),
    ((aten.maximum.default,), "Max"),
    ((aten.minimum.default,), "Min"),
):
    _register_binary(_targets, _kind)


@_converts(aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor)
def _power(writer: Writer, node: Node) -> str:
    base, exponent = node.args[:2]
    name, dtype = writer.operand(base, value_of(node).dtype), value_of(node).dtype
    if exponent == 2:
        return writer.add("Mul", [name, name])
    return writer.add("Pow", [name, writer.operand(exponent, dtype)])


@_converts(aten.rsqrt.default)
def _reciprocal_root(writer: Writer, node: Node) -> str:
    return writer.add("Reciprocal", [writer.add("Sqrt", [writer.operand(node.args[0])])])


def _register_comparison(targets: Sequence[Any], kind: str, *, negated: bool = False) -> None:
    @_converts(*targets)
    def convert(writer: Writer, node: Node) -> str:
        dtype = _common_dtype(*node.args[:2])
        if dtype == torch.bool and kind != "Equal":
            dtype = torch.int32
        output = writer.add(kind, [writer.operand(each, dtype) for each in node.args[:2]])
        return writer.add("Not", [output]) if negated else output


for _targets, _kind, _negated in (
    ((aten.eq.Tensor, aten.eq.Scalar), "Equal", False),
    ((aten.ne.Tensor, aten.ne.Scalar), "Equal", True),
    ((aten.lt.Tensor, aten.lt.Scalar), "Less", False),
    ((aten.le.Tensor, aten.le.Scalar), "LessOrEqual", False),
    ((aten.gt.Tensor, aten.gt.Scalar), "Greater", False),
    ((aten.ge.Tensor, aten.ge.Scalar), "GreaterOrEqual", False),
):
    _register_comparison(_targets, _kind, negated=_negated)


def _register_logical(targets: Sequence[Any], kind: str) -> None:
    @_converts(*targets)
    def convert(writer: Writer, node: Node) -> str:
        return writer.add(kind, [writer.operand(each, torch.bool) for each in node.args])


for _targets, _kind in (
    ((aten.logical_and.default, aten.bitwise_and.Tensor), "And"),
    ((aten.logical_or.default, aten.bitwise_or.Tensor), "Or"),
    ((aten.logical_xor.default, aten.bitwise_xor.Tensor), "Xor"),
    ((aten.logical_not.default, aten.bitwise_not.default), "Not"),
):
    _register_logical(_targets, _kind)


@_converts(aten.where.self)
def _where(writer: Writer, node: Node) -> str:
    condition, first, second = node.args
    dtype = value_of(node).dtype
    return writer.add(
        "Where",
        [writer.operand(condition, torch.bool), writer.operand(first, dtype), writer.operand(second, dtype)],
    )


@_converts(aten.clamp.default)
def _clamp(writer: Writer, node: Node) -> str:
    dtype = value_of(node).dtype
    name = writer.operand(node.args[0], dtype)
    lowest = node.args[1] if len(node.args) > 1 else node.kwargs.get("min")
    highest = node.args[2] if len(node.args) > 2 else node.kwargs.get("max")
    if lowest is not None:
        name = writer.add("Max", [name, writer.constant(lowest, dtype)])
    if highest is not None:
        name = writer.add("Min", [name, writer.constant(highest, dtype)])
    return name


@_converts(
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dims,
)
def _reshape(writer: Writer, node: Node) -> str:
    shape = list(value_of(node).shape)
    source = node.args[0]
    if isinstance(source, fx.Node) and list(value_of(source).shape) == shape:
        return writer.operand(source)
    return writer.add("Reshape", [writer.operand(source), writer.indices(shape)])


@_converts(aten.copy.default)
def _copied(writer: Writer, node: Node) -> str:
    return writer.operand(node.args[1], value_of(node).dtype)


@_converts(aten._to_copy.default)
def _cast(writer: Writer, node: Node) -> str:
    return writer.operand(node.args[0], value_of(node).dtype)


@_converts(aten.permute.default)
def _permute(writer: Writer, node: Node) -> str:
    source, order = node.args
    order = [axis % len(order) for axis in order]
    return writer.add("Transpose", [writer.operand(source)], perm=order)


@_converts(aten.expand.default)
def _expand(writer: Writer, node: Node) -> str:
    source = node.args[0]
    if list(value_of(source).shape) == list(value_of(node).shape):
        return writer.operand(source)
    return writer.add("Expand", [writer.operand(source), writer.indices(value_of(node).shape)])


@_converts(aten.repeat.default)
def _repeat(writer: Writer, node: Node) -> str:
    source, repeats = node.args
    name, rank = writer.operand(source), value_of(source).dim()
    if len(repeats) > rank:
        shape = [1] * (len(repeats) - rank) + list(value_of(source).shape)
        name = writer.add("Reshape", [name, writer.indices(shape)])
    return writer.add("Tile", [name, writer.indices(repeats)])


@_converts(aten.slice.Tensor)
def _slice(writer: Writer, node: Node) -> str:
    given = list(node.args)
    source, dim, start, end, step = given + [0, None, None, 1][len(given) - 1 :]
    size = value_of(source).shape[dim]
    begin = _bounded(0 if start is None else start, size)
    stop = _bounded(size if end is None else end, size)
    if begin == 0 and stop == size and step == 1:
        return writer.operand(source)
    lists = [writer.indices([each]) for each in (begin, stop, dim % value_of(source).dim(), step)]
    return writer.add("Slice", [writer.operand(source), *lists])


def _bounded(index: int, size: int) -> int:
    return min(max(index + size if index < 0 else index, 0), size)


@_converts(aten.select.int)
def _select(writer: Writer, node: Node) -> str:
    source, dim, index = node.args
    chosen = writer.constant(index % value_of(source).shape[dim], torch.int64)
    return writer.add("Gather", [writer.operand(source), chosen], axis=dim % value_of(source).dim())


@_converts(aten.index_select.default)
def _index_select(writer: Writer, node: Node) -> str:
    source, dim, index = node.args
    return writer.add(
        "Gather", [writer.operand(source), writer.operand(index)], axis=dim % value_of(source).dim()
    )


@_converts(aten.embedding.default)
def _embedding(writer: Writer, node: Node) -> str:
    return writer.add("Gather", [writer.operand(node.args[0]), writer.operand(node.args[1])], axis=0)


@_converts(aten.gather.default)
def _gather(writer: Writer, node: Node) -> str:
    source, dim, index = node.args[:3]
    return writer.add(
        "GatherElements", [writer.operand(source), writer.operand(index)], axis=dim % value_of(source).dim()
    )


@_converts(aten.cat.default)
def _concatenate(writer: Writer, node: Node) -> str:
    parts, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
    dtype, rank = value_of(node).dtype, value_of(node).dim()
    return writer.add("Concat", [writer.operand(part, dtype) for part in parts], axis=dim % rank)


@_converts(aten.constant_pad_nd.default)
def _pad(writer: Writer, node: Node) -> str:
    source, widths, *rest = node.args
    value, dtype, rank = rest[0] if rest else 0, value_of(node).dtype, value_of(node).dim()
    before, after = [0] * rank, [0] * rank
    for position in range(len(widths) // 2):
        axis = rank - 1 - position
        before[axis], after[axis] = widths[2 * position], widths[2 * position + 1]
    # Joined to constants, and cut where a width is negative: narrower compilers lack Pad.
    name, shape = writer.operand(source), list(value_of(source).shape)
    for axis in range(rank):
        cut = [max(-before[axis], 0), shape[axis] - max(-after[axis], 0)]
        if cut != [0, shape[axis]]:
            name = writer.add("Slice", [name, *(writer.indices([each]) for each in (*cut, axis, 1))])
            shape[axis] = cut[1] - cut[0]
        parts = []
        for width in (before[axis], None, after[axis]):
            if width is None:
                parts.append(name)
            elif width > 0:
                shape_of_part = [*shape[:axis], width, *shape[axis + 1 :]]
                parts.append(_filled(writer, shape_of_part, value, dtype))
        if len(parts) > 1:
            name = writer.add("Concat", parts, axis=axis)
            shape[axis] += max(before[axis], 0) + max(after[axis], 0)
    return name


def _filled(writer: Writer, shape: Sequence[int], value: Any, dtype: torch.dtype) -> str:
    scalar = writer.constant(value, dtype)
    return writer.add("Expand", [scalar, writer.indices(shape)]) if shape else scalar


@_converts(aten.full.default, aten.full_like.default)
def _full(writer: Writer, node: Node) -> str:
    return _filled(writer, value_of(node).shape, node.args[1], value_of(node).dtype)


@_converts(aten.scalar_tensor.default)
def _scalar(writer: Writer, node: Node) -> str:
    return writer.constant(node.args[0], value_of(node).dtype)


@_converts(aten.arange.start_step)
def _range(writer: Writer, node: Node) -> str:
    values = torch.arange(*node.args, dtype=value_of(node).dtype)
    return writer.constant(values.tolist(), values.dtype)


@_converts(aten._softmax.default)
def _softmax(writer: Writer, node: Node) -> str:
    return writer.add("Softmax", [writer.operand(node.args[0], value_of(node).dtype)], axis=node.args[1])


@_converts(aten._log_softmax.default)
def _log_softmax(writer: Writer, node: Node) -> str:
    return writer.add("LogSoftmax", [writer.operand(node.args[0], value_of(node).dtype)], axis=node.args[1])


def _reduced(writer: Writer, node: Node, kind: str, name: str) -> str:
    source = value_of(node.args[0])
    given = node.args[1] if len(node.args) > 1 else None
    axes = [given] if isinstance(given, int) else list(given or range(source.dim()))
    axes = [axis % source.dim() for axis in axes]
    kept = bool(node.args[2]) if len(node.args) > 2 else False
    if kind == "ReduceSum":  # the only one that takes its axes as an input in every version from 13 on
        return writer.add(kind, [name, writer.indices(axes)], keepdims=int(kept))
    return writer.add(kind, [name], axes=axes, keepdims=int(kept))


def _register_reduction(targets: Sequence[Any], kind: str) -> None:
    @_converts(*targets)
    def convert(writer: Writer, node: Node) -> str:
        return _reduced(writer, node, kind, writer.operand(node.args[0], value_of(node).dtype))


_register_reduction((aten.sum.dim_IntList,), "ReduceSum")
_register_reduction((aten.mean.dim, aten.mean.default), "ReduceMean")
_register_reduction((aten.amax.default,), "ReduceMax")
_register_reduction((aten.amin.default,), "ReduceMin")


@_converts(aten.any.dim, aten.any.dims)
def _any(writer: Writer, node: Node) -> str:
    # Truth values cannot be reduced, numbers can.
    number = writer.cast(writer.operand(node.args[0], torch.bool), torch.float32)
    return writer.cast(_reduced(writer, node, "ReduceMax", number), torch.bool)


@_converts(aten.cumsum.default)
def _cumulative_sum(writer: Writer, node: Node) -> str:
    axis = writer.constant(node.args[1], torch.int64)
    return writer.add("CumSum", [writer.operand(node.args[0], value_of(node).dtype), axis])


@_converts(aten.mm.default)
def _matrix_product(writer: Writer, node: Node) -> str:
    # Gemm reads a transposed operand as it lies: weights need no second copy.
    operands = [_untransposed(operand) for operand in node.args]
    names = [writer.operand(operand) for operand, _ in operands]
    flags = [int(transposed) for _, transposed in operands]
    right = operands[1][0]
    if not flags[1] and any(user.target is aten.permute.default for user in right.users):
        # OpenVINO 2026.4 takes one for the other where a square constant is read both ways.
        copy = writer.transposed_copy(right)
        if copy is not None:
            names[1], flags[1] = copy, 1
    if not any(flags):
        return writer.add("MatMul", names)
    return writer.add("Gemm", names, transA=flags[0], transB=flags[1])


def _untransposed(operand: Any) -> tuple[fx.Node, bool]:
    """Return what a product reads, and whether it reads it transposed."""
    if operand.target is aten.permute.default and [axis % 2 for axis in operand.args[1]] == [1, 0]:
        return operand.args[0], True
    return operand, False


@_converts(aten.bmm.default)
def _batched_product(writer: Writer, node: Node) -> str:
    return writer.add("MatMul", [writer.operand(each) for each in node.args])


@_converts(aten.convolution.default)
def _convolution(writer: Writer, node: Node) -> str:
    source, weight, bias, strides, padding, dilation, transposed, _, groups = node.args
    if transposed:
        raise OperatorError("a transposed convolution has no form in ONNX that is known here")
    inputs = [writer.operand(source), writer.operand(weight)]
    return writer.add(
        "Conv",
        [*inputs, *([writer.operand(bias)] if bias is not None else [])],
        strides=list(strides),
        pads=[*padding, *padding],
        dilations=list(dilation),
        group=groups,
    )
