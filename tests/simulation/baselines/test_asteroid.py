import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_hybridop.simulation.baselines import BaselineError
from lightning_hybridop.simulation.baselines.asteroid import _tails, asteroid, balance_rows
from lightning_hybridop.simulation.simulator import simulate
from tests.simulation.cases import cluster_costs, device, equal


@given(
    st.lists(st.tuples(st.integers(1, 9).map(float), st.integers(0, 6)), min_size=1, max_size=4),
    st.integers(1, 8),
)
@settings(max_examples=300, deadline=None)
def test_rows_are_balanced_as_well_as_memory_allows(devices: list[tuple[float, int]], rows: int) -> None:
    seconds, most = [each[0] for each in devices], [each[1] for each in devices]
    ways = [
        shares for shares in itertools.product(*(range(limit + 1) for limit in most)) if sum(shares) == rows
    ]

    found = balance_rows(seconds, most, rows)

    if not ways:
        assert found is None
        return
    assert found in ways

    def slowest(shares: tuple[int, ...]) -> float:
        return max(share * each for share, each in zip(shares, seconds, strict=True))

    assert found is not None
    assert slowest(found) == min(map(slowest, ways))


def test_rows_by_hand() -> None:
    # Capacities 3 : 1 : 1 of ten rows.
    assert balance_rows([1.0, 3.0, 3.0], [10, 10, 10], 10) == (6, 2, 2)
    # The fast one has memory for three rows: the others take the rest.
    assert balance_rows([1.0, 3.0, 3.0], [3, 10, 10], 10) == (3, 4, 3)
    assert balance_rows([1.0, 3.0, 3.0], [3, 3, 3], 10) is None
    # In proportion, the slow device's share rounds up to one row; the straggler's row goes to the other.
    assert balance_rows([1.0, 9.0], [10, 10], 5) == (5, 0)


def test_devices_stand_in_order_of_memory() -> None:
    devices = [
        device(name, blocks=3, memory=memory) for name, memory in [("s", 9.0), ("l", 30.0), ("m", 20.0)]
    ]

    baseline = asteroid(cluster_costs(devices, micro_batches=6))

    assert [part.split(":")[0] for part in baseline.description.split("; ")] == ["l", "m", "s"]
    assert baseline.program.devices == ("s", "l", "m")


def test_memory_moves_blocks() -> None:
    fits_anywhere = [device("fast", blocks=4, speed=3.0, memory=99.0), device("slow", blocks=4, memory=98.0)]
    small = [
        device("fast", blocks=4, speed=3.0, memory=23.0, resident=10.0),
        device("slow", blocks=4, memory=22.0, resident=10.0),
    ]

    # With one micro-batch in flight per stage and all on the fast device: nothing is faster for M = 1.
    alone = asteroid(cluster_costs(fits_anywhere, micro_batches=1))
    shared = asteroid(cluster_costs(small, micro_batches=1))

    assert alone.description == "fast: blocks 0-3; without rows: slow"
    assert shared.description == "fast: blocks 0-1; slow: blocks 2-3"
    assert [figures.memory for figures in simulate(shared.program).devices] == [22, 22]


def test_memory_counts_the_micro_batches_in_flight() -> None:
    devices = [device(f"gpu-{i}", blocks=2, resident=10.0, kept=4.0, memory=17.0) for i in range(2)]

    # One stage needs 28 bytes; the first of two holds two micro-batches of 4 bytes beside its 10.
    with pytest.raises(BaselineError, match="No pipeline of replicated stages fits"):
        asteroid(cluster_costs(devices, micro_batches=2))
    assert asteroid(cluster_costs(equal(2, blocks=2, resident=10.0, kept=4.0, memory=18.0), micro_batches=2))


def test_rows_are_cut_down_to_what_memory_allows() -> None:
    devices = [
        device("fast", blocks=1, speed=4.0, memory=7.5, resident=6.0, kept=4.0),
        device("slow", blocks=1, speed=1.0, memory=7.0, resident=1.0, kept=4.0),
    ]

    baseline = asteroid(cluster_costs(devices, micro_batches=1, rows=4.0))

    # A row keeps 1 byte: the fast device has memory for one only.
    assert baseline.description == "fast + slow: block 0 (1 + 3 rows of each micro-batch)"
    assert [figures.memory for figures in simulate(baseline.program).devices] == [7, 4]


@given(
    st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([float("inf"), 24.0, 16.0]),
)
@example([1.0, 1.0, 3.0, 1.0], 3, 3, 16.0)
@settings(max_examples=80, deadline=None)
def test_one_micro_batch_is_laid_out_best(speeds: list[float], blocks: int, rows: int, memory: float) -> None:
    # With M = 1 and free links the latency is a sum, so that the dynamic programme must be exact.
    devices = [
        device(f"gpu-{index}", blocks=blocks, speed=speed, memory=memory, resident=6.0, kept=2.0)
        for index, speed in enumerate(speeds)
    ]
    costs = cluster_costs(devices, micro_batches=1, rows=float(rows))
    best = float("inf")
    count = len(devices)
    for stages in range(1, min(count, blocks) + 1):
        for inner, cuts in itertools.product(
            itertools.combinations(range(1, blocks), stages - 1),
            itertools.combinations(range(1, count), stages - 1),
        ):
            total = 0.0
            for (first, last), (start, end) in zip(
                itertools.pairwise((0, *inner, blocks)), itertools.pairwise((0, *cuts, count)), strict=True
            ):
                length = last - first
                per_row = [3 * length / speed / rows for speed in speeds[start:end]]
                left = memory - 6 * length
                fits = [share for share in range(rows + 1) if share * 2 * length / rows <= left]
                most = max(fits, default=0)
                ways = [
                    shares
                    for shares in itertools.product(range(most + 1), repeat=end - start)
                    if sum(shares) == rows
                ]
                total += min(
                    (max(n * s for n, s in zip(shares, per_row, strict=True)) for shares in ways),
                    default=float("inf"),
                )
            best = min(best, total)
    if best == float("inf"):
        with pytest.raises(BaselineError):
            asteroid(costs)
        return

    simulation = simulate(asteroid(costs).program)

    assert min(tail.latency(1) for tail in _tails(costs, range(count))) == pytest.approx(best)
    # A replica need not wait for rows that it does not get.
    assert simulation.makespan <= best * (1 + 1e-9)
    assert all(figures.memory <= memory for figures in simulation.devices)
