import time
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import yaml

from lightning_hybridop.devices.library import load_profiles
from lightning_hybridop.planning.cluster import (
    Cluster,
    ClusterError,
    Device,
    DeviceProfile,
    cluster_from_dict,
)
from lightning_hybridop.planning.plan import Estimator
from lightning_hybridop.planning.planner import plan_pipeline
from lightning_hybridop.planning.workload import Architecture, Workload, workload_from_dict
from lightning_hybridop.schedules.actions import Kind
from lightning_hybridop.simulation.baselines import BASELINES
from lightning_hybridop.simulation.compare import MethodResult, compare
from lightning_hybridop.simulation.predict import simulate_layout

CONF = Path(__file__).parents[2] / "conf"

WORKLOAD = Workload(
    architecture=Architecture(
        name="small",
        blocks=6,
        hidden=64,
        heads=4,
        key_value_heads=4,
        head_size=16,
        intermediate=256,
        vocabulary=1000,
    ),
    rows=8,
    length=64,
)
NPU = DeviceProfile(
    name="npu",
    forward_only=True,
    forward_tflops={"float16": 1.0},
    backward_tflops={"float16": 0.1},
    memory_gb=1.0,
    busy_w=20.0,
    idle_w=10.0,
)
GPU = DeviceProfile(
    name="gpu",
    forward_tflops={"float16": 2.0},
    backward_tflops={"float16": 2.0},
    memory_gb=1.0,
    busy_w=20.0,
    idle_w=10.0,
)


def cluster(*profiles: DeviceProfile) -> Cluster:
    devices = tuple(
        Device(name=f"{profile.name}-{index}", profile=profile) for index, profile in enumerate(profiles)
    )
    return Cluster(name="test", devices=devices)


def row(results: tuple[MethodResult, ...], method: str, with_npus: bool) -> MethodResult:
    (found,) = (r for r in results if r.method == method and r.with_npus == with_npus)
    return found


MIXED = cluster(NPU, NPU, GPU, GPU)


def test_every_method_has_its_rows() -> None:
    results = compare(MIXED, WORKLOAD, micro_batches=4, queries=2)

    assert [(r.method, r.with_npus) for r in results] == [
        *[(method, with_npus) for method in BASELINES for with_npus in (True, False)],
        ("HybridOP (tail)", True),
        ("HybridOP (paper)", True),
        ("HybridOP (free)", True),
        ("HybridOP", True),
        ("HybridOP (boundary)", True),
        ("HybridOP (adjoint)", True),
        ("HybridOP", False),
    ]
    for result in results:
        assert result.simulation is not None
        assert result.reason is None
        assert result.description
        assert result.over_memory == ()
        assert result.samples_per_second == pytest.approx(8 / result.simulation.makespan)
        # 10 W all the time on each device in use, and 10 W more while it is busy.
        span, used = result.simulation.makespan, len(result.simulation.devices)
        busy = sum(device.busy for device in result.simulation.devices)
        assert result.energy_per_sample == pytest.approx(10 * (span * used + busy) / 8)
        names = {device.name for device in result.simulation.devices}
        assert result.with_npus or names <= {"gpu-2", "gpu-3"}


@pytest.mark.parametrize(("method", "objective"), [("HybridOP", "makespan"), ("HybridOP (paper)", "paper")])
def test_hybridop_is_what_the_planner_makes_of_all_devices(method: str, objective: str) -> None:
    planned = plan_pipeline(
        MIXED,
        WORKLOAD,
        micro_batches=4,
        queries=2,
        exit_queries=1,
        objective=objective,  # type: ignore[arg-type]
        use_all=True,
    )
    expected = simulate_layout(planned.costs, planned.layout, planned.plan)

    results = compare(MIXED, WORKLOAD, micro_batches=4, queries=2, exit_queries=1)

    simulation = row(results, method, True).simulation
    assert simulation is not None
    assert simulation.makespan == expected.makespan
    assert simulation.timeline == expected.timeline
    assert len(simulation.devices) == 4


@pytest.mark.parametrize("estimator", get_args(Estimator))
def test_every_estimator_has_its_row_and_one_can_be_chosen_for_the_others(estimator: Estimator) -> None:
    results = compare(MIXED, WORKLOAD, micro_batches=4, queries=2, exit_queries=1, estimator=estimator)
    usual = compare(MIXED, WORKLOAD, micro_batches=4, queries=2, exit_queries=1)

    assert [result.method for result in results if result.method.endswith(("t)", "y)", "s)"))] == [
        f"HybridOP ({other})" for other in get_args(Estimator) if other != estimator
    ]
    chosen = row(results, "HybridOP", True).simulation
    assert chosen is not None
    assert (
        chosen == row(usual, "HybridOP" + (f" ({estimator})" if estimator != "loss" else ""), True).simulation
    )
    kinds = {timed.action.kind for timed in chosen.timeline if timed.stage < 2}
    assert (
        kinds
        == {
            "loss": {Kind.FORWARD, Kind.PERTURBED, Kind.EXIT},
            "boundary": {Kind.FORWARD, Kind.PERTURBED, Kind.EXIT, Kind.BACKWARD},
            "adjoint": {Kind.FORWARD, Kind.BACKWARD},
        }[estimator]
    )
    tail = row(results, "HybridOP (tail)", True).simulation
    assert tail == row(usual, "HybridOP (tail)", True).simulation


