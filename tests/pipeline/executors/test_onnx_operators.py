"""Every operator in ONNX computes what torch does, and so does the padding that gradients of slices become."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_hybridop.pipeline.executors.attention import PlainAttention
from lightning_hybridop.pipeline.executors.decompositions import decompositions
from lightning_hybridop.pipeline.executors.onnx_model import onnx_model
from lightning_hybridop.pipeline.executors.onnx_operators import CONVERTERS
from lightning_hybridop.pipeline.executors.simplification import simplified
from lightning_hybridop.pipeline.executors.tracing import Traced
from lightning_hybridop.pipeline.executors.weights_file import WeightsFile

aten = torch.ops.aten

A = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
B = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
M = torch.randn(4, 5, generator=torch.Generator().manual_seed(2))
TRUE = A > 0
NUMBERS = torch.tensor([[2, 0, 1, 1], [1, 1, 0, 2]])

CASES: dict[str, tuple[Callable[..., Any], Sequence[Tensor]]] = {
    "arithmetic": (lambda a, b: (a + b * 2 - b / 3).sub(b, alpha=2) + torch.add(a, b, alpha=0.5) - 1, (A, B)),
    "mixed numbers": (lambda a, n: a * n[:1, :1].unsqueeze(0) + n.sum(), (A, NUMBERS)),
    "scalar overloads": (
        lambda a: aten.mul.Scalar(aten.add.Scalar(aten.sub.Scalar(aten.div.Scalar(a, 3), 2), 1), 4),
        (A,),
    ),
    "unary": (
        lambda a: torch.stack(
            [a.neg(), a.exp(), a.sin(), a.cos(), a.tanh(), a.sigmoid(), a.erf(), a.relu(), a.abs(), a.sign(), a.floor(), a.ceil()]
        ),
        (A,),
    ),
    "positive": (lambda a: a.abs().log() + a.abs().sqrt() + (a.abs() + 1).rsqrt() + (a.abs() + 1).reciprocal(), (A,)),
    "powers": (lambda a, b: a.pow(2) + a.pow(3) + a.abs().pow(b), (A, B)),
    "least and greatest": (lambda a, b: torch.maximum(a, b) - torch.minimum(a, 0 * b) + a.clamp(-0.5, 0.7) + a.clamp(min=0.1), (A, B)),
    "comparisons": (
        lambda a, b: torch.stack([a == b, a != b, a < b, a <= b, a > b, a >= b, a < 0, a <= 0, a > 0, a >= 0, a == 0, a != 0]),
        (A, A.where(TRUE, B)),
    ),
    "truth": (lambda a, b: torch.stack([a & b, a | b, a ^ b, ~a, a.logical_and(b), a.logical_or(b), a.logical_xor(b), a.logical_not()]), (TRUE, B > 0)),
    "numbers as truth": (lambda n: n.logical_not() | (n == True), (NUMBERS,)),  # noqa: E712
    "choices": (lambda c, a, b: torch.where(c, a, b) + torch.where(c, 0.0, 2.0) + a.masked_fill(c, 3.0), (TRUE, A, B)),
    "shapes": (lambda a: a.view(6, 4).reshape(2, 12).unsqueeze(1).squeeze(1).unflatten(1, (3, 4)).permute(2, 0, 1).squeeze(), (A,)),
    "one squeezed": (lambda a: aten.squeeze.dim(a[:, :1], 1) + aten.squeeze.dims(a[:, 1:2], [1]) + aten.squeeze.default(a[:, :1]), (A,)),
    "repetition": (lambda a: a.expand(3, 2, 3, 4) + a[:, :1].expand(2, 3, 4) + a.repeat(2, 1, 1, 1)[:1], (A,)),
    "parts": (lambda a: torch.cat([a[:, -2:], a[:, 1:3, :], a[..., ::2].repeat(1, 1, 2)[:, :1], a.select(1, -1).unsqueeze(1)], 1), (A,)),
    "splits": (lambda a: a.split([1, 3], dim=-1)[1] + a.chunk(2, dim=-1)[0][..., :1], (A,)),
    "lookups": (lambda a, n: a.index_select(2, n[0]) + torch.nn.functional.embedding(n, a[0]).sum(), (A, NUMBERS)),
    "lookups of elements": (lambda a, n: a[:, 0].gather(1, n), (A, NUMBERS)),
    "padding": (lambda a: torch.nn.functional.pad(a, (1, 2, 0, 3), value=7.0), (A,)),
    "cutting by padding": (lambda a: aten.constant_pad_nd.default(a, [-1, 2, 1, -1], 0.5), (A,)),
    "whole tensors": (lambda a: a + torch.full((3, 1), 2.5) + torch.zeros_like(a) + torch.ones(()) + torch.full_like(a, 3), (A,)),
    "scalars": (lambda a: a + aten.scalar_tensor.default(3.0), (A,)),
    "ranges": (lambda a: a + torch.arange(4) + torch.arange(1, 5) + torch.arange(0, 8, 2), (A,)),
    "softmax": (lambda a: a.softmax(-1) + a.log_softmax(1), (A,)),
    "reductions": (lambda a: a.sum(-1) + a.mean((1, 2), keepdim=True).squeeze(-1) + a.amax(-1) - a.amin(2, keepdim=False), (A,)),
    "all of it": (lambda a: a.sum() + a.mean() + a.sum((0, 1)).sum(), (A,)),
    "truth of rows": (lambda c: c.any(-1) | c.any(dim=(1, 2)).unsqueeze(-1), (TRUE,)),
    "running sums": (lambda a: a.cumsum(1), (A,)),
    "products": (lambda a, m: (a.reshape(6, 4) @ m) @ m.T @ (m @ m.T), (A, M)),
    "transposed products": (lambda a, m: m.T @ a.reshape(6, 4).T, (A, M)),
    "products of several": (lambda a, b: torch.bmm(a, b.transpose(1, 2)) + torch.matmul(a, b.mT), (A, B)),
    "casts": (lambda a, n: a.to(torch.int64) + n.sum() + (a > 0), (A, NUMBERS)),
    "copies": (lambda a: a.clone().detach() + aten.copy.default(torch.zeros_like(a), a), (A,)),
    "convolutions": (lambda a: torch.conv1d(a, a[:1, :, :2], None, 1, 1) + torch.conv1d(a, a[:1, :, 2:], a[0, 0, :1], 1, 1), (A,)),
    "normalisation": (lambda a, b: torch.nn.functional.layer_norm(a, (4,), b[0, 0], b[0, 1]) + a.var(-1, keepdim=True), (A, B)),
    "activations": (lambda a: torch.nn.functional.gelu(a) + torch.nn.functional.gelu(a, approximate="tanh") + torch.nn.functional.silu(a), (A,)),
}  # fmt: skip

SEEN: set[Any] = set()


def traced(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Traced:
    def flat(*given: Tensor) -> tuple[Tensor, ...]:
        output = function(*given)
        return output if isinstance(output, tuple) else (output,)

    with FakeTensorMode(allow_non_fake_inputs=True), PlainAttention():
        fake = [torch.empty(each.shape, dtype=each.dtype) for each in inputs]
        graph = make_fx(flat, decomposition_table=decompositions())(*fake)
    graph = simplified(graph)
    SEEN.update(node.target for node in graph.graph.nodes)
    names = tuple(f"input_{index}" for index in range(len(inputs)))
    outputs = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    return Traced(graph=graph, inputs=names, outputs=tuple(f"output_{i}" for i in range(len(outputs))))


def computed(function: Callable[..., Any], inputs: Sequence[Tensor], folder: Path) -> list[np.ndarray]:
    made = traced(function, inputs)
    model = onnx_model(made, WeightsFile(path=folder / "weights.bin", tensors={}))
    onnx.checker.check_model(model, full_check=True)
    assert {(each.domain, each.version) for each in model.opset_import} == {("", 17)}
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    given = {name: tensor.numpy() for name, tensor in zip(made.inputs, inputs, strict=True)}
    used = {each.name for each in session.get_inputs()}
    outputs: list[np.ndarray] = session.run(
        None, {name: array for name, array in given.items() if name in used}
    )
    return outputs


@pytest.mark.parametrize("name", CASES)
def test_it_computes_what_torch_does(name: str, tmp_path: Path) -> None:
    function, inputs = CASES[name]
    (found,) = computed(function, inputs, tmp_path)
    expected = function(*inputs)
    assert found.dtype == expected.numpy().dtype
    assert found.shape == expected.numpy().shape
    torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-5, rtol=1e-5)


def test_every_operator_is_among_them() -> None:
    for function, inputs in CASES.values():
        traced(function, inputs)
    assert {str(target) for target in CONVERTERS} - {str(target) for target in SEEN} == set()


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a slice": lambda a: a[:, 1:3].pow(2),
    "every other": lambda a: a[..., ::2].pow(2),
    "every other from the second on": lambda a: a[..., 1::2].pow(2),
    "every third of five": lambda a: a.reshape(-1)[2:17:3].pow(2),
    "the last one": lambda a: a[:, -1].pow(2),
    "all": lambda a: a[:].pow(2),
    "halves turned": lambda a: torch.cat([-a[..., 2:], a[..., :2]], -1).pow(2),
    "parts": lambda a: a.split([1, 3], dim=-1)[1].pow(2) * a.split([1, 3], dim=-1)[0],
    "normalised": lambda a: torch.nn.functional.layer_norm(a, (4,)).pow(3),
    "gelu": lambda a: torch.nn.functional.gelu(a, approximate="tanh"),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_made_of_these_operators(name: str, tmp_path: Path) -> None:
    function = GRADIENTS[name]

    def gradient(a: Tensor) -> Tensor:
        a = a.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(function(a).sum(), a)[0]

    (found,) = computed(gradient, [A], tmp_path)
    torch.testing.assert_close(torch.from_numpy(found), gradient(A), atol=1e-5, rtol=1e-5)


MASKS = {
    "none": None,
    "truth": torch.ones(5, 5, dtype=torch.bool).tril(),
    "truth with an empty row": torch.ones(5, 5, dtype=torch.bool).tril(diagonal=-1),
    "numbers": torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1) > 0, float("-inf")),
    "lowest numbers": torch.zeros(5, 5).masked_fill(
        torch.ones(5, 5).triu(1) > 0, torch.finfo(torch.float32).min
    ),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", [2, 1])
def test_attention_in_plain_operators_is_torchs(mask: str, heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 2, 5, 4, generator=generator)
    key, value = torch.randn(2, 2, heads, 5, 4, generator=generator)
    options: dict[str, Any] = {"attn_mask": MASKS[mask], "enable_gqa": heads == 1, "scale": 0.3}
    attention = torch.nn.functional.scaled_dot_product_attention
    expected = attention(query, key, value, **options)
    with PlainAttention():
        found = torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    causal = attention(query, query, query, is_causal=True)
    with PlainAttention():
        found = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    torch.testing.assert_close(found, causal, atol=1e-6, rtol=1e-5)
