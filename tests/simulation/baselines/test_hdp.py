import pytest

from lightning_hybridop.simulation.baselines.hdp import hdp
from lightning_hybridop.simulation.simulator import simulate
from tests.simulation.cases import cluster_costs, device, equal


def test_two_groups_by_hand() -> None:
    # The slow pair takes 3 * (1 + 1) seconds for a row, 3 in each stage; the fast one half of that.
    slow = equal(2, blocks=2)
    fast = [device(f"fast-{index}", blocks=2, speed=2.0) for index in range(2)]
    costs = cluster_costs([*slow, *fast], micro_batches=6, rows=1.0, transfer=0.0, adapter_bytes=0.0)

    baseline = hdp(costs)
    simulation = simulate(baseline.program)

    # Two rows: 6 + 3. Four rows: 3 + 3 * 1.5. One row more would take the slow group 12, the fast one 9.
    assert baseline.description == (
        "gpu-0: block 0, gpu-1: block 1 (2 rows of the mini-batch, micro-batches of 1); "
        "fast-0: block 0, fast-1: block 1 (4 rows of the mini-batch, micro-batches of 1)"
    )
    assert simulation.makespan == 9
    assert [figures.busy for figures in simulation.devices] == [6, 6, 6, 6]


def test_devices_that_only_run_forward_elsewhere_are_one_group_with_micro_batches_of_one_row() -> None:
    npus = [device(f"npu-{index}", blocks=2, speed=1.0 + index, zo=True) for index in range(2)]
    costs = cluster_costs([*npus, device("gpu", blocks=2, speed=2.0)], micro_batches=2, rows=4.0)

    baseline = hdp(costs)
    held = [figures.memory for figures in simulate(baseline.program).devices]

    assert (
        "npu-0: block 0, npu-1: block 1 (4 rows of the mini-batch, micro-batches of 1)"
        in baseline.description
    )
    assert "gpu: blocks 0-1 (4 rows of the mini-batch, micro-batches of 4)" in baseline.description
    # The NPUs take 1.125 + 0.75 (n - 1) for n rows, the other one 0.75 n.
    # A micro-batch of four rows keeps 1 byte per block, one of one row a quarter; npu-0 has two of them in flight.
    assert held == [0.5, 0.25, 2]


def test_every_group_takes_part() -> None:
    npu = device("npu", blocks=2, speed=0.001, zo=True)

    baseline = hdp(cluster_costs([npu, *equal(1, blocks=2)], micro_batches=2, rows=2.0))

    assert "npu: blocks 0-1 (1 rows of the mini-batch" in baseline.description
    assert "gpu-0: blocks 0-1 (3 rows of the mini-batch" in baseline.description


def test_fewer_rows_than_groups() -> None:
    devices = [device("slow", blocks=2, speed=0.5), device("fast", blocks=2, speed=2.0)]

    baseline = hdp(cluster_costs(devices, micro_batches=1, rows=1.0))

    assert baseline.program.devices == ("fast",)
    assert baseline.description.endswith("; without rows: slow")


def test_holders_of_the_same_blocks_all_reduce_their_adapters() -> None:
    # One device with all three blocks, and two that share them 1 + 2.
    pair = [device(f"pair-{index}", blocks=3, speed=2.0) for index in range(2)]
    costs = cluster_costs(
        [device("alone", blocks=3), *pair], micro_batches=4, transfer=1.0, hidden_bytes=4.0, adapter_bytes=2.0
    )

    simulation = simulate(hdp(costs).program)

    # Each block's 2 bytes take half a second.
    assert {c.devices: pytest.approx(c.end - c.start) for c in simulation.collectives} == {
        (0, 1): 0.5,
        (0, 2): 1.0,
    }


def test_blocks_go_where_memory_is() -> None:
    # Two devices of one kind whose first also has the embedding: 100 bytes, ten blocks' worth.
    costs = cluster_costs(
        equal(2, blocks=6, resident=10.0, kept=0.0, memory=160.0, ends=1.0), micro_batches=2
    )
    tight = cluster_costs(
        equal(2, blocks=6, resident=10.0, kept=0.0, memory=120.0, ends=1.0), micro_batches=2
    )

    assert max(figures.memory for figures in simulate(hdp(costs).program).devices) <= 160
    # Nothing fits: an even split, which goes over.
    assert [figures.memory for figures in simulate(hdp(tight).program).devices] == pytest.approx([130, 140])


def test_activations_count_for_every_micro_batch_in_flight() -> None:
    # The head is worth two blocks: 4 + 2 blocks would be balanced, but the first device keeps two micro-batches of 12
    # bytes beside its 240, and has 260. With 3 + 3 it takes 230 + 18, the other one 230 + 9 + 20.
    costs = cluster_costs(
        equal(2, blocks=6, resident=10.0, kept=3.0, memory=260.0, ends=2.0), micro_batches=2
    )

    assert [figures.memory for figures in simulate(hdp(costs).program).devices] == [248, 259]


def test_a_group_of_single_rows_keeps_as_little() -> None:
    # A micro-batch of four rows keeps 8 bytes per block, one of one row 2. The fast device takes three of four blocks,
    # 30 bytes and two micro-batches of 6; with four rows each it would have room for one block.
    npus = [
        device("fast", blocks=4, speed=3.0, zo=True, memory=45.0, resident=10.0, kept=8.0),
        device("slow", blocks=4, zo=True, resident=10.0, kept=8.0),
    ]

    baseline = hdp(cluster_costs(npus, micro_batches=2, rows=4.0))

    assert baseline.description.startswith("fast: blocks 0-2, slow: block 3 ")
    assert max(figures.memory for figures in simulate(baseline.program).devices) <= 45
