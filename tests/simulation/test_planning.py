import dataclasses
from typing import Any

import pytest

from lightning_hybridop.planning.cluster import Cluster, Device, DeviceProfile, Link
from lightning_hybridop.planning.infeasible import InfeasibleError
from lightning_hybridop.planning.plan import Estimator, PlanError
from lightning_hybridop.planning.planner import plan_pipeline
from lightning_hybridop.planning.workload import Architecture, Workload
from lightning_hybridop.simulation.planning import plan_by_simulation
from lightning_hybridop.simulation.predict import simulate_layout

ARCHITECTURE = Architecture(
    name="tiny",
    blocks=8,
    hidden=64,
    heads=4,
    key_value_heads=4,
    head_size=16,
    intermediate=128,
    vocabulary=100,
)
WORKLOAD = Workload(architecture=ARCHITECTURE, rows=4, length=64, dtype="float32")


def device(name: str, rate: float, *, forward_only: bool = False, memory_gb: float = 1.0) -> Device:
    return Device(
        name=name,
        profile=DeviceProfile(
            name=name,
            forward_only=forward_only,
            forward_tflops={"float32": rate},
            backward_tflops={"float32": rate},
            memory_gb=memory_gb,
        ),
    )


def cluster(npu_rate: float, **options: Any) -> Cluster:
    devices = (
        device("npu", npu_rate, forward_only=True),
        device("gpu-0", 0.01),
        device("gpu-1", 0.01, **options),
    )
    return Cluster(name="bench", devices=devices, link=Link(bandwidth_mbit_s=10_000))


def simulated(among: Cluster, micro_batches: int, *, use_all: bool) -> float:
    planned = plan_pipeline(among, WORKLOAD, micro_batches=micro_batches, use_all=use_all)
    return simulate_layout(planned.costs, planned.layout, planned.plan).makespan


@pytest.mark.parametrize("npu_rate", [0.0001, 0.003, 0.02, 1.0])
def test_nothing_that_was_planned_is_faster_in_simulation(npu_rate: float) -> None:
    whole = cluster(npu_rate)
    alone = whole.only(("gpu-0", "gpu-1"))
    best = plan_by_simulation(whole, WORKLOAD)

    everything = [
        simulated(among, count, use_all=use_all)
        for among in (whole, alone)
        for count in (1, 2, 4)
        for use_all in (True, False)
    ]
    assert best.simulation.makespan == pytest.approx(min(everything))
    assert best.pipeline.plan.micro_batches in (1, 2, 4)


@pytest.mark.parametrize("npu_rate", [0.003, 0.02, 1.0])
def test_the_boundary_is_never_slower_than_losses_or_than_bp_devices_alone(npu_rate: float) -> None:
    for queries in (1, 4, 12):
        loss, boundary = (
            plan_by_simulation(
                cluster(npu_rate), WORKLOAD, micro_batches=4, queries=queries, estimator=estimator
            ).simulation.makespan
            for estimator in ("loss", "boundary")
        )
        alone = simulated(cluster(npu_rate).only(("gpu-0", "gpu-1")), 4, use_all=True)

        assert boundary <= min(loss, alone) * (1 + 1e-9)


@pytest.mark.parametrize("estimator", ["boundary", "adjoint"])
def test_an_estimator_needs_a_device_that_back_propagates(estimator: Estimator) -> None:
    with pytest.raises(
        PlanError, match=f"estimator: found {estimator} for devices of which none back-propagates"
    ):
        plan_by_simulation(cluster(0.01).only(("npu",)), WORKLOAD, estimator=estimator)


def test_with_adjoints_a_plan_has_the_backward_of_its_zo_stages() -> None:
    plan = plan_by_simulation(
        cluster(0.02), WORKLOAD, micro_batches=4, estimator="adjoint", use_all=True
    ).pipeline.plan

    assert plan.estimator == "adjoint"
    # Without the embedding, which takes no time, and the head, which is elsewhere.
    assert [stage.backward for stage in plan.stages if stage.role == "zo"] == [2.2]


def test_a_device_that_only_slows_things_down_is_left_out_with_both_times() -> None:
    whole = cluster(0.0001)
    best = plan_by_simulation(whole, WORKLOAD)
    complete = min(simulated(whole, count, use_all=True) for count in (1, 2, 4))

    (sentence,) = best.pipeline.left_out
    assert sentence == (
        f"npu is left out: a mini-batch takes {best.simulation.makespan:.3f} s without it and {complete:.3f} s with every "
        "device in use."
    )


def test_a_fast_device_is_used() -> None:
    best = plan_by_simulation(cluster(0.02), WORKLOAD)

    assert best.pipeline.plan.stages[0].name == "npu"
    assert best.pipeline.left_out == ()


def test_the_number_of_micro_batches_asked_for_and_every_device_are_kept() -> None:
    best = plan_by_simulation(cluster(0.0001), WORKLOAD, micro_batches=2, use_all=True)

    assert best.pipeline.plan.micro_batches == 2
    assert len(best.pipeline.plan.stages) == 3


def test_a_model_that_fits_nowhere_is_refused() -> None:
    small = cluster(1.0)
    devices = tuple(
        dataclasses.replace(one, profile=dataclasses.replace(one.profile, memory_gb=1e-6))
        for one in small.devices
    )
    with pytest.raises(InfeasibleError, match="fits into memory"):
        plan_by_simulation(dataclasses.replace(small, devices=devices), WORKLOAD)
