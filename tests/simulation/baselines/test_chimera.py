from dataclasses import replace

import pytest

from lightning_hybridop.schedules.actions import Kind
from lightning_hybridop.simulation.baselines.chimera import chimera, orders
from lightning_hybridop.simulation.simulator import simulate
from tests.simulation.cases import cluster_costs, device, equal


@pytest.mark.parametrize(("devices", "expected"), [(2, 6), (4, 16), (6, 26), (8, 36)])
def test_as_many_micro_batches_as_devices(devices: int, expected: float) -> None:
    # The bubble rate of the original, (D - 2) / (3 M / 2 + D - 2) with b = 2 t.
    costs = cluster_costs(equal(devices, blocks=devices), micro_batches=devices)

    simulation = simulate(chimera(costs).program)

    assert simulation.makespan == expected
    assert 1 - simulation.comu_ti == pytest.approx((devices - 2) / (1.5 * devices + devices - 2))


@pytest.mark.parametrize("devices", [2, 4, 6])
@pytest.mark.parametrize("units", [1, 2, 3])
def test_concatenated_units_leave_no_gaps_if_backwards_are_as_fast_as_forwards(
    devices: int, units: int
) -> None:
    # (D - 2) / (2 M + D - 2): D - 2 idle slots, however many units there are.
    micro_batches = units * devices
    even = [replace(each, backward=each.forward) for each in equal(devices, blocks=devices)]

    simulation = simulate(chimera(cluster_costs(even, micro_batches=micro_batches)).program)

    assert simulation.makespan == 2 * micro_batches + devices - 2
    # Between D/2 + 1 and D micro-batches in flight.
    held = [figures.memory for figures in simulation.devices]
    assert held[0] == devices / 2 + 1
    assert max(held) == devices


@pytest.mark.parametrize("devices", [2, 4, 6])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5, 7, 13])
def test_any_number_of_micro_batches(devices: int, micro_batches: int) -> None:
    found = orders(devices, micro_batches)

    for order in found:
        assert sorted((str(action.kind), action.micro_batch) for action in order) == sorted(
            (kind, micro_batch) for kind in "FB" for micro_batch in range(micro_batches)
        )
        held = 0
        for action in order:
            held += 1 if action.kind is Kind.FORWARD else -1
            assert 0 <= held <= devices


def test_each_device_holds_two_stages() -> None:
    costs = cluster_costs(equal(2, blocks=3, resident=10.0, kept=0.0, ends=1.0), micro_batches=1)
    costs = replace(costs, devices=tuple(replace(each, head_kept=0.0) for each in costs.devices))

    baseline = chimera(costs)
    tied = chimera(replace(costs, tied_embeddings=True))

    assert baseline.description == "gpu-0: blocks 0-1 and block 2; gpu-1: block 2 and blocks 0-1"
    # All three blocks, and both the embedding and the head: once if they are the same matrix.
    assert [figures.memory for figures in simulate(baseline.program).devices] == [230, 230]
    assert [figures.memory for figures in simulate(tied.program).devices] == [130, 130]


def test_the_slowest_of_an_odd_number_stays_out() -> None:
    devices = [device(name, blocks=4, speed=speed) for name, speed in [("a", 2.0), ("b", 1.0), ("c", 3.0)]]

    baseline = chimera(cluster_costs(devices))

    assert baseline.program.devices == ("a", "c")
    assert (
        "; b stays out, the slowest of 3: two directions need an even number of devices"
        in baseline.description
    )


def test_both_holders_of_a_stage_all_reduce_its_adapters() -> None:
    costs = cluster_costs(
        equal(4, blocks=8), micro_batches=4, transfer=0.5, latency=0.25, hidden_bytes=2.0, adapter_bytes=3.0
    )

    simulation = simulate(chimera(costs).program)

    assert [collective.devices for collective in simulation.collectives] in (
        [(0, 3), (1, 2)],
        [(1, 2), (0, 3)],
    )
    for collective in simulation.collectives:
        # Both devices hold the same two stages of two blocks: 12 bytes, 6 hidden states, 0.5 s each; two messages.
        assert collective.end - collective.start == 6 * 0.5 + 2 * 0.25
