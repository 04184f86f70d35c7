"""What executors promise beside the right numbers: what is compiled when, what is kept, what stays where it was."""

import copy
import importlib
import linecache
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_hybridop.estimation.directions import DirectionKey
from lightning_hybridop.estimation.grouped import multiplying_by_group
from lightning_hybridop.estimation.perturbation import perturbed
from lightning_hybridop.pipeline.executors import ExecutorError, graph_executor
from lightning_hybridop.pipeline.executors.configuration import configuration
from lightning_hybridop.pipeline.executors.onnxruntime import ONNXRuntime
from lightning_hybridop.pipeline.executors.openvino import OpenVINO
from lightning_hybridop.pipeline.executors.quantisation import dequantised, quantised
from tests.pipeline.executors.staged import (
    RUNTIMES,
    Staged,
    padded_step,
    plain_step,
    staged,
    worst_difference,
)
from tests.pipeline.test_families import CLASSIFICATION, FAMILIES, adapted_model
from tests.tiny import tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")


def on_runtime(name: str) -> bool:
    return any(f".layers.{block}." in name for block in (1, 2))


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Count what is traced and compiled inside the block."""
    done: list[str] = []
    trace, compiled = graph_executor.trace, ONNXRuntime.compile

    def counted_trace(*arguments: object, **options: object) -> object:
        done.append("traced")
        return trace(*arguments, **options)  # type: ignore[arg-type]

    def counted_compile(self: ONNXRuntime, path: Path, **folders: Path) -> object:
        done.append("compiled")
        return compiled(self, path, **folders)

    with monkeypatch.context() as patch:
        patch.setattr(graph_executor, "trace", counted_trace)
        patch.setattr(ONNXRuntime, "compile", counted_compile)
        yield done


@pytest.mark.parametrize("executor", RUNTIMES)
def test_a_tiny_llama_learns_on_it_as_in_torch(executor: str) -> None:
    made = staged(tiny_llama(), executor, needs_vjp=True)
    expected, found = made.both(padded_step())
    assert worst_difference(found, expected, on_runtime) < 1e-4


def test_changing_adapters_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = staged(tiny_llama(), "onnxruntime", needs_vjp=True)
    step = padded_step()
    before, _ = made.both(step)
    with counted(monkeypatch) as done:
        for module in (made.reference, made.stages[0].module, made.stages[1].module, made.stages[2].module):
            with torch.no_grad():
                for name, parameter in module.named_parameters():
                    if "lora_" in name and not parameter.is_meta:
                        parameter.add_(torch.arange(parameter.numel()).view_as(parameter).cos(), alpha=0.1)
        expected, found = made.both(step)
    assert done == []
    assert worst_difference(found, expected, on_runtime) < 1e-4
    assert worst_difference(before, expected, on_runtime) > 1e-2


def test_a_perturbation_is_seen_and_gone_afterwards() -> None:
    made = staged(tiny_llama(), "onnxruntime")
    step = padded_step()
    own = {
        name: p for name, p in made.stages[1].module.named_parameters() if on_runtime(name) and "lora" in name
    }
    same = {name: p for name, p in made.reference.named_parameters() if name in own}
    key = DirectionKey(seed=1, step=2, micro_batch=3, query=4)
    unmoved, before = made.hidden(step)
    with perturbed(own, key, 0.1), perturbed(same, key, 0.1):
        moved, during = made.hidden(step)
    assert relative(during, moved) < 1e-5
    assert relative(moved, unmoved) > 1e-3
    assert torch.equal(made.hidden(step)[1], before)


def test_groups_of_rows_are_multiplied_by_their_own_factors() -> None:
    made = staged(tiny_llama(), "onnxruntime")
    step = padded_step(rows=4)
    generator = torch.Generator().manual_seed(3)

    def factors(module: nn.Module) -> dict[str, nn.Linear]:
        return {
            name: layer
            for name, layer in module.named_modules()
            if isinstance(layer, nn.Linear) and "lora_" in name and on_runtime(name)
        }

    def moved(layer: nn.Linear) -> Tensor:
        return torch.randn(2, *layer.weight.shape, generator=generator)

    weights = {name: moved(layer) for name, layer in factors(made.reference).items()}
    ungrouped = made.hidden(step)[1]
    with nested(factors(made.reference), weights), nested(factors(made.stages[1].module), weights):
        expected, found = made.hidden(step)
    assert relative(found, expected) < 1e-5
    assert relative(ungrouped, expected) > 1e-2
    assert torch.equal(made.hidden(step)[1], ungrouped)


@contextmanager
def nested(layers: Mapping[str, nn.Linear], weights: Mapping[str, Tensor]) -> Iterator[None]:
    if not layers:
        yield
        return
    (name, layer), *others = layers.items()
    with multiplying_by_group(layer, weights[name]), nested(dict(others), weights):
        yield


def test_lengths_of_one_bucket_share_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    made = staged(tiny_llama(), "onnxruntime", lengths=(8, 16))
    with counted(monkeypatch) as done:
        for length, so_far in ((5, 1), (8, 1), (6, 1), (9, 2), (16, 2)):
            expected, found = made.hidden(padded_step(length=length))
            assert relative(found, expected) < 1e-5
            assert done.count("compiled") == so_far


def test_rows_longer_than_the_largest_bucket_are_refused() -> None:
    made = staged(tiny_llama(), "onnxruntime", lengths=(16, 8))
    with pytest.raises(ExecutorError, match=r"has rows of 17 tokens, but the longest .* compiled for is 16"):
        made.hidden(padded_step(length=17))


def test_no_mask_means_causal_and_can_be_padded() -> None:
    made = staged(tiny_llama(), "onnxruntime", needs_vjp=True)
    expected, found = made.both(plain_step())
    assert worst_difference(found, expected, on_runtime) < 1e-4


def test_blocks_that_see_everything_are_not_padded() -> None:
    tokens = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(1))

    def step(model: nn.Module) -> object:
        return model(input_ids=tokens, labels=torch.tensor([0, 1]))

    made = staged(adapted_model(FAMILIES["DistilBERT"], CLASSIFICATION), "onnxruntime")
    with pytest.warns(UserWarning, match="Padding would change what blocks 1-2 compute"):
        expected, found = made.hidden(step)
    assert relative(found, expected) < 1e-5


@pytest.mark.parametrize("executor", RUNTIMES)
def test_what_is_in_the_cache_is_not_compiled_again(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, step = tiny_llama(), padded_step()
    first = staged(copy.deepcopy(model), executor, needs_vjp=True).both(step)[1]

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("traced although the cache has it")

    monkeypatch.setattr(graph_executor, "trace", refuse)
    loaded: list[bool] = []
    compiled = OpenVINO.compile

    def noted(self: OpenVINO, path: Path, **folders: Path) -> object:
        made = compiled(self, path, **folders)
        loaded.append(made.from_cache)
        return made

    monkeypatch.setattr(OpenVINO, "compile", noted)
    again = staged(model, executor, needs_vjp=True).both(step)[1]
    assert all(torch.equal(again.gradients[name], gradient) for name, gradient in first.gradients.items())
    assert len(loaded) == (3 if executor == "openvino" else 0)
    assert all(loaded)


@pytest.mark.slow
def test_other_weights_and_other_constants_are_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    step = padded_step()
    staged(tiny_llama(), "onnxruntime").hidden(step)
    other = tiny_llama(seed=1)
    scaled = tiny_llama()
    for layer in scaled.modules():
        if hasattr(layer, "scaling") and isinstance(layer.scaling, dict):
            layer.scaling["default"] *= 2
    for model in (other, scaled):
        with counted(monkeypatch) as done:
            expected, found = staged(model, "onnxruntime").hidden(step)
        assert "traced" in done
        assert relative(found, expected) < 1e-5


def test_switching_adapters_off_is_followed() -> None:
    made = staged(tiny_llama(), "onnxruntime")
    step = padded_step()
    switched_on = made.hidden(step)[1]
    models = [made.reference, *(stage.module for stage in made.stages)]
    for model in models:
        model.base_model.disable_adapter_layers()  # type: ignore[union-attr, operator]
    expected, found = made.hidden(step)
    assert relative(found, expected) < 1e-5
    assert relative(switched_on, expected) > 1e-3


def test_names_stay_and_frozen_weights_of_the_blocks_go() -> None:
    model = tiny_llama()
    made = staged(model, "onnxruntime")
    module = made.stages[1].module
    with made.stages[1].whole():
        assert list(module.state_dict()) == list(model.state_dict())
    held = {name: parameter.is_meta for name, parameter in module.named_parameters() if on_runtime(name)}
    assert held
    assert all(is_meta == ("lora_" not in name) for name, is_meta in held.items())
    # What other modules use stays: here the final norm and, not cut away, nothing else.
    assert all(not tensor.is_meta for tensor in made.reference.parameters())


def test_only_inputs_are_kept_for_the_backward() -> None:
    made = staged(tiny_llama(), "onnxruntime", needs_vjp=True)
    step = padded_step()
    received = made.stages[0].hidden(lambda: step(made.stages[0].module), None).detach().requires_grad_()
    hidden = made.stages[1].hidden(lambda: step(made.stages[1].module), received)
    assert hidden.grad_fn is not None
    kept: Sequence[Tensor] = hidden.grad_fn.saved_tensors  # type: ignore[attr-defined]
    adapters = [
        p for name, p in made.stages[1].module.named_parameters() if on_runtime(name) and p.requires_grad
    ]
    assert [tuple(tensor.shape) for tensor in kept] == [
        tuple(received.shape),
        *(tuple(adapter.shape) for adapter in adapters),
    ]
    hidden.sum().backward()
    assert received.grad is not None
    with torch.no_grad():
        assert made.hidden(step)[1].grad_fn is None


@pytest.mark.parametrize("family", ["Llama", "GPT-2"])
def test_int8_weights_give_what_the_rounded_weights_give(family: str) -> None:
    made = staged(adapted_model(FAMILIES[family], "causal"), "onnxruntime", needs_vjp=True, weights="int8")
    step = padded_step()
    rough = made.both(step)[0]
    with torch.no_grad():
        for name, module in made.reference.named_modules():
            if "lora" in name or not any(f".{block}." in name for block in (1, 2)):
                continue
            if name.endswith("base_layer"):
                axis = 0 if isinstance(module, nn.Linear) else 1
                module.weight.copy_(dequantised(*quantised(module.weight, axis=axis), axis=axis))
    expected, found = made.both(step)
    where = lambda name: any(f".{block}." in name for block in (1, 2))  # noqa: E731
    assert worst_difference(found, expected, where) < 1e-4
    assert worst_difference(rough, expected, where) > 1e-4
    assert relative(*reversed(made.hidden(step))) < 1e-5


def rounded_to(dtype: torch.dtype, made: Staged) -> None:
    with torch.no_grad():
        for name, parameter in made.reference.named_parameters():
            if on_runtime(name) and "lora" not in name:
                parameter.copy_(parameter.to(dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_half_precision_gives_what_the_rounded_weights_give(dtype: str) -> None:
    made = staged(tiny_llama(), "openvino", needs_vjp=True, dtype=dtype)
    rounded_to(getattr(torch, dtype), made)
    expected, found = made.both(padded_step())
    # A processor without instructions for it computes with the rounded weights in float32.
    tolerance = 1e-4 if made.executor.runtime.precision == "f32" else 0.1  # type: ignore[attr-defined]
    assert worst_difference(found, expected, on_runtime) < tolerance


def test_a_block_may_get_another_mask_than_the_next() -> None:
    step = padded_step(length=20)  # longer than the window below
    family = FAMILIES["Gemma3"]
    options = {
        **family.options,
        "sliding_window": 4,
        "layer_types": ["full_attention", "sliding_attention"] * 3,
    }
    model = adapted_model(type(family)(config=family.config, options=options), "causal")
    made = staged(model, "onnxruntime")
    expected, found = made.hidden(step)
    assert relative(found, expected) < 1e-5


def test_the_users_autocast_does_not_reach_what_is_compiled() -> None:
    # An own length, so that this is the first trace of it, and later ones find it.
    model = staged(tiny_llama(), "onnxruntime")
    step = padded_step(length=9)

    with torch.autocast("cpu", torch.bfloat16):
        model.hidden(step)
    in_torch, on_runtime_BTD = model.hidden(step)

    assert relative(on_runtime_BTD, in_torch) < 1e-5


def test_a_damaged_graph_is_written_anew(cache: Path) -> None:
    step = padded_step()
    staged(tiny_llama(), "onnxruntime").hidden(step)
    for path in cache.rglob("*.onnx"):
        path.write_bytes(path.read_bytes()[:100])
    for path in cache.rglob("weights.bin.json"):
        path.write_text('{"a": {"b": 1}}', encoding="utf-8")

    in_torch, on_runtime_BTD = staged(tiny_llama(), "onnxruntime").hidden(step)

    assert relative(on_runtime_BTD, in_torch) < 1e-5


def test_the_graphs_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_executor, "MOST_COMPILED", 2)
    model = staged(tiny_llama(), "onnxruntime", lengths=(8, 16, 24))
    short, middle, long = (padded_step(length=length) for length in (7, 15, 23))
    for step in (short, middle, short, long):
        model.hidden(step)

    with counted(monkeypatch) as done:
        model.hidden(short)
        model.hidden(long)
    assert done == []
    with counted(monkeypatch) as done:
        model.hidden(middle)
    assert done == ["compiled"]


def test_int8_weights_beside_other_dtypes_are_other_files(cache: Path) -> None:
    for dtype in (None, "bfloat16"):
        staged(tiny_llama(), "openvino", dtype=dtype, weights="int8")

    assert len(list(cache.rglob("weights.bin"))) == 2


BLOCK = """
from torch import nn


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, hidden_BTD):
        return hidden_BTD {operator} self.scale
"""


def test_a_block_whose_code_or_constants_change_has_another_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    texts = []
    for operator, scale in (("*", 2.0), ("*", 2.0), ("*", 3.0), ("+", 2.0)):
        (tmp_path / "scaled_block.py").write_text(BLOCK.format(operator=operator), encoding="utf-8")
        sys.modules.pop("scaled_block", None)
        linecache.clearcache()
        block = importlib.import_module("scaled_block").Scaled(torch.tensor(scale))
        texts.append(configuration(block))
    sys.modules.pop("scaled_block")

    assert texts[0] == texts[1]
    assert len(set(texts)) == 3
