import itertools
from dataclasses import replace

import pytest

from lightning_hybridop.planning.costs import PipelineCosts
from lightning_hybridop.simulation.baselines.accpar import (
    Partition,
    accpar,
    assignments,
    layers_of,
    partition_program,
    shares_of,
)
from lightning_hybridop.simulation.program import Collective
from lightning_hybridop.simulation.simulator import simulate
from tests.simulation.cases import check_first_order, cluster_costs, device, equal

ROWS, INPUTS, OUTPUTS = Partition.ROWS, Partition.INPUTS, Partition.OUTPUTS


def collectives(costs: PipelineCosts, *types: Partition) -> list[tuple[str, float]]:
    program = partition_program(costs, layers_of(costs), types, shares_of(costs))
    return [(task.name, task.seconds) for task in program.tasks if isinstance(task, Collective)]


# Two devices, 1 second per hidden state: an all-reduce takes 1, an all-gather 1/2, an exchange 1/4.
PAIR = cluster_costs(equal(2, blocks=2), micro_batches=1, rows=2.0, transfer=1.0, adapter_bytes=0.5)


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        # Data parallelism: both blocks' adapters at the end.
        ((ROWS, ROWS, ROWS, ROWS), [("all-reduce of adapters", 1.0)]),
        # Columns, then rows of the weights: one all-reduce each way. Nothing goes back to the embedding.
        (
            (OUTPUTS, INPUTS, OUTPUTS, OUTPUTS),
            [
                ("all-reduce of hidden state", 1.0),  # behind block 0
                ("all-gather of hidden state", 0.5),  # block 1 gives columns, the head needs all
                ("all-reduce of gradient", 1.0),  # in front of the head
                ("all-reduce of gradient", 1.0),  # in front of block 1
            ],
        ),
        (
            (ROWS, INPUTS, ROWS, ROWS),
            [
                ("exchange of hidden state", 0.25),
                ("all-reduce of hidden state", 1.0),
                ("all-gather of gradient", 0.5),
                ("all-reduce of adapters", 0.5),
            ],
        ),
        (
            (ROWS, OUTPUTS, ROWS, ROWS),
            [
                ("all-gather of hidden state", 0.5),
                ("exchange of hidden state", 0.25),
                ("exchange of gradient", 0.25),
                ("all-reduce of adapters", 0.5),
            ],
        ),
        (
            (INPUTS, INPUTS, INPUTS, ROWS),
            [
                *[("all-reduce of hidden state", 1.0)] * 3,
                ("all-gather of gradient", 0.5),
                ("all-gather of gradient", 0.5),
            ],
        ),
    ],
)
def test_what_is_sent(types: tuple[Partition, ...], expected: list[tuple[str, float]]) -> None:
    assert collectives(PAIR, *types) == expected


def test_gradients_come_back_from_the_last_layer_to_the_first() -> None:
    costs = cluster_costs(equal(2, blocks=3), micro_batches=1, rows=2.0, transfer=1.0)

    assert [name for name, _ in collectives(costs, ROWS, ROWS, INPUTS, OUTPUTS, ROWS)][-3:] == [
        "exchange of gradient",  # the head has rows, block 2 needs columns
        "all-reduce of gradient",  # of block 2's input
        "exchange of gradient",  # block 1 has columns, block 0 needs rows
    ]


@pytest.mark.parametrize("transfer", [0.0, 0.5, 4.0])
@pytest.mark.parametrize("adapter_bytes", [0.0, 1.0, 20.0])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_equals_trying_all_types(transfer: float, adapter_bytes: float, micro_batches: int) -> None:
    # On equal devices no one waits within a layer, so that the simulation says how long each assignment takes.
    costs = cluster_costs(
        equal(2, blocks=3, ends=0.5),
        micro_batches=micro_batches,
        rows=2.0,
        transfer=transfer,
        latency=0.125,
        adapter_bytes=adapter_bytes,
    )
    layers, shares = layers_of(costs), shares_of(costs)

    def seconds(types: tuple[Partition, ...]) -> float:
        return simulate(partition_program(costs, layers, types, shares)).makespan

    everything = [
        types for types in itertools.product(Partition, repeat=len(layers)) if types[-1] is not INPUTS
    ]
    best: dict[int, float] = {}
    for types in everything:
        count = types.count(ROWS)
        best[count] = min(best.get(count, float("inf")), seconds(types))

    found = {types.count(ROWS): estimate for estimate, types in assignments(costs, layers, shares)}

    # Adapters of all type I layers go together in the program, one by one in the estimate: latency counts more often.
    for count, value in best.items():
        assert value - 1e-9 <= found[count] <= value + 2 * 0.125 * count + 1e-9
    for estimate, types in assignments(costs, layers, shares):
        assert seconds(types) <= estimate + 1e-9


def test_a_fast_network_and_heavy_adapters_share_out_the_weights() -> None:
    costs = cluster_costs(equal(2, blocks=2), micro_batches=1, rows=2.0, transfer=1.0, adapter_bytes=100.0)

    assert "blocks 0-1: III II" in accpar(costs).description


def test_light_adapters_share_out_the_rows() -> None:
    costs = cluster_costs(equal(2, blocks=2), micro_batches=1, rows=2.0, transfer=1.0, adapter_bytes=0.01)

    baseline = accpar(costs)

    assert "blocks 0-1: I I" in baseline.description
    # Half of three blocks' work each, and an all-reduce of 0.02 hidden states.
    assert simulate(baseline.program).makespan == pytest.approx(6 / 2 + 0.02)


def test_weights_are_shared_out_where_memory_is_too_small_for_all_of_them() -> None:
    costs = cluster_costs(
        equal(2, blocks=4, resident=10.0, kept=1.0, memory=34.0),
        micro_batches=1,
        rows=2.0,
        transfer=1.0,
        adapter_bytes=0.01,
    )

    baseline = accpar(costs)
    memory = [figures.memory for figures in simulate(baseline.program).devices]

    # Two whole blocks and two halves are 30 bytes, four halves of activations 2; with three whole ones it would be 37.
    assert memory == [32, 32]


def test_what_does_not_fit_at_all_takes_the_least_memory() -> None:
    costs = cluster_costs(equal(2, blocks=4, resident=10.0, memory=5.0), micro_batches=1, rows=2.0)

    memory = [figures.memory for figures in simulate(accpar(costs).program).devices]

    assert memory == [20 + 2, 20 + 2]


def test_shares_are_in_proportion_to_speed() -> None:
    devices = [device("slow", blocks=2, speed=1.0), device("fast", blocks=2, speed=3.0)]
    costs = cluster_costs(devices, micro_batches=1, rows=2.0)

    shares = shares_of(costs)

    assert shares[INPUTS] == shares[OUTPUTS] == pytest.approx((0.25, 0.75))
    assert shares[ROWS] == (0.5, 0.5)  # whole rows: a half and one and a half become one and one
    check_first_order(costs, accpar(costs).program)


def test_tied_embeddings_are_held_once() -> None:
    costs = cluster_costs(equal(1, blocks=1, ends=1.0), micro_batches=1)

    assert simulate(accpar(costs).program).devices[0].memory == 200 + 11
    assert simulate(accpar(replace(costs, tied_embeddings=True)).program).devices[0].memory == 100 + 11
