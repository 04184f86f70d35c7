import copy
import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lightning_hybridop.pipeline import weights
from lightning_hybridop.pipeline.weights import (
    AwaitedParameter,
    WeightError,
    await_weights,
    check_materialised,
    materialise,
    parameters_on_meta,
    read,
    stored_tensors,
)


def layers(*, tied: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(5, 7))
    if tied:
        model[2].weight = model[0].weight
    return model


def saved(model: nn.Module, folder: Path, *, without: str = "") -> list[Path]:
    """Save a model's tensors in two files, tied ones once."""
    tensors = {name: value for name, value in model.named_parameters() if name != without}
    names = sorted(tensors)
    files = [folder / "first.safetensors", folder / "second.safetensors"]
    for file, part in zip(files, (names[::2], names[1::2]), strict=True):
        save_file({name: tensors[name].detach().contiguous() for name in part}, file)
    return files


def awaited(files: list[Path], *, tied: bool = False) -> nn.Sequential:
    with parameters_on_meta():
        model = layers(tied=tied)
    assert await_weights(model, stored_tensors(files)) == []
    return model


def test_headers_say_where_the_values_lie(tmp_path: Path) -> None:
    files = saved(layers(), tmp_path)

    found = stored_tensors(files)

    for name, value in layers().named_parameters():
        stored = found[name]
        start = stored.offset
        assert stored.file.read_bytes()[start : start + value.nbytes] == value.detach().numpy().tobytes()
        assert (stored.shape, stored.dtype) == (tuple(value.shape), torch.float32)


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("first", [None, torch.float32, torch.bfloat16])
def test_values_are_those_of_casting_the_whole_tensor(
    stored: torch.dtype,
    wanted: torch.dtype,
    first: torch.dtype | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights, "CHUNK", 16)  # 35 elements: two chunks and a bit
    value = torch.randn(5, 7, dtype=torch.float64).to(stored)
    save_file({"before": torch.ones(3), "value": value}, tmp_path / "file.safetensors")

    found = read(stored_tensors([tmp_path / "file.safetensors"])["value"], wanted, first=first)

    expected = value.to(first or wanted).to(wanted)
    assert found.dtype == wanted
    assert torch.equal(found, expected)


@pytest.mark.parametrize("value", [torch.tensor(3.0), torch.empty(0, 4), torch.tensor([True, False])])
def test_scalars_empty_tensors_and_booleans_are_read(value: torch.Tensor, tmp_path: Path) -> None:
    save_file({"value": value}, tmp_path / "file.safetensors")

    found = read(stored_tensors([tmp_path / "file.safetensors"])["value"], value.dtype)

    assert found.shape == value.shape
    assert torch.equal(found, value)


def test_awaited_parameters_become_the_stored_ones_in_place(tmp_path: Path) -> None:
    model = awaited(saved(layers(), tmp_path))
    before = dict(model.named_parameters())
    assert all(isinstance(parameter, AwaitedParameter) for parameter in before.values())
    assert model[1].running_mean is not None
    assert not model[1].running_mean.is_meta  # buffers are computed
    model[0].requires_grad_(False)

    size = materialise(model.parameters())

    assert size == sum(parameter.nbytes for parameter in layers().parameters())
    for name, expected in layers().named_parameters():
        parameter = model.get_parameter(name)
        assert parameter is before[name]
        assert type(parameter) is nn.Parameter
        assert parameter.requires_grad == (not name.startswith("0."))
        assert torch.equal(parameter, expected)
    check_materialised(model)
    assert materialise(model.parameters()) == 0


def test_values_are_cast_to_what_the_parameter_has_become_by_way_of_what_it_was(tmp_path: Path) -> None:
    model = awaited(saved(layers(), tmp_path))
    halves = copy.deepcopy(model)
    halves[0].to(torch.bfloat16)
    with parameters_on_meta():
        loaded_in_half = layers().to(torch.bfloat16)
    await_weights(loaded_in_half, stored_tensors(saved(layers(), tmp_path)))
    loaded_in_half.to(torch.float32)

    for each in (model, halves, loaded_in_half):
        materialise(each.parameters())

    weight = layers()[0].weight
    assert torch.equal(halves[0].weight, weight.bfloat16())
    assert torch.equal(halves[2].weight, layers()[2].weight)
    assert torch.equal(loaded_in_half[0].weight, weight.bfloat16().float())
    assert not torch.equal(loaded_in_half[0].weight, weight)


def test_tied_parameters_are_read_once_and_stay_tied(tmp_path: Path) -> None:
    model = awaited(saved(layers(tied=True), tmp_path), tied=True)
    assert model[2].weight is model[0].weight

    size = materialise(model.parameters())

    assert model[2].weight is model[0].weight
    assert torch.equal(model[2].weight, layers(tied=True)[0].weight)
    assert size == sum(parameter.nbytes for parameter in layers(tied=True).parameters())


