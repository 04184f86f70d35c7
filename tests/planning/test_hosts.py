"""Hosts files: what they may say, the cluster that they make, and where a plan's stages end up."""

from typing import Any

import pytest

from lightning_hybridop.devices.library import load_profiles
from lightning_hybridop.planning.cluster import ClusterError
from lightning_hybridop.planning.hosts import INSIDE, Hosts, cluster_of_hosts, hosts_from_dict, on_hosts
from lightning_hybridop.planning.planner import plan_pipeline
from lightning_hybridop.planning.workload import Adapter, Architecture, Workload

ATLAS = {
    "name": "atlas",
    "address": "10.0.0.1",
    "devices": [{"device": "npu:0", "profile": "atlas-200i-dk-a2"}],
}
NX = {
    "name": "nx",
    "ssh": "me@nx.lan",
    "devices": [
        {"device": "cuda:0", "profile": "jetson-orin-nx-16gb", "memory_gb": 12.5},
        {"profile": "jetson-orin-nano-8gb"},
        {"profile": "jetson-orin-nano-8gb"},
    ],
}


def hosts(**changed: Any) -> Hosts:
    return hosts_from_dict({"hosts": [ATLAS, NX], "efficiency": 0.4, **changed})


def test_a_hosts_file_is_a_cluster_of_all_devices() -> None:
    link = {"between": ["nx", "atlas"], "bandwidth_mbit_s": 100, "latency_ms": 2}
    cluster = cluster_of_hosts(hosts(links=[link], link={"bandwidth_mbit_s": 500}), load_profiles())

    names = ["atlas/npu:0", "nx/cuda:0", "nx/cpu", "nx/cpu-2"]
    assert [device.name for device in cluster.devices] == names
    assert [device.profile.name for device in cluster.devices] == [
        "atlas-200i-dk-a2",
        "jetson-orin-nx-16gb",
        "jetson-orin-nano-8gb",
        "jetson-orin-nano-8gb",
    ]
    assert cluster.devices[1].profile.memory_gb == 12.5
    assert cluster.devices[0].profile.efficiency == 0.4
    for name in names[1:]:
        assert cluster.link_between(name, "atlas/npu:0").bandwidth_mbit_s == 100
    for first, second in ((1, 2), (1, 3), (2, 3)):
        inside = cluster.link_between(names[first], names[second])
        assert (inside.bandwidth_mbit_s, inside.latency_ms) == tuple(INSIDE.values())
    assert cluster.link.bandwidth_mbit_s == 500


def test_defaults_of_a_host() -> None:
    found = hosts(master=None)

    assert found.meeting_place.name == "atlas"
    assert hosts(master="nx").meeting_place.reached_at == "nx"
    assert [host.reached_at for host in found.hosts] == ["10.0.0.1", "nx"]
    assert found.port == 29500


def test_a_plan_is_put_onto_hosts_and_devices() -> None:
    # Small enough that no device is in want of memory.
    architecture = Architecture(
        name="small", blocks=8, hidden=256, heads=4, key_value_heads=4, head_size=64, intermediate=512,
        vocabulary=1000, tied_embeddings=True,
    )  # fmt: skip
    adapter = Adapter(rank=8, targets=("q", "v"))
    workload = Workload(architecture=architecture, adapter=adapter, rows=8, length=32, dtype="float16")
    found = hosts()
    plan = plan_pipeline(
        cluster_of_hosts(found, load_profiles()), workload, micro_batches=4, use_all=True
    ).plan

    placed = on_hosts(plan, found)

    where = {(stage.host, stage.device) for stage in placed.stages}
    assert where == {("atlas", "npu:0"), ("nx", "cuda:0"), ("nx", "cpu")}
    assert (placed.stages[0].host, placed.stages[0].device, placed.stages[0].role) == (
        "atlas",
        "npu:0",
        "zo",
    )
    assert [stage.first for stage in placed.stages] == [stage.first for stage in plan.stages]


def changed(entry: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"hosts": [{**entry, **fields}]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, "hosts file: found NoneType"),
        ({"hosts": []}, "hosts: found none"),
        ({"hosts": [ATLAS, ATLAS]}, "two are called atlas"),
        ({"hosts": [ATLAS], "master": "nx"}, "master: there is no host nx; the hosts are atlas."),
        ({"hosts": [ATLAS], "port": 0}, "port: found 0"),
        ({"hosts": [ATLAS], "port": 70000}, "port: found 70000"),
        ({"hosts": [ATLAS], "links": 3}, "links: found int"),
        ({"hosts": [ATLAS], "prot": 3}, "did you mean port?"),
        ({"hosts": [ATLAS] * 65}, "hosts: found 65, expected at most 64"),
        (changed(ATLAS, devices=[]), r"hosts\[0\].devices: found none"),
        (changed(ATLAS, devices=[{"device": "gpu"}]), "found 'gpu', expected cpu, cuda:<number> or npu"),
        (changed(ATLAS, devices=[{"figures": {}}]), "write the figures themselves"),
        (changed(ATLAS, devices=[{"profile": 3}]), r"devices\[0\].profile: found 3"),
        (changed(ATLAS, name="a b"), r"hosts\[0\].name: found 'a b'"),
        (changed(ATLAS, name=None), r"hosts\[0\].name: found None"),
        (changed(ATLAS, address="$(reboot)"), r"hosts\[0\].address: found"),
        (changed(ATLAS, ssh="-oProxyCommand=reboot"), r"hosts\[0\].ssh: found"),
        (changed(ATLAS, interface="eth0;reboot"), r"hosts\[0\].interface: found"),
        (changed(ATLAS, python="-c"), r"hosts\[0\].python: found '-c', expected a path"),
        (
            changed(ATLAS, folder="~me/runs"),
            r"hosts\[0\].folder: found '~me/runs', expected the whole path, or",
        ),
        (changed(ATLAS, adress="10.0.0.1"), "did you mean address?"),
    ],
)
def test_a_wrong_hosts_file_is_refused_with_the_field(values: Any, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        hosts_from_dict(values)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"links": [{"between": ["nx", "moon"]}]}, r"links\[0\].between: found \['nx', 'moon'\]"),
        ({"links": [{"between": ["nx", "nx"]}]}, r"links\[0\].between: found nx twice"),
        ({"link": {"bandwidth_mbit_s": -1}}, "bandwidth_mbit_s: found -1"),
        ({"usable_memory": 2}, "usable_memory"),
        ({"hosts": [{**ATLAS, "devices": [{"device": "npu:0"}]}]}, "The device atlas/npu:0 has no profile"),
        ({"hosts": [{**ATLAS, "devices": [{"profile": "atlas"}]}]}, "there is no profile 'atlas'"),
    ],
)
def test_what_cannot_be_planned_for_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        cluster_of_hosts(hosts(**fields), load_profiles())
