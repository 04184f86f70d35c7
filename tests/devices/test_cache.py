"""The cache of measurements: whole files come back, anything else is measured again."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from lightning_hybridop.devices.cache import cache_folder, load_measured, measured_path, save_measured
from lightning_hybridop.devices.measure import Measured, Setting

SETTING = Setting(
    model="meta-llama/Llama-3.2-3B",
    device="cuda:0",
    device_name="Orin (nvgpu)",
    dtype="float16",
    rows=4,
    length=64,
    lora_rank=8,
    lora_targets=("q", "v"),
    threads=6,
)
MEASURED = Measured(
    setting=SETTING,
    block_forward=0.01,
    block_backward=0.02,
    embedding_forward=0.001,
    head_forward=0.03,
    head_backward=0.05,
    block_flops=1e9,
    head_flops=3e9,
    activation_elements=17.5,
    memory_bytes=5e9,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HYBRIDOP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_saved_measurement_comes_back(cache: Path) -> None:
    assert load_measured(SETTING) is None
    path = save_measured(MEASURED)

    assert path == measured_path(SETTING)
    assert path.parent == cache / "profiles"
    assert load_measured(SETTING) == MEASURED
    # Nothing of the writing is left behind.
    assert list(path.parent.iterdir()) == [path]


def test_what_a_forward_only_device_has_not_comes_back_as_none() -> None:
    measured = replace(MEASURED, block_backward=None, head_backward=None, activation_elements=None)
    save_measured(measured)

    assert load_measured(SETTING) == measured


def test_the_file_says_what_it_holds_and_replaces_an_older_one() -> None:
    save_measured(MEASURED)
    path = save_measured(replace(MEASURED, block_forward=0.5))

    assert path is not None
    assert path.name.endswith("_cuda-0_6-threads_meta-llama-Llama-3.2-3B_float16_4x64.yaml")
    assert yaml.safe_load(path.read_text())["block_forward"] == 0.5


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"device": "cuda:1"},
        {"device_name": "Thor"},
        {"dtype": "bfloat16"},
        {"rows": 8},
        {"length": 65},
        {"lora_rank": 16},
        {"lora_targets": ("q",)},
        {"threads": 2},
    ],
)
def test_a_measurement_of_another_setting_is_none_of_this_one(change: dict[str, object]) -> None:
    save_measured(MEASURED)

    assert load_measured(replace(SETTING, **change)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"- 1",
        b"block_forward: 1",
        b"!!python/object/apply:os.getcwd []",
        *(
            yaml.safe_dump(values).encode()
            for values in (
                {"setting": None},
                {"setting": {"model": "a"}},
            )
        ),
    ],
)
def test_a_damaged_file_counts_as_none(text: bytes) -> None:
    path = save_measured(MEASURED)
    assert path is not None
    path.write_bytes(text)

    assert load_measured(SETTING) is None
    save_measured(MEASURED)
    assert load_measured(SETTING) == MEASURED


@pytest.mark.parametrize("name", ["block_forward", "block_flops", "memory_bytes", "block_backward"])
@pytest.mark.parametrize("value", [-1, 0, "fast", [], float("nan")])
def test_a_file_with_a_figure_that_cannot_be_counts_as_none(name: str, value: object) -> None:
    path = save_measured(MEASURED)
    assert path is not None
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), name: value}))

    assert load_measured(SETTING) is None


def test_a_file_without_a_needed_figure_counts_as_none() -> None:
    path = save_measured(MEASURED)
    assert path is not None
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "block_forward": None}))

    assert load_measured(SETTING) is None


def test_a_cache_that_cannot_be_written_is_no_failure(cache: Path) -> None:
    cache.write_text("a file where the folder should be")

    assert save_measured(MEASURED) is None
    assert load_measured(SETTING) is None


def test_without_the_variable_the_cache_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYBRIDOP_CACHE")

    assert cache_folder().name == "lightning_hybridop"
    assert measured_path(SETTING).is_relative_to(cache_folder())
