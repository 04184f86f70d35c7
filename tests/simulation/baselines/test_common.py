import itertools
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybridop.planning.costs import Assignment, LinkTimes, layout_bytes, layout_times
from lightning_hybridop.simulation.baselines.common import (
    all_gather_seconds,
    all_reduce_seconds,
    best_split,
    exchange_seconds,
    largest_remainders,
    only_devices,
    range_bytes,
    range_seconds,
)
from tests.simulation.cases import cluster_costs, equal


def test_collectives_on_a_ring() -> None:
    # A hidden state of 8 bytes takes 2 seconds, and each message half a second.
    costs = cluster_costs(equal(4, blocks=1), transfer=2.0, latency=0.5, hidden_bytes=8.0)
    devices = (0, 1, 2, 3)

    # 16 bytes take 4 seconds; a ring moves 2 * 3 / 4 of them in 6 messages one after another.
    assert all_reduce_seconds(costs, devices, 16.0) == 4 * 6 / 4 + 6 * 0.5
    assert all_gather_seconds(costs, devices, 16.0) == 4 * 3 / 4 + 3 * 0.5
    # Each device sends three others 1 / 16 each.
    assert exchange_seconds(costs, devices, 16.0) == 4 * 3 / 16 + 3 * 0.5
    assert all_reduce_seconds(costs, (2,), 16.0) == 0


def test_the_slowest_link_of_those_that_take_part_counts() -> None:
    costs = cluster_costs(equal(3, blocks=1), transfer=2.0)
    links = [list(row) for row in costs.links]
    links[1][2] = links[2][1] = LinkTimes(transfer=6.0)
    costs = type(costs)(
        devices=costs.devices,
        links=tuple(map(tuple, links)),
        micro_batches=1,
        queries=0,
        hidden_bytes=1.0,
    )

    assert all_reduce_seconds(costs, (0, 1), 1.0) == 2
    assert all_reduce_seconds(costs, (1, 2), 1.0) == 6


def test_devices_are_picked_with_their_links() -> None:
    costs = cluster_costs(equal(3, blocks=1))
    links = tuple(tuple(LinkTimes(transfer=10 * a + b) for b in range(3)) for a in range(3))
    costs = type(costs)(devices=costs.devices, links=links, micro_batches=1, queries=0)

    found = only_devices(costs, [2, 0])

    assert [device.name for device in found.devices] == ["gpu-2", "gpu-0"]
    assert [[link.transfer for link in row] for row in found.links] == [[22, 20], [2, 0]]


@pytest.mark.parametrize("tied", [False, True])
def test_ranges_cost_what_layouts_of_them_cost(tied: bool) -> None:
    costs = cluster_costs(equal(3, blocks=5, resident=7.0, ends=0.5), tied_embeddings=tied)
    for bounds in [(0, 5), (0, 2, 5), (0, 1, 4, 5)]:
        layout = [
            Assignment(device=index, first=first, last=last)
            for index, (first, last) in enumerate(itertools.pairwise(bounds))
        ]
        times, _ = layout_times(costs, layout)
        held = layout_bytes(costs, layout)
        for part, stage, kept in zip(layout, times, held, strict=True):
            device = costs.devices[part.device]
            assert range_seconds(device, part.first, part.last) == (stage.forward, stage.backward)
            assert range_bytes(costs, part.device, part.first, part.last) == (kept.resident, kept.kept)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=6), st.integers(0, 20))
def test_largest_remainders(weights: list[float], rows: int) -> None:
    shares = largest_remainders(weights, rows)

    assert sum(shares) == rows
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - rows * weight / sum(weights)) < 1


def test_largest_remainders_by_hand() -> None:
    assert largest_remainders([3, 2, 1], 4) == (2, 1, 1)  # exactly 2, 1.33, 0.67
    assert largest_remainders([1, 1], 3) == (2, 1)


@given(st.integers(1, 4), st.integers(1, 6), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_best_split_equals_trying_all_splits(stages: int, blocks: int, random: Random) -> None:
    table = {
        (stage, first, last): None
        if random.random() < 0.2
        else (float(random.randint(0, 9)), float(random.randint(0, 9)))
        for stage in range(stages)
        for first in range(blocks)
        for last in range(first + 1, blocks + 1)
    }

    def value(bounds: tuple[int, ...]) -> float:
        costs = [table[stage, first, last] for stage, (first, last) in enumerate(itertools.pairwise(bounds))]
        if None in costs:
            return float("inf")
        known = [cost for cost in costs if cost is not None]
        return sum(a for a, _ in known) + max(b for _, b in known)

    splits = [(0, *inner, blocks) for inner in itertools.combinations(range(1, blocks), stages - 1)]
    best = min(map(value, splits), default=float("inf"))

    found = best_split(stages, blocks, lambda *key: table[key])

    if best == float("inf"):
        assert found is None
    else:
        assert found is not None
        assert value(found) == best
