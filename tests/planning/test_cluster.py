"""Clusters: what plain containers mean, and the sentence for each thing that can be wrong with them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_hybridop.devices.library import load_profiles
from lightning_hybridop.planning.cluster import (
    Cluster,
    ClusterError,
    Device,
    DeviceProfile,
    Link,
    cluster_from_dict,
    profile_from_dict,
)
from lightning_hybridop.planning.costs import pipeline_costs
from lightning_hybridop.planning.workload import Architecture, Workload

SHIPPED = Path(__file__).parents[2] / "conf" / "cluster"
NPU = DeviceProfile(
    name="npu",
    forward_only=True,
    forward_tflops={"float16": 4},
    backward_tflops={"float16": 0.5},
    memory_gb=4,
)
GPU = DeviceProfile(
    name="gpu",
    forward_tflops={"float16": 10, "bfloat16": 10},
    backward_tflops={"float16": 10, "bfloat16": 10},
    memory_gb=8,
    memory_bandwidth_gb_s=68,
)
PROFILES = {"npu": NPU, "gpu": GPU}
VALUES: dict[str, Any] = {
    "name": "desk",
    "devices": [{"profile": "npu", "count": 2}, {"profile": "gpu"}],
    "link": {"bandwidth_mbit_s": 100, "latency_ms": 2},
    "links": [{"between": ["npu-1", "gpu-0"], "bandwidth_mbit_s": 1000}],
    "usable_memory": 0.5,
    "efficiency": 0.4,
}
WORKLOAD = Workload(
    architecture=Architecture(
        name="tiny",
        blocks=3,
        hidden=64,
        heads=4,
        key_value_heads=2,
        head_size=16,
        intermediate=160,
        vocabulary=97,
    ),
    rows=4,
    length=8,
)


def desk(**changes: Any) -> Cluster:
    return cluster_from_dict({**VALUES, **changes}, PROFILES)


# What plain containers mean.


def test_a_cluster_from_plain_containers() -> None:
    slow, fast = Link(bandwidth_mbit_s=100, latency_ms=2), Link(bandwidth_mbit_s=1000)
    cluster = desk()

    assert cluster == Cluster(
        name="desk",
        devices=(
            Device(name="npu-0", profile=replace(NPU, efficiency=0.4)),
            Device(name="npu-1", profile=replace(NPU, efficiency=0.4)),
            Device(name="gpu-0", profile=replace(GPU, efficiency=0.4)),
        ),
        link=slow,
        links={("gpu-0", "npu-1"): fast},
        usable_memory=0.5,
    )
    assert cluster.link_between("npu-1", "gpu-0") == fast
    assert cluster.link_between("gpu-0", "npu-1") == fast
    assert cluster.link_between("gpu-0", "npu-0") == slow


def test_an_entry_may_have_a_name_and_figures_of_its_own() -> None:
    cluster = desk(
        devices=[
            {"profile": "gpu", "name": "left", "memory_gb": 16, "efficiency": 0.7},
            {"profile": "gpu", "name": "right", "count": 2, "forward_only": True},
        ],
        links=None,
    )

    assert [device.name for device in cluster.devices] == ["left", "right-0", "right-1"]
    assert cluster.devices[0].profile == replace(GPU, memory_gb=16, efficiency=0.7)
    assert cluster.devices[1].profile == replace(GPU, forward_only=True, efficiency=0.4)


def test_without_an_efficiency_each_profile_keeps_its_own() -> None:
    values = {name: value for name, value in VALUES.items() if name != "efficiency"}

    cluster = cluster_from_dict(values, {"npu": replace(NPU, efficiency=0.9), "gpu": GPU})
    assert [device.profile.efficiency for device in cluster.devices] == [0.9, 0.9, None]


def test_a_profile_that_knows_its_efficiency_keeps_it() -> None:
    cluster = cluster_from_dict(
        {**VALUES, "efficiency": 0.4}, {"npu": replace(NPU, efficiency=0.9), "gpu": GPU}
    )

    assert [device.profile.efficiency for device in cluster.devices] == [0.9, 0.9, 0.4]


def test_only_keeps_the_links_of_the_devices_that_stay() -> None:
    cluster = desk()

    assert [device.name for device in cluster.only(("gpu-0", "npu-0")).devices] == ["npu-0", "gpu-0"]
    assert cluster.only(("gpu-0", "npu-0")).links == {}
    assert cluster.only(("gpu-0", "npu-1")).links == cluster.links
    assert cluster.only(("npu-1",)).usable_memory == 0.5
    with pytest.raises(
        ClusterError, match=r"^The cluster desk has no device tpu; it has gpu-0, npu-0, npu-1\.$"
    ):
        cluster.only(("npu-1", "tpu"))
    with pytest.raises(ClusterError, match=r"^devices: found none, expected at least one;"):
        cluster.only(())


def test_a_link_takes_a_byte_eight_bits_of_its_bandwidth() -> None:
    link = Link(bandwidth_mbit_s=1000, latency_ms=0.5)

    assert link.seconds(125e6) == pytest.approx(1.0)
    assert link.seconds(0) == 0
    assert link.latency == 0.0005


def test_null_leaves_a_figure_unknown_and_other_fields_at_their_default() -> None:
    profile = profile_from_dict({"name": "new", "memory_gb": None, "forward_tflops": None, "title": None})

    assert profile == DeviceProfile(name="new")
    assert profile.memory_gb is None


@pytest.mark.parametrize(
    ("name", "devices", "kinds"),
    [
        ("paper_3b", 6, ["atlas-200i-dk-a2", "jetson-orin-nano-8gb", "jetson-orin-nx-16gb"]),
        (
            "paper_8b",
            10,
            ["atlas-200i-dk-a2", "jetson-orin-nano-8gb", "jetson-xavier-nx-16gb", "jetson-orin-nx-16gb"],
        ),
    ],
)
def test_shipped_clusters_are_those_of_the_paper(name: str, devices: int, kinds: list[str]) -> None:
    values = yaml.safe_load((SHIPPED / f"{name}.yaml").read_text())
    cluster = cluster_from_dict(values, load_profiles())

    assert cluster.name == name
    assert len(cluster.devices) == devices
    assert list(dict.fromkeys(device.profile.name for device in cluster.devices)) == kinds
    zo = [device.profile.forward_only for device in cluster.devices]
    assert sum(zo) == {"paper_3b": 2, "paper_8b": 4}[name]
    assert {device.profile.efficiency for device in cluster.devices} == {0.4}
    assert not cluster.emulate
    # What a plan needs of each device is known.
    costs = pipeline_costs(cluster, WORKLOAD, micro_batches=2, queries=1)
    assert [device.zo for device in costs.devices] == zo


# What is wrong with them.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devices": []}, "devices: found none, expected at least one; add a line with a profile."),
        ({"devices": None}, "devices: found none, expected at least one; add a line with a profile."),
        ({"devices": {"profile": "gpu"}}, "devices: found dict, expected a list of profiles."),
        ({"devices": ["gpu"]}, "devices[0]: found 'gpu', expected fields with values, such as {profile:"),
        (
            {"devices": [{"profile": "gpu"}, {"profile": "tpu"}]},
            "devices[1].profile: there is no profile 'tpu'; did you mean npu?",
        ),
        ({"devices": [{"count": 2}]}, "devices[0].profile: there is no profile None; choose from gpu, npu."),
        *(
            (
                {"devices": [{"profile": "gpu", "count": count}]},
                f"devices[0].count: found {count!r}, expected a whole number of at least 1.",
            )
            for count in (0, -1, 1.5, "2", True, None)
        ),
        (
            {"devices": [{"profile": "gpu", "memory": 16}]},
            "devices[0].memory: unknown field; did you mean memory_gb?",
        ),
        (
            {"devices": [{"profile": "gpu", "name": "a"}, {"profile": "npu", "name": "a"}]},
            "devices: two are called a; give one entry a `name`",
        ),
        ({"device": []}, "cluster.device: unknown field; did you mean devices?"),
        ({"bandwidth": 3}, "cluster.bandwidth: unknown field; known fields: name, devices, link,"),
        ({"link": {"bandwidth": 3}}, "link.bandwidth: unknown field; did you mean bandwidth_mbit_s?"),
        ({"link": 100}, "link: found int, expected fields with values."),
        *(
            (
                {"link": {"bandwidth_mbit_s": value}},
                f"link.bandwidth_mbit_s: found {value!r}, expected a number above 0.",
            )
            for value in (-100, 0, "fast", None, True, float("nan"), float("inf"))
        ),
        ({"link": {"latency_ms": -1}}, "link.latency_ms: found -1, expected a number of at least 0."),
        ({"links": {"between": ["npu-0", "gpu-0"]}}, "links: found dict, expected a list with one entry"),
        ({"links": ["fast"]}, "links[0]: found str, expected fields with values."),
        ({"links": [{"latency_ms": 1}]}, "links[0].between: found None, expected the names of two devices."),
        *(
            (
                {"links": [{"between": pair}]},
                f"links[0].between: found {pair!r}, expected the names of two devices.",
            )
            for pair in (["npu-0"], ["npu-0", "npu-1", "gpu-0"], "npu-0", [0, 1], ["npu-0", "npu-0"])
        ),
        (
            {"links": [{"between": ["npu-0", "tpu"]}]},
            "links: there is no device tpu; the devices are npu-0, npu-1, gpu-0.",
        ),
        (
            {"links": [{"between": ["npu-0", "npu-1"]}, {"between": ["npu-1", "npu-0"]}]},
            "links[1].between: the link between npu-1 and npu-0 is given twice.",
        ),
        (
            {"links": [{"between": ["npu-0", "npu-1"], "bandwidth_mbit_s": -5}]},
            "link.bandwidth_mbit_s: found -5, expected a number above 0.",
        ),
        ({"usable_memory": 1.5}, "usable_memory: found 1.5, expected a share of at most 1."),
        ({"usable_memory": 0}, "usable_memory: found 0, expected a number above 0."),
        ({"time_scale": -1}, "time_scale: found -1, expected a number above 0."),
        ({"emulate": "yes"}, "emulate: found 'yes', expected true or false."),
        ({"efficiency": 0}, "efficiency: found 0, expected a number above 0."),
    ],
)
def test_a_bad_cluster_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError) as error:
        desk(**change)

    assert str(error.value).startswith(message)


def test_what_is_no_cluster_or_has_no_name_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"^cluster: found NoneType, expected fields with values\.$"):
        cluster_from_dict(None, PROFILES)
    with pytest.raises(ClusterError, match=r"^cluster\.name: missing; it has no default"):
        cluster_from_dict({"devices": [{"profile": "gpu"}]}, PROFILES)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "a", "colour": 3}, "profile.colour: unknown field; known fields: name, title,"),
        (
            {"name": "a", "forward_tflop": {}},
            "profile.forward_tflop: unknown field; did you mean forward_tflops?",
        ),
        ({"title": "a"}, "profile.name: missing; it has no default, give it a value."),
        (
            {"name": "a", "forward_tflops": 4},
            "a.forward_tflops: found 4, expected a rate for each dtype, such as {float16: 4}.",
        ),
        (
            {"name": "a", "backward_tflops": {"float16": -4}},
            "a.backward_tflops.float16: found -4, expected a number above 0.",
        ),
        ({"name": "a", "memory_gb": -8}, "a.memory_gb: found -8, expected a number above 0."),
        ({"name": "a", "busy_w": "hot"}, "a.busy_w: found 'hot', expected a number above 0."),
        ({"name": "a", "forward_only": "no"}, "a.forward_only: found 'no', expected true or false."),
    ],
)
def test_a_bad_profile_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError) as error:
        profile_from_dict(values)

    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("figures", "dtype", "message"),
    [
        (
            {"memory_gb": None},
            "float16",
            "gpu-0: its memory is unknown; set memory_gb in the cluster's entry for gpu.",
        ),
        (
            {},
            "float32",
            "gpu: its forward rate in float32 is unknown (known: float16, bfloat16); set forward_tflops.float32,",
        ),
        (
            {"backward_tflops": {"bfloat16": 10}},
            "float16",
            "gpu: its backward rate in float16 is unknown (known: bfloat16); set backward_tflops.float16,",
        ),
        ({"forward_tflops": {}}, "float16", "gpu: its forward rate in float16 is unknown (known: none);"),
    ],
)
def test_a_plan_asks_for_figures_that_are_unknown(figures: dict[str, Any], dtype: str, message: str) -> None:
    cluster = desk(devices=[{"profile": "gpu", **figures}], links=None)

    with pytest.raises(ClusterError) as error:
        pipeline_costs(cluster, replace(WORKLOAD, dtype=dtype), micro_batches=2, queries=1)

    assert str(error.value).startswith(message)
