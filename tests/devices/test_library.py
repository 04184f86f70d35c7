"""The device library: every file can be read, and every figure says where it is from."""

from importlib.resources import files

import pytest
import yaml

from lightning_hybridop.devices.library import load_profiles
from lightning_hybridop.planning.cluster import profile_from_dict

FIGURES = ("forward_tflops", "backward_tflops", "memory_gb", "memory_bandwidth_gb_s", "busy_w", "idle_w")
FOLDER = files("lightning_hybridop.devices") / "library"
FILES = sorted(entry.name for entry in FOLDER.iterdir())


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_a_profile_with_a_source_for_every_figure(name: str) -> None:
    values = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    profile = profile_from_dict(values)

    assert f"{profile.name}.yaml" == name
    assert profile.title
    # A figure that is unknown says so: nobody forgot it.
    assert set(FIGURES) <= set(values)
    known = {figure for figure in FIGURES if values[figure] is not None}
    assert set(profile.sources) == known
    assert all(len(source) > 20 for source in profile.sources.values())
    assert profile == load_profiles()[profile.name]


def test_the_library_holds_the_devices_of_the_paper_and_their_relatives() -> None:
    assert [f"{name}.yaml" for name in load_profiles()] == FILES
    assert set(load_profiles()) == {
        "atlas-200i-dk-a2",
        "atlas-200i-a2-20t",
        "jetson-orin-nano-4gb",
        "jetson-orin-nano-4gb-super",
        "jetson-orin-nano-8gb",
        "jetson-orin-nano-8gb-super",
        "jetson-orin-nx-8gb",
        "jetson-orin-nx-16gb",
        "jetson-xavier-nx-8gb",
        "jetson-xavier-nx-16gb",
        "jetson-agx-orin-64gb",
        "jetson-agx-xavier-32gb",
    }


@pytest.mark.parametrize("name", load_profiles())
def test_rates_are_dense_and_only_in_what_the_hardware_has(name: str) -> None:
    profile = load_profiles()[name]
    forward, backward = profile.forward_tflops, profile.backward_tflops

    assert profile.forward_only == name.startswith("atlas")
    if profile.forward_only:
        # The paper: 20 TOPS forward, 2.4 TOPS backward.
        assert {dtype: rate * 2.4 / 20 for dtype, rate in forward.items()} == pytest.approx(backward)
    else:
        assert forward == backward
    assert ("bfloat16" in forward) == ("orin" in name)
    assert set(forward) <= {"float16", "bfloat16"}


def test_nobody_can_change_the_library() -> None:
    with pytest.raises(TypeError):
        load_profiles()["new"] = load_profiles()["atlas-200i-dk-a2"]  # type: ignore[index]
