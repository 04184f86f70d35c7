import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybridop.simulation.baselines import BaselineError
from lightning_hybridop.simulation.baselines.dapple import dapple, even_rows, placements
from lightning_hybridop.simulation.simulator import simulate
from tests.simulation.cases import cluster_costs, device, equal


def test_the_three_policies() -> None:
    # Kinds of 3, 2 and 2 devices; one of the first and both of the second are used.
    found = placements((1, 2, 0), (3, 2, 2), 2)

    # Fresh first: the third kind. Append first: what is left of the first. Scatter first: one of each.
    assert found == ((0, 0, 2), (2, 0, 0), (1, 0, 1))


@given(st.data())
def test_policies_take_what_is_there(data: st.DataObject) -> None:
    available = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    used = tuple(data.draw(st.integers(0, have)) for have in available)
    free = sum(available) - sum(used)
    for count in range(1, free + 1):
        found = placements(used, available, count)
        assert 1 <= len(found) == len(set(found)) <= 3
        for chosen in found:
            assert sum(chosen) == count
            assert all(gone + more <= have for gone, more, have in zip(used, chosen, available, strict=True))


def test_replicas_share_rows_evenly_and_the_fastest_take_what_is_left_over() -> None:
    devices = [device(name, blocks=1, speed=speed) for name, speed in [("a", 1.0), ("b", 3.0), ("c", 2.0)]]
    costs = cluster_costs(devices, rows=5.0)

    assert even_rows(costs, (0, 1, 2)) == (1, 2, 2)
    assert even_rows(costs, (0, 2)) == (2, 3)


def test_light_adapters_replicate_and_heavy_ones_do_not() -> None:
    light = cluster_costs(equal(2, blocks=2), micro_batches=4, rows=2.0, transfer=0.5, adapter_bytes=0.1)
    heavy = cluster_costs(equal(2, blocks=2), micro_batches=4, rows=2.0, transfer=0.5, adapter_bytes=99.0)

    replicated, pipelined = dapple(light), dapple(heavy)

    assert replicated.description == "gpu-0 + gpu-1: blocks 0-1 (1 + 1 rows of each micro-batch)"
    # Half of each micro-batch's 6 seconds, and 0.2 hidden states at the end.
    assert simulate(replicated.program).makespan == pytest.approx(4 * 3 + 0.2 * 0.5)
    assert pipelined.description == "gpu-0: block 0; gpu-1: block 1"


def test_micro_batches_of_one_row_are_not_divided() -> None:
    costs = cluster_costs(equal(3, blocks=4), rows=1.0)

    assert dapple(costs).description.count("+") == 0
    with pytest.raises(BaselineError, match=r"^Found 3 devices, 2 blocks and micro-batches of 1 rows"):
        dapple(cluster_costs(equal(3, blocks=2), rows=1.0))


@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([0.0, 0.25]),
)
@settings(max_examples=80, deadline=None)
def test_one_micro_batch_on_equal_devices_is_laid_out_best(
    count: int, blocks: int, rows: int, ends: float, latency: float
) -> None:
    # With M = 1 the latency is a sum, so that the dynamic programme must be exact.
    costs = cluster_costs(
        equal(count, blocks=blocks, ends=ends), micro_batches=1, rows=float(rows), latency=latency
    )
    best = float("inf")
    for stages in range(1, min(count, blocks) + 1):
        for replicas in itertools.product(range(1, min(rows, count) + 1), repeat=stages):
            if sum(replicas) != count:
                continue
            for inner in itertools.combinations(range(1, blocks), stages - 1):
                bounds = (0, *inner, blocks)
                seconds = [
                    3 * (last - first + (ends if last == blocks else 0.0)) * -(-rows // n) / rows
                    for n, (first, last) in zip(replicas, itertools.pairwise(bounds), strict=True)
                ]
                reduce = max(2 * (n - 1) * latency for n in replicas)
                best = min(best, sum(seconds) + 2 * latency * (stages - 1) + reduce)
    if best == float("inf"):
        with pytest.raises(BaselineError):
            dapple(costs)
        return

    makespan = simulate(dapple(costs).program).makespan

    # The latency counts the all-reduce behind everything else; the program may hide it behind earlier stages.
    assert makespan <= best + 1e-9
    if latency == 0:
        assert makespan == pytest.approx(best)