def test_hybridop_may_leave_devices_out() -> None:
    slow = replace(NPU, name="slow", forward_tflops={"float16": 0.001})

    results = compare(cluster(slow, GPU, GPU), WORKLOAD, micro_batches=4, queries=2)

    free, everyone = (row(results, method, True) for method in ("HybridOP (free)", "HybridOP"))
    assert free.simulation is not None
    assert everyone.simulation is not None
    assert "slow-0" not in {device.name for device in free.simulation.devices}
    assert "left out" in free.description
    assert len(everyone.simulation.devices) == 3


def test_all_methods_cut_the_mini_batch_alike_but_for_accpar() -> None:
    results = compare(MIXED, WORKLOAD, micro_batches=4, queries=2)

    for result in results:
        assert result.simulation is not None
        micro_batches = {timed.action.micro_batch for timed in result.simulation.timeline}
        if result.method == "HDP":  # groups have micro-batches of their own
            continue
        assert micro_batches == ({0} if result.method == "AccPar" else {0, 1, 2, 3}), result.method


def test_without_npus_there_is_one_row_for_each_method() -> None:
    results = compare(cluster(GPU, GPU), WORKLOAD, micro_batches=2, queries=2)

    assert [(r.method, r.with_npus) for r in results] == [
        (method, False) for method in [*BASELINES, "HybridOP"]
    ]


def test_what_cannot_run_says_why() -> None:
    silent = replace(NPU, backward_tflops={})

    mixed = compare(cluster(silent, GPU), WORKLOAD, micro_batches=2, queries=1)
    alone = compare(cluster(silent, silent), WORKLOAD, micro_batches=2, queries=1)

    for method in BASELINES:
        assert row(mixed, method, True).simulation is None
        assert "npu-0: the time of its backward is unknown" in str(row(mixed, method, True).reason)
        assert "No device is left that back-propagates" in str(row(alone, method, False).reason)
    assert "Found 1 device" in str(row(mixed, "Chimera", False).reason)
    assert row(mixed, "HybridOP", True).simulation is not None
    assert "need at least one of each" in str(row(alone, "HybridOP (tail)", True).reason)
    assert row(alone, "HybridOP", True).simulation is not None
    assert "No device is left that back-propagates" in str(row(alone, "HybridOP", False).reason)
    for estimator in ("boundary", "adjoint"):
        reason = str(row(alone, f"HybridOP ({estimator})", True).reason)
        assert reason == f"No device is left that sends the estimator {estimator} a gradient; add one."


def test_devices_with_too_little_memory_are_named() -> None:
    tiny = replace(GPU, name="tiny", memory_gb=0.0001)

    results = compare(cluster(tiny, GPU), WORKLOAD, micro_batches=2, queries=1)

    assert row(results, "GPipe", False).over_memory == ("tiny-0",)
    # HybridOP's planner leaves it out.
    assert row(results, "HybridOP", False).over_memory == ()
    assert "tiny-0" in row(results, "HybridOP", False).description


def test_nothing_fits() -> None:
    tiny = replace(GPU, name="tiny", memory_gb=0.0001)

    results = compare(cluster(tiny, tiny), WORKLOAD, micro_batches=2, queries=1)

    assert "memory" in str(row(results, "Asteroid", False).reason)
    assert "tiny-" in str(row(results, "HybridOP", False).reason)


def test_unknown_figures_are_an_error() -> None:
    with pytest.raises(ClusterError, match="memory is unknown"):
        compare(cluster(replace(GPU, memory_gb=None), GPU), WORKLOAD, micro_batches=2, queries=1)


def test_unknown_power_is_unknown_energy() -> None:
    results = compare(cluster(replace(GPU, busy_w=None), GPU), WORKLOAD, micro_batches=2, queries=1)

    assert row(results, "GPipe", False).energy_per_sample is None


@pytest.mark.parametrize(
    ("name", "workload", "queries"), [("paper_3b", "llama3_2_3b", 12), ("paper_8b", "llama3_1_8b", 20)]
)
def test_the_papers_clusters_take_seconds(name: str, workload: str, queries: int) -> None:
    found = cluster_from_dict(
        yaml.safe_load((CONF / "cluster" / f"{name}.yaml").read_text()), load_profiles()
    )
    work = workload_from_dict(yaml.safe_load((CONF / "workload" / f"{workload}.yaml").read_text()))
    start = time.perf_counter()

    results = compare(found, work, micro_batches=8, queries=queries)

    # 1 and 3 seconds on an idle core.
    assert time.perf_counter() - start < 15
    assert all(result.simulation is not None for result in results)