def test_a_tied_parameter_is_found_under_any_of_its_names(tmp_path: Path) -> None:
    whole = dict(layers().named_parameters())
    whole.pop("0.weight")
    save_file({name: value.detach() for name, value in whole.items()}, tmp_path / "file.safetensors")

    model = awaited([tmp_path / "file.safetensors"], tied=True)
    materialise(model.parameters())

    assert torch.equal(model[0].weight, whole["2.weight"])


def test_tied_parameters_with_different_stored_values_are_refused(tmp_path: Path) -> None:
    files = saved(layers(), tmp_path)
    with parameters_on_meta():
        model = layers(tied=True)

    with pytest.raises(WeightError, match=r"0\.weight and 2\.weight are one tensor.*tie_word_embeddings"):
        await_weights(model, stored_tensors(files))


def test_only_the_parameters_given_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = awaited(saved(layers(), tmp_path))
    filled: list[str] = []
    fill = weights._fill

    def counting(file: object, tensor: torch.Tensor, stored: weights.StoredTensor) -> None:
        filled.append(stored.key)
        fill(file, tensor, stored)  # type: ignore[arg-type]

    monkeypatch.setattr(weights, "_fill", counting)

    materialise(model[0].parameters())

    assert sorted(filled) == ["0.bias", "0.weight"]
    assert isinstance(model[2].weight, AwaitedParameter)


def test_awaited_parameters_say_the_device_that_they_are_going_to_lie_on(tmp_path: Path) -> None:
    weight = awaited(saved(layers(), tmp_path))[0].weight

    assert weight.device == torch.device("cpu")
    assert weight.is_meta
    assert torch.zeros_like(weight, device="meta").device == torch.device("meta")


def test_a_module_that_is_put_away_before_its_values_are_read_can_still_be_read(tmp_path: Path) -> None:
    model = awaited(saved(layers(), tmp_path)).cpu()

    assert isinstance(model[0].weight, AwaitedParameter)
    materialise(model.parameters())
    assert torch.equal(model[0].weight, layers()[0].weight)


def test_what_the_files_lack_is_named(tmp_path: Path) -> None:
    files = saved(layers(), tmp_path, without="2.bias")
    with parameters_on_meta():
        model = layers()

    assert await_weights(model, stored_tensors(files)) == ["2.bias"]
    materialise(model.parameters())
    with pytest.raises(WeightError, match=r"2\.bias lies on `meta`.*load_on_demand"):
        check_materialised(model)


def test_a_stored_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    files = saved(layers(), tmp_path)
    with parameters_on_meta():
        model = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(5, 7))

    message = r"0\.weight has the shape \[7, 5\] in \w+\.safetensors, but the model expects \[7, 6\]"
    with pytest.raises(WeightError, match=message):
        await_weights(model, stored_tensors(files))


def test_a_value_asked_for_too_early_names_weight_and_remedy(tmp_path: Path) -> None:
    model = awaited(saved(layers(), tmp_path))

    with pytest.raises(WeightError, match=r"The values of 0\.weight were asked for.*materialise"):
        model.to("cpu")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    files = saved(layers(), tmp_path)
    model = awaited(files)
    files[0].unlink()

    with pytest.raises(
        WeightError, match=r"The file first\.safetensors cannot be read.*fetch the model again"
    ):
        stored_tensors(files)
    with pytest.raises(WeightError, match=r"cannot be read from first\.safetensors.*fetch the model again"):
        materialise(model.parameters())


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    files = saved(layers(), tmp_path)
    model = awaited(files)
    files[0].write_bytes(files[0].read_bytes()[:-1])

    with pytest.raises(WeightError, match=r"first\.safetensors in .* ends before the values of"):
        materialise(model.parameters())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        struct.pack("<Q", 2**62) + b"{}",
        struct.pack("<Q", 4) + b"text",
        struct.pack("<Q", 3) + b"[1]",
        struct.pack("<Q", 100)
        + json.dumps({"a": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}}).encode().ljust(100),
        struct.pack("<Q", 20) + json.dumps({"a": {}}).encode().ljust(20),
    ],
)
def test_a_file_that_is_no_safetensors_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(content)

    with pytest.raises(WeightError, match=r"bad\.safetensors in .* has no safetensors header"):
        stored_tensors([tmp_path / "bad.safetensors"])


def test_modules_that_share_a_parameter_still_do_on_meta() -> None:
    shared = nn.Parameter(torch.ones(3))

    with parameters_on_meta():
        first, second = nn.Module(), nn.Module()
        first.weight = shared
        second.weight = shared
    after = nn.Linear(2, 2)

    assert first.weight is second.weight
    assert first.weight.is_meta
    assert not after.weight.is_meta
