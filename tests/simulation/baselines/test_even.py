import pytest

from lightning_hybridop.simulation.baselines.gpipe import gpipe
from lightning_hybridop.simulation.baselines.one_forward_one_backward import one_forward_one_backward
from lightning_hybridop.simulation.simulator import simulate
from tests.simulation.cases import cluster_costs, device, equal


@pytest.mark.parametrize("method", [gpipe, one_forward_one_backward])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 1), (2, 4), (3, 5)])
def test_equal_devices_take_as_long_as_the_formula(method, stages: int, micro_batches: int) -> None:  # type: ignore[no-untyped-def]
    costs = cluster_costs(equal(stages, blocks=2 * stages), micro_batches=micro_batches)

    assert simulate(method(costs).program).makespan == 3 * 2 * (stages + micro_batches - 1)


def test_blocks_are_split_evenly_whatever_the_devices() -> None:
    devices = [device("npu", blocks=7, speed=0.01, zo=True), *equal(2, blocks=7, speed=5.0)]

    assert (
        gpipe(cluster_costs(devices)).description == "npu: blocks 0-2; gpu-0: blocks 3-4; gpu-1: blocks 5-6"
    )


def test_a_device_that_only_runs_forward_elsewhere_back_propagates_at_its_own_rate() -> None:
    npu = device("npu", blocks=2, zo=True, speed=0.1)
    costs = cluster_costs([npu, *equal(1, blocks=2)], micro_batches=1, queries=3)

    simulation = simulate(gpipe(costs).program)

    assert [figures.busy for figures in simulation.devices] == [30, 3]
    assert simulation.makespan == 33


@pytest.mark.parametrize(("method", "held"), [(gpipe, [5, 5, 5]), (one_forward_one_backward, [3, 2, 1])])
def test_memory(method, held: list[int]) -> None:  # type: ignore[no-untyped-def]
    costs = cluster_costs(equal(3, blocks=3, resident=1000.0, ends=1.0), micro_batches=5)

    memory = [figures.memory for figures in simulate(method(costs).program).devices]

    # One block each; the embedding and the head are worth 100 bytes, and the head keeps 10 bytes of a micro-batch.
    assert memory == [1100 + held[0], 1000 + held[1], 1100 + 11 * held[2]]


def test_transfers_take_time() -> None:
    costs = cluster_costs(equal(2, blocks=2), micro_batches=1, transfer=0.5, latency=0.25)

    assert simulate(gpipe(costs).program).makespan == 6 + 2 * 0.75
