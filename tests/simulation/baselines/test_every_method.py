from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from lightning_hybridop.planning.costs import PipelineCosts
from lightning_hybridop.simulation.baselines import BASELINES, BaselineError
from lightning_hybridop.simulation.simulator import simulate
from tests.simulation.cases import check_first_order, cluster_costs, device, equal, first_order_costs

ROBUST = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("method", BASELINES)
@ROBUST
@given(costs=first_order_costs())
def test_does_all_work_once(method: str, costs: PipelineCosts) -> None:
    baseline = BASELINES[method](costs)

    check_first_order(costs, baseline.program)
    for each in costs.devices:
        assert each.name in baseline.description
    assert "\n" not in baseline.description


@pytest.mark.parametrize("method", BASELINES)
def test_one_micro_batch_on_one_device(method: str) -> None:
    costs = cluster_costs(equal(1, blocks=3, ends=1.0), micro_batches=1)

    if method == "Chimera":
        with pytest.raises(BaselineError, match=r"^Found 1 device, but two pipelines"):
            BASELINES[method](costs)
        return
    # Three blocks and a head, forward and backward.
    assert simulate(BASELINES[method](costs).program).makespan == pytest.approx(3 * (3 + 1))


@pytest.mark.parametrize("method", BASELINES)
def test_a_device_that_cannot_back_propagate_is_named(method: str) -> None:
    npu = replace(device("npu", blocks=3, zo=True), backward=(0.0,) * 3)

    with pytest.raises(BaselineError, match=r"^npu: the time of its backward is unknown, but every device"):
        BASELINES[method](cluster_costs([npu, *equal(1, blocks=3)]))


@pytest.mark.parametrize("method", BASELINES)
def test_no_device(method: str) -> None:
    costs = replace(cluster_costs(equal(1, blocks=3)), devices=(), links=())

    with pytest.raises(BaselineError, match=r"^No device is left"):
        BASELINES[method](costs)


@pytest.mark.parametrize("method", ["GPipe", "1F1B", "Chimera", "DAPPLE"])
def test_fewer_blocks_than_devices(method: str) -> None:
    with pytest.raises(BaselineError, match="4 devices"):
        BASELINES[method](cluster_costs(equal(4, blocks=3)))


# The layout and the order of these do not depend on links.
@pytest.mark.parametrize("method", ["GPipe", "1F1B", "Chimera"])
@ROBUST
@given(costs=first_order_costs())
def test_slow_links_never_help(method: str, costs: PipelineCosts) -> None:
    free = replace(
        costs, links=tuple(tuple(replace(link, transfer=0.0) for link in row) for row in costs.links)
    )

    slow = simulate(BASELINES[method](costs).program).makespan

    assert slow >= simulate(BASELINES[method](free).program).makespan - 1e-9


@pytest.mark.parametrize("method", BASELINES)
def test_is_the_same_every_time(method: str) -> None:
    costs = cluster_costs(
        [device(f"gpu-{index}", blocks=6, speed=1 + index % 2) for index in range(4)], rows=4.0, transfer=0.1
    )

    assert BASELINES[method](costs) == BASELINES[method](costs)
