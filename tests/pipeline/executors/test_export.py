"""Exported files: checked, of ONNX's own operators, and what they compute is torch's."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from lightning_hybridop.pipeline.anatomy import read_anatomy
from lightning_hybridop.pipeline.executors.export import export_stage
from lightning_hybridop.pipeline.stage import StageModel
from tests.pipeline.by_hand import cut
from tests.tiny import tiny_llama

ROWS, LENGTH = 3, 8


def exported(folder: Path, **options: Any) -> tuple[StageModel, dict[str, Any]]:
    stage = cut(tiny_llama(), [(0, 1), (1, 3), (3, 6)])[1]
    graphs = export_stage(stage, folder, rows=ROWS, length=LENGTH, **options)
    assert [graph.path.name for graph in graphs] == ["forward.onnx", "adjoint.onnx"]
    for graph in graphs:
        assert sum(graph.operators.values()) == len(onnx.load(graph.path).graph.node)
    return stage, json.loads((folder / "stage.json").read_text())


def run(folder: Path, name: str, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(folder / name)
    given = {each.name: values[each.name] for each in session.get_inputs()}
    outputs = session.run(None, given)
    return {each.name: output for each, output in zip(session.get_outputs(), outputs, strict=True)}


def inputs_of(stage: StageModel, described: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return a hidden state, a gradient, what the model makes of a mask, and the stage's adapters, by their names."""
    generator = np.random.default_rng(0)
    values = {
        each["name"]: generator.standard_normal(each["shape"]).astype("float32")
        for each in described["adjoint.onnx"]["inputs"]
    }
    causal = np.broadcast_to(np.tril(np.ones((LENGTH, LENGTH), dtype=bool)), (ROWS, 1, LENGTH, LENGTH)).copy()
    causal[1, :, :, 5:] = False
    angles = np.outer(np.arange(LENGTH), 10000.0 ** (-np.arange(0, 8, 2) / 8))
    angles = np.concatenate([angles, angles], axis=-1)[None].astype("float32")
    prefix = f"{stage.anatomy.blocks_name}."
    adapters = {
        name.removeprefix(prefix): parameter.detach().numpy()
        for name, parameter in stage.module.named_parameters()
        if name.removeprefix(prefix) in values
    }
    assert len(adapters) == 8
    return (
        values
        | adapters
        | {
            "attention_mask": causal,
            "position_embeddings_0": np.cos(angles),
            "position_embeddings_1": np.sin(angles),
        }
    )


def in_torch(stage: StageModel, values: Mapping[str, np.ndarray]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the blocks' output, and the gradients by the hidden state and by the adapters, by autograd."""
    tensors = {name: torch.from_numpy(array) for name, array in values.items()}
    hidden = received = tensors["hidden"].clone().requires_grad_()
    for block in stage.own_blocks().values():
        hidden = block(
            hidden,
            attention_mask=tensors["attention_mask"],
            position_embeddings=(tensors["position_embeddings_0"], tensors["position_embeddings_1"]),
        )
    hidden.backward(tensors["gradient"])
    assert received.grad is not None
    prefix = f"{stage.anatomy.blocks_name}."
    gradients = {
        name.removeprefix(prefix): parameter.grad
        for name, parameter in stage.module.named_parameters()
        if parameter.grad is not None
    }
    return hidden.detach(), received.grad, gradients


def close(found: np.ndarray, expected: Tensor, tolerance: float = 1e-4) -> bool:
    return bool(np.abs(found - expected.numpy()).max() <= tolerance * float(expected.abs().max()))


def test_both_graphs_compute_what_torch_does(tmp_path: Path) -> None:
    stage, described = exported(tmp_path)
    values = inputs_of(stage, described)
    output, gradient, gradients = in_torch(stage, values)
    assert close(run(tmp_path, "forward.onnx", values)["output"], output)
    found = run(tmp_path, "adjoint.onnx", values)
    assert close(found.pop("hidden_gradient"), gradient)
    assert found.keys() == {f"{name}.gradient" for name in gradients}
    assert all(close(found[f"{name}.gradient"], gradients[name]) for name in gradients)


@pytest.mark.parametrize("options", [{}, {"weights": "int8"}, {"dtype": "bfloat16"}])
def test_files_are_checked_of_the_default_domain_and_free_of_scattering(
    options: dict[str, Any], tmp_path: Path
) -> None:
    exported(tmp_path, **options)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "adjoint.onnx",
        "forward.onnx",
        "stage.json",
        "weights.bin",
    ]
    for name in ("forward.onnx", "adjoint.onnx"):
        onnx.checker.check_model(tmp_path / name, full_check=True)
        model = onnx.load(tmp_path / name, load_external_data=False)
        assert [each.domain for each in model.opset_import] == [""]
        assert model.opset_import[0].version >= 17
        assert not model.functions
        kinds = {node.op_type for node in model.graph.node}
        assert {node.domain for node in model.graph.node} == {""}
        assert not {kind for kind in kinds if kind.startswith("Scatter")}
        assert ("DequantizeLinear" in kinds) == ("weights" in options)
        outside = {
            entry.value
            for each in model.graph.initializer
            for entry in each.external_data
            if entry.key == "location"
        }
        assert outside == {"weights.bin"}
        # Every weight lies there: what is inside are small constants.
        assert all(np.prod(each.dims) < 64 for each in model.graph.initializer if not each.external_data)


def test_the_description_names_every_input_and_output(tmp_path: Path) -> None:
    _, described = exported(tmp_path)
    assert described["blocks"] == [1, 3]
    assert described["weights"] == "weights.bin"
    for name in ("forward.onnx", "adjoint.onnx"):
        session = onnxruntime.InferenceSession(tmp_path / name)
        for key, values in (("inputs", session.get_inputs()), ("outputs", session.get_outputs())):
            assert [(each["name"], each["shape"]) for each in described[name][key]] == [
                (each.name, each.shape) for each in values
            ]
    mask = next(each for each in described["forward.onnx"]["inputs"] if each["name"] == "attention_mask")
    assert mask == {"name": "attention_mask", "shape": [ROWS, 1, LENGTH, LENGTH], "dtype": "bool"}


def test_int8_files_are_smaller_and_near(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "rounded").mkdir()
    stage, described = exported(tmp_path / "whole")
    exported(tmp_path / "rounded", weights="int8")
    values = inputs_of(stage, described)
    output, _, _ = in_torch(stage, values)
    found = run(tmp_path / "rounded", "forward.onnx", values)["output"]
    assert close(found, output, 0.05)
    assert not close(found, output)
    stored = onnx.load(tmp_path / "rounded" / "forward.onnx", load_external_data=False).graph.initializer
    wide = {each.name: each.data_type for each in stored if each.external_data}
    assert wide["1.mlp.up_proj.weight"] == onnx.TensorProto.INT8
    assert wide["1.input_layernorm.weight"] == onnx.TensorProto.FLOAT


def test_a_model_has_its_own_blocks_again_afterwards(tmp_path: Path) -> None:
    module = tiny_llama()
    stage = StageModel(module, read_anatomy(module), first=0, last=3)
    before = stage.own_blocks()
    export_stage(stage, tmp_path, rows=1, length=4)
    after: Mapping[int, nn.Module] = stage.own_blocks()
    assert all(after[index] is block for index, block in before.items())
