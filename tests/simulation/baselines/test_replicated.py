import pytest

from lightning_hybridop.schedules.actions import Kind
from lightning_hybridop.simulation.baselines.replicated import ReplicatedStage, replicated_pipeline
from lightning_hybridop.simulation.program import Task
from lightning_hybridop.simulation.simulator import simulate
from tests.simulation.cases import check_first_order, cluster_costs, equal

THREE_TO_TWO = (
    ReplicatedStage(first=0, last=1, devices=(0, 1, 2), rows=(1, 1, 2)),
    ReplicatedStage(first=1, last=3, devices=(3, 4), rows=(3, 1)),
)


def test_each_device_sends_the_rows_that_both_have() -> None:
    costs = cluster_costs(equal(5, blocks=3), micro_batches=1, rows=4.0, transfer=8.0)

    program = replicated_pipeline(costs, THREE_TO_TWO).program

    sent = {
        (edge.link, task.action.kind): edge.transfer
        for task in program.tasks
        if isinstance(task, Task)
        for edge in task.after
        if edge.link is not None
    }
    # Rows 0, 1, 2-3 on the first stage and 0-2, 3 on the second; a quarter of a hidden state takes 2 seconds.
    there = {(0, 3): 2.0, (1, 3): 2.0, (2, 3): 2.0, (2, 4): 2.0}
    assert sent == {
        **{(link, Kind.FORWARD): seconds for link, seconds in there.items()},
        **{((b, a), Kind.BACKWARD): seconds for (a, b), seconds in there.items()},
    }


def test_devices_that_have_no_row_in_common_send_each_other_nothing() -> None:
    costs = cluster_costs(equal(4, blocks=2), micro_batches=1, rows=2.0, transfer=1.0)
    stages = (
        ReplicatedStage(first=0, last=1, devices=(0, 1), rows=(1, 1)),
        ReplicatedStage(first=1, last=2, devices=(2, 3), rows=(1, 1)),
    )

    links = {edge.link for task in replicated_pipeline(costs, stages).program.tasks for edge in task.after}

    assert links == {None, (0, 2), (1, 3), (2, 0), (3, 1)}


def test_work_and_activations_are_in_proportion_to_rows() -> None:
    costs = cluster_costs(equal(5, blocks=3, resident=10.0), micro_batches=4, rows=4.0)

    baseline = replicated_pipeline(costs, THREE_TO_TWO)
    devices = simulate(baseline.program).devices

    check_first_order(costs, baseline.program)
    assert [figures.busy for figures in devices] == [
        4 * 3 / 4,
        4 * 3 / 4,
        4 * 3 / 2,
        4 * 6 * 3 / 4,
        4 * 6 / 4,
    ]
    # Two micro-batches in flight on the first stage, one on the second.
    assert [figures.memory for figures in devices] == [10.5, 10.5, 11, 20 + 1.5, 20 + 0.5]


def test_replicas_all_reduce_their_adapters_behind_their_last_backward() -> None:
    costs = cluster_costs(
        equal(5, blocks=3), micro_batches=2, rows=4.0, transfer=1.0, latency=0.5, adapter_bytes=0.1
    )

    simulation = simulate(replicated_pipeline(costs, THREE_TO_TWO).program)

    spans = {collective.devices: collective for collective in simulation.collectives}
    assert spans.keys() == {(0, 1, 2), (3, 4)}
    # Over three devices 4 / 3 of one block's adapters in four messages, over two all of two blocks' in two.
    assert spans[0, 1, 2].end - spans[0, 1, 2].start == pytest.approx(4 / 3 * 0.1 + 4 * 0.5)
    assert spans[3, 4].end - spans[3, 4].start == pytest.approx(0.2 + 2 * 0.5)
    for members, collective in spans.items():
        assert collective.start == max(t.end for t in simulation.timeline if t.stage in members)
