"""What a runtime cannot run is refused with one sentence, before training where the model shows it."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from lightning_hybridop.pipeline.executors import ExecutorError
from lightning_hybridop.pipeline.executors.onnxruntime import ONNXRuntime
from lightning_hybridop.pipeline.stand_ins import StageInputError, count_tokens_in
from tests.pipeline.executors.staged import padded_step, plain_step, staged
from tests.pipeline.test_families import FAMILIES, Family, adapted_model
from tests.tiny import tiny_llama

pytestmark = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]


def test_an_operator_without_a_form_names_itself_and_the_block() -> None:
    # Its rotary embedding multiplies complex numbers.
    with pytest.raises(
        ExecutorError, match=r"On ONNX Runtime .*, block 1 cannot run: .*complex64.*executor=torch"
    ):
        staged(adapted_model(FAMILIES["Llama4"], "causal"), "onnxruntime")


class Sorting(nn.Module):
    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        return hidden_BTD.sort(dim=-1).values


def test_an_operator_of_one_block_alone_is_found_in_it() -> None:
    model = tiny_llama()
    model.base_model.model.model.layers[2].mlp = Sorting()  # type: ignore[union-attr, index]
    with pytest.raises(
        ExecutorError, match=r"block 2 cannot run: the operator aten.sort.default has no form in ONNX"
    ):
        staged(model, "onnxruntime")


def test_blocks_whose_operators_depend_on_values_are_refused() -> None:
    with pytest.raises(ExecutorError, match="block 1 cannot run: its operators cannot be traced"):
        staged(adapted_model(FAMILIES["Mixtral"], "causal"), "onnxruntime")


def test_what_the_runtime_itself_lacks_names_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = ONNXRuntime.compile

    def lacking(self: ONNXRuntime, path: Path, **folders: Path) -> object:
        if b"2.mlp.up_proj" in path.read_bytes():
            raise ExecutorError("it has no Gemm")
        return compiled(self, path, **folders)

    monkeypatch.setattr(ONNXRuntime, "compile", lacking)
    model = tiny_llama()
    # Blocks of one kind are tried once: this one is another.
    model.base_model.model.model.layers[2].mlp.extra = 1  # type: ignore[union-attr, index]
    with pytest.raises(ExecutorError, match=r"block 2 cannot run: it has no Gemm; use executor=torch"):
        staged(model, "onnxruntime")


@pytest.mark.parametrize("executor", ["openvino", "onnxruntime"])
def test_a_missing_runtime_names_its_extra(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = importlib.import_module

    def without(name: str) -> Any:
        if name == executor:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return imported(name)

    monkeypatch.setattr(importlib, "import_module", without)
    extra = {"openvino": "openvino", "onnxruntime": "onnx"}[executor]
    with pytest.raises(
        ExecutorError,
        match=rf"executor={executor} needs the package {executor}.*lightning-hybridop\[{extra}\]",
    ):
        staged(tiny_llama(), executor)


def test_an_adjoint_on_a_runtime_without_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ONNXRuntime, "has_vjp", False)
    with pytest.raises(
        ExecutorError, match="computes no vector-Jacobian products, which estimator=adjoint needs"
    ):
        staged(tiny_llama(), "onnxruntime", needs_vjp=True)
    staged(tiny_llama(), "onnxruntime")


def test_a_precision_that_the_runtime_lacks_is_refused() -> None:
    with pytest.raises(ExecutorError, match="computes in float32, found dtype bfloat16"):
        staged(tiny_llama(), "onnxruntime", dtype="bfloat16")


def test_an_unknown_executor_is_refused() -> None:
    with pytest.raises(ExecutorError, match="executor: found 'tvm', expected openvino or onnxruntime"):
        staged(tiny_llama(), "tvm")


def test_dropout_of_adapters_names_the_block() -> None:
    with pytest.raises(
        ExecutorError, match=r"lora_dropout.default of block 1 drops .* set that dropout to 0"
    ):
        staged(tiny_llama(dropout=0.1), "onnxruntime")


def test_dropout_by_a_number_names_the_block() -> None:
    options = {**FAMILIES["OPT"].options, "dropout": 0.1}
    with pytest.raises(ExecutorError, match="dropout of block 1 drops"):
        staged(adapted_model(Family(config="OPT", options=options), "causal"), "onnxruntime")


def test_hooks_are_refused() -> None:
    model = tiny_llama()
    layer = model.base_model.model.model.layers[2].mlp  # type: ignore[union-attr, index]
    layer.register_forward_hook(lambda *_: None)
    with pytest.raises(ExecutorError, match="mlp of block 2 has a forward hook"):
        staged(model, "onnxruntime")


def test_a_model_that_works_between_its_blocks_is_refused() -> None:
    model = tiny_llama()

    class Doubling(nn.ModuleList):
        def __getitem__(self, index: Any) -> Any:
            return (
                [twice(block) for block in self] if isinstance(index, slice) else super().__getitem__(index)
            )

    def twice(block: nn.Module) -> Any:
        return lambda hidden_BTD, **keywords: block(2 * hidden_BTD, **keywords)

    decoder: Any = model.base_model.model.model  # type: ignore[union-attr]
    decoder.layers = Doubling(decoder.layers)
    with pytest.raises(StageInputError, match="changes its hidden state before block 1 of this stage"):
        staged(model, "onnxruntime")


def test_a_cache_is_left_alone_while_it_is_empty_and_refused_once_it_counts() -> None:
    made = staged(tiny_llama(), "onnxruntime")
    expected, found = made.hidden(plain_step(use_cache=True))
    assert float((found - expected).abs().max()) < 1e-4

    def generating(model: nn.Module) -> object:
        cache = DynamicCache()
        count_tokens_in(cache)
        return padded_step_with(cache)(model)

    with pytest.raises(
        StageInputError, match="key-value cache, which blocks on an inference runtime neither read"
    ):
        made.stages[1].hidden(lambda: generating(made.stages[1].module), torch.zeros(2, 7, 16))


def padded_step_with(cache: DynamicCache) -> Any:
    return plain_step(cache=cache)


def test_a_step_that_ended_among_the_blocks_leaves_nothing_behind() -> None:
    made = staged(tiny_llama(), "onnxruntime")
    step = padded_step()
    expected = made.hidden(step)[1]
    made.stages[1].own_blocks()[1](torch.zeros(1, 3, 16))  # noted, and never run
    assert torch.equal(made.hidden(step)[1], expected)
