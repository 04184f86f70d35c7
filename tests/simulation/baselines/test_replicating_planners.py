"""What DAPPLE and Asteroid weigh against each other, in cases that can be worked out by hand."""

from collections.abc import Callable

import pytest

from lightning_hybridop.planning.costs import PipelineCosts
from lightning_hybridop.simulation.baselines.asteroid import asteroid
from lightning_hybridop.simulation.baselines.common import Baseline
from lightning_hybridop.simulation.baselines.dapple import dapple
from tests.simulation.cases import cluster_costs, device, equal

Method = Callable[[PipelineCosts], Baseline]
METHODS = pytest.mark.parametrize("method", [dapple, asteroid])


@METHODS
def test_many_micro_batches_are_balanced(method: Method) -> None:
    devices = [device("fast", blocks=8, speed=3.0), device("slow", blocks=8)]

    # 8 micro-batches: 2 * (7 * 1 + 1) with 6 and 2 blocks, in units of 3 s; any other split has a slower stage.
    assert method(cluster_costs(devices, micro_batches=8)).description == "fast: blocks 0-5; slow: blocks 6-7"


def test_with_few_micro_batches_the_fast_device_takes_all_it_can() -> None:
    devices = [device("fast", blocks=8, speed=3.0), device("slow", blocks=8)]
    costs = cluster_costs(devices, micro_batches=1)

    assert dapple(costs).description in ("fast: blocks 0-6; slow: block 7", "slow: block 0; fast: blocks 1-7")
    assert asteroid(costs).description == "fast: blocks 0-7; without rows: slow"


@METHODS
@pytest.mark.parametrize(("adapter_bytes", "replicates"), [(1.0, True), (1.25, True), (2.0, False)])
def test_links_count_for_pipelines_as_all_reduces_do_for_replicas(
    method: Method, adapter_bytes: float, replicates: bool
) -> None:
    # One stage of both devices: 3 s and an all-reduce of two blocks' adapters, 4 s per byte of one's. Two stages: 6 s
    # and a hidden state of 2 s each way.
    costs = cluster_costs(
        equal(2, blocks=2), micro_batches=1, rows=2.0, transfer=2.0, adapter_bytes=adapter_bytes
    )

    assert ("+" in method(costs).description) == replicates


@METHODS
@pytest.mark.parametrize(("latency", "replicates"), [(0.1, False), (3.0, True)])
def test_a_slow_link_dominates_many_micro_batches(method: Method, latency: float, replicates: bool) -> None:
    # A transfer of 9 s between two stages of 3 s each would hold up every micro-batch; adapters take 60 s once.
    costs = cluster_costs(
        equal(2, blocks=2),
        micro_batches=10,
        rows=2.0,
        transfer=3.0 * latency,
        adapter_bytes=30.0 / (3.0 * latency),
    )

    # Stages: 6 + 9 * 3 and the links; replicas: 3 + 9 * 3 + 60.
    assert ("+" in method(costs).description) == replicates
