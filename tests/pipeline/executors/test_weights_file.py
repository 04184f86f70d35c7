from pathlib import Path

import pytest
import torch

from lightning_hybridop.pipeline.executors.quantisation import dequantised, quantised
from lightning_hybridop.pipeline.executors.weights_file import (
    TRANSPOSED,
    content_hash,
    open_weights,
    write_index,
    write_weights,
)

WEIGHT = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
TENSORS = {
    "square": WEIGHT,
    "flat": WEIGHT[:2].contiguous(),
    "bias": WEIGHT[0],
    "half": WEIGHT.bfloat16(),
    "counts": torch.arange(3),
    "truth": torch.tensor([True, False]),
    "number": torch.tensor(2.0),
    "nothing": torch.zeros(0, 4),
}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_index(write_weights(tmp_path / "w.bin", TENSORS, dtypes={}, axes={}, transposed=True))
    found = open_weights(tmp_path / "w.bin")
    assert found is not None
    for name in ("square", "flat", "bias", "counts", "truth", "number", "nothing"):
        assert torch.equal(found.read(name), TENSORS[name])
        assert found.read(name).dtype == TENSORS[name].dtype
    assert torch.equal(found.read("half"), TENSORS["half"].float())
    assert torch.equal(found.read("square" + TRANSPOSED), WEIGHT.T)
    assert {name for name in found.tensors if name.endswith(TRANSPOSED)} == {
        "square" + TRANSPOSED,
        "half" + TRANSPOSED,
    }


def test_dtypes_and_bytes_of_each(tmp_path: Path) -> None:
    found = write_weights(
        tmp_path / "w.bin",
        TENSORS,
        dtypes={"bias": torch.float16},
        axes={"flat": 0, "square": 1},
        transposed=True,
    )
    assert torch.equal(found.read("bias"), WEIGHT[0].half().float())
    for name, axis in (("flat", 0), ("square", 1)):
        assert found.tensors[name].dtype == "int8"
        assert torch.equal(found.read(name), dequantised(*quantised(TENSORS[name], axis=axis), axis=axis))
    assert torch.equal(found.read("square" + TRANSPOSED), found.read("square").T)


@pytest.mark.parametrize("axis", [0, 1])
def test_int8_is_off_by_at_most_half_a_step_of_its_channel(axis: int) -> None:
    rows = torch.stack([WEIGHT[0] * 100, WEIGHT[1] * 1e-6, torch.zeros(6)])
    weight = rows if axis == 0 else rows.T
    whole, scale = quantised(weight, axis=axis)
    step = weight.abs().amax(dim=1 - axis, keepdim=True) / 127
    assert whole.dtype == torch.int8
    assert scale.shape == (3,)
    error = (dequantised(whole, scale, axis=axis) - weight).abs()
    assert (error <= step * 0.501).all()
    assert error.max() > 0


def test_a_cut_file_counts_as_none(tmp_path: Path) -> None:
    path = tmp_path / "w.bin"
    assert open_weights(path) is None
    write_index(write_weights(path, TENSORS, dtypes={}, axes={}, transposed=False))
    assert open_weights(path) is not None
    path.write_bytes(path.read_bytes()[:100])
    assert open_weights(path) is None
    assert sorted(each.name for each in tmp_path.iterdir()) == ["w.bin", "w.bin.json"]


def test_the_hash_tells_values_names_shapes_and_dtypes_apart() -> None:
    weight = torch.zeros(2, 2)
    others = [
        {"a": weight + 1},
        {"b": weight},
        {"a": weight.view(4)},
        {"a": weight.to(torch.int32)},
        {"a": weight, "b": weight},
    ]
    hashes = {content_hash(each) for each in [{"a": weight}, *others]}
    assert len(hashes) == 6
    assert content_hash({"a": weight.clone()}) == content_hash({"a": weight})
