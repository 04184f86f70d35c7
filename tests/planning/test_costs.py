import dataclasses
from typing import Any

import pytest

from lightning_hybridop.planning.cluster import Cluster, Device, DeviceProfile
from lightning_hybridop.planning.costs import (
    Assignment,
    DeviceCosts,
    LinkTimes,
    PipelineCosts,
    StageTimes,
    adjoint_time,
    boundary_time,
    bp_memory,
    gpipe_time,
    head_time,
    layout_memory,
    layout_times,
    layout_value,
    makespan_estimate,
    paper_estimate,
    pipeline_costs,
    tail_time,
    zo_bound,
    zo_memory,
)
from lightning_hybridop.planning.workload import Architecture, Workload, WorkloadError

ZO, BP = StageTimes(role="zo", forward=2.0), StageTimes(role="bp", forward=1.0, backward=2.0)
HEAD = (ZO, ZO, BP, BP)
LINKS = (LinkTimes(),) * 3


def test_golden_times_of_two_zo_and_two_bp_stages() -> None:
    # A zo stage that back-propagates takes t = 3.
    slow = StageTimes(role="bp", forward=3.0, backward=6.0)

    assert gpipe_time((slow, slow, BP, BP), micro_batches=4) == 51
    assert tail_time((BP, BP, ZO, ZO), micro_batches=4, queries=1) == 24
    assert head_time(HEAD, micro_batches=4, queries=1) == 23
    # Two bp stages alone, with twice the blocks, and two micro-batches of twice the rows.
    assert gpipe_time((StageTimes(role="bp", forward=4.0, backward=8.0),) * 2, micro_batches=2) == 36


@pytest.mark.parametrize(
    ("queries", "published", "simulated"),
    [(1, 23, 23), (2, 27, 28), (3, 31, 36), (4, 35, 44), (6, 43, 60), (12, 67, 108), (20, 99, 172)],
)
def test_the_zo_bound_makes_up_for_what_the_published_time_lacks(
    queries: int, published: float, simulated: float
) -> None:
    assert paper_estimate(HEAD, micro_batches=4, queries=queries) == published
    bound = zo_bound(HEAD, micro_batches=4, queries=queries)
    assert max(published, bound) == simulated
    assert makespan_estimate(HEAD, LINKS, micro_batches=4, queries=queries) == simulated


def test_times_of_other_estimators() -> None:
    # T_head at Q = 0: 4 + 6 + 3 x 3 = 19; zo stages alone: 4 + (8 - 1) x 2 = 18, at Q = 3: 4 + 15 x 2.
    assert boundary_time(HEAD, micro_batches=4, queries=1) == 19
    assert boundary_time(HEAD, micro_batches=4, queries=3) == 34
    # zo stages with b = 2.2 t take 6.4 each: 12.8 + 6 + 3 x 6.4.
    assert adjoint_time(HEAD, micro_batches=4) == pytest.approx(38.0)


@pytest.mark.parametrize("queries", [0, 1, 3, 12])
def test_estimates_of_other_estimators_without_transfers_are_their_times(queries: int) -> None:
    boundary = boundary_time(HEAD, micro_batches=4, queries=queries)
    back = dataclasses.replace(ZO, backward=2.2 * 2.0)
    with_adjoints = (back, back, BP, BP)

    for estimate in (
        makespan_estimate(HEAD, LINKS, micro_batches=4, queries=queries, estimator="boundary"),
        paper_estimate(HEAD, micro_batches=4, queries=queries, estimator="boundary"),
    ):
        assert estimate == boundary
    for estimate in (
        makespan_estimate(with_adjoints, LINKS, micro_batches=4, queries=queries, estimator="adjoint"),
        paper_estimate(with_adjoints, micro_batches=4, queries=queries, estimator="adjoint"),
    ):
        assert estimate == pytest.approx(adjoint_time(HEAD, micro_batches=4))


def test_perturbed_hidden_states_cross_only_the_links_between_zo_stages_at_the_boundary() -> None:
    slow, none = LinkTimes(transfer=10.0, latency=3.0), LinkTimes()

    # Between zo stages: 2 + 13 + 2 and 15 further transfers. To the bp stages: 6 + 13 and 3 further ones.
    between = makespan_estimate(HEAD, (slow, none, none), micro_batches=4, queries=3, estimator="boundary")
    behind = makespan_estimate(HEAD, (none, slow, none), micro_batches=4, queries=3, estimator="boundary")
    assert (between, behind) == (17 + 150, 19 + 30)
    # With adjoints gradients cross all links: the sum over all stages of 6.4, 6.4, 3 and 3, both ways, 3 x 6.4 more.
    stages = tuple(
        dataclasses.replace(stage, backward=2.2 * 2) if stage.role == "zo" else stage for stage in HEAD
    )
    link = LinkTimes(transfer=0.5)
    adjoint = makespan_estimate(stages, (link,) * 3, micro_batches=4, queries=3, estimator="adjoint")
    assert adjoint == pytest.approx(18.8 + 3 * 2 * 0.5 + 3 * 6.4)


def test_zo_stages_alone_are_estimated_by_their_bound() -> None:
    assert paper_estimate((ZO, ZO), micro_batches=4, queries=1) == 4 + 7 * 2


def test_transfers_of_hidden_states_and_gradients_add_to_the_first_order_time() -> None:
    links = (
        LinkTimes(transfer=0.25, latency=0.25),
        LinkTimes(transfer=0.5, latency=0.5),
        LinkTimes(transfer=1, latency=1),
    )
    # T_head is 23; hidden states take 0.5 + 1 + 2, gradients only cross the last link.
    assert makespan_estimate(HEAD, links, micro_batches=4, queries=1) == 23 + 3.5 + 2


def test_gradients_that_take_longer_than_hidden_states_add_their_own_time() -> None:
    links = (LinkTimes(), LinkTimes(), LinkTimes(transfer=1.0, latency=0.25, gradient=3.0))
    # T_head is 23; a hidden state crosses the last link once, and a gradient.
    assert makespan_estimate(HEAD, links, micro_batches=4, queries=1) == 23 + 1.25 + 3.25


def test_a_slow_link_bounds_the_time() -> None:
    links = (LinkTimes(), LinkTimes(transfer=10.0, latency=3.0), LinkTimes())
    # One forward and arrival, 6 + 13, and the 7 further passes' transfers.
    assert makespan_estimate(HEAD, links, micro_batches=4, queries=1) == 19 + 70


def test_early_exits_keep_the_zo_stages_busy() -> None:
    first = dataclasses.replace(ZO, exit_forward=2.0)
    last = dataclasses.replace(ZO, exit_forward=5.0, baseline_forward=5.0)
    # One forward of both, then of the last: 7 forwards, and 4 x (3 exits + the baseline).
    assert makespan_estimate(
        (first, last, BP, BP), LINKS, micro_batches=4, queries=1, exit_queries=3
    ) == 4 + 14 + 4 * (15 + 5)


def test_nothing_is_perturbed_without_a_zo_stage() -> None:
    # Both stages' 3, three times 3 more; the link's 4 transfers are shorter.
    link = (LinkTimes(transfer=0.0),)
    assert makespan_estimate((BP, BP), link, micro_batches=4, queries=20) == 6 + 9


def test_memory() -> None:
    assert zo_memory(frozen=5.0, trained=2.0) == 7
    assert bp_memory(frozen=5.0, trained=2.0, activations=3.0, in_flight=4) == 19


BOARD = DeviceCosts(
    name="board",
    zo=True,
    forward=(2.0, 4.0, 6.0, 8.0),
    backward=(0.0,) * 4,
    resident=(10.0, 20.0, 30.0, 40.0),
    kept=(1.0, 2.0, 3.0, 4.0),
    embedding_forward=0.5,
    embedding_resident=100.0,
    head_forward=3.0,
    head_resident=101.0,
    head_kept=7.0,
)
NANO = dataclasses.replace(
    BOARD,
    name="nano",
    zo=False,
    forward=(1.0, 2.0, 3.0, 4.0),
    backward=(2.0, 4.0, 6.0, 9.0),
    head_backward=5.0,
)
LINK = LinkTimes(transfer=0.1, latency=0.2)
COSTS = PipelineCosts(
    devices=(BOARD, NANO, NANO),
    links=((LinkTimes(), LINK, LINK), (LINK, LinkTimes(), LINK), (LINK, LINK, LinkTimes())),
    micro_batches=4,
    queries=1,
    exit_queries=2,
)


def layout(*parts: tuple[int, int, int]) -> tuple[Assignment, ...]:
    return tuple(Assignment(device=device, first=first, last=last) for device, first, last in parts)


THREE = layout((0, 0, 1), (2, 1, 3), (1, 3, 4))


def test_times_of_a_layout() -> None:
    stages, links = layout_times(COSTS, THREE)

    assert links == (LINK, LINK)
    assert stages == (
        StageTimes(role="zo", forward=2.5, exit_forward=5.5, baseline_forward=5.5),
        StageTimes(role="bp", forward=5.0, backward=10.0),
        StageTimes(role="bp", forward=7.0, backward=14.0),
    )


def test_times_without_exits_or_without_their_baseline() -> None:
    without = layout_times(dataclasses.replace(COSTS, exit_baseline=False), THREE)[0]
    none = layout_times(dataclasses.replace(COSTS, exit_queries=0), THREE)[0]

    assert (without[0].exit_forward, without[0].baseline_forward) == (5.5, 0.0)
    assert (none[0].exit_forward, none[0].baseline_forward) == (2.5, 0.0)


def test_a_zo_stage_goes_back_only_with_adjoints() -> None:
    backward = {
        estimator: layout_times(dataclasses.replace(COSTS, estimator=estimator), THREE)[0][0].backward
        for estimator in ("loss", "boundary", "adjoint")
    }

    # Of its block of 2 s alone, not of the embedding.
    assert backward == {"loss": 0.0, "boundary": 0.0, "adjoint": pytest.approx(4.4)}


def test_memory_of_a_layout() -> None:
    # The board has the embedding, and the head with its logits for the exits. Two micro-batches are in flight on the
    # first bp stage; the last has the head and one micro-batch.
    assert layout_memory(COSTS, THREE) == (10 + 100 + 101 + 7, 50 + 2 * 5, 40 + 101 + 1 * (4 + 7))
    # There is only one micro-batch to keep.
    one = dataclasses.replace(COSTS, micro_batches=1)
    assert layout_memory(one, THREE)[1] == 50 + 5


def test_a_tied_embedding_is_held_once() -> None:
    tied, no_exits = (
        dataclasses.replace(COSTS, tied_embeddings=True, **options) for options in ({}, {"exit_queries": 0})
    )
    whole = layout((1, 0, 4))

    assert layout_memory(tied, THREE)[0] == 10 + 101 + 7
    assert layout_memory(no_exits, THREE)[0] == 10 + 100
    assert layout_memory(no_exits, whole) == (100 + 101 + (10 + 7),)
    assert layout_memory(COSTS, whole) == (100 + 100 + 101 + (10 + 7),)


def test_value_of_a_layout() -> None:
    # sum_N t + sum_G (t + b) + 3 x 21 + 4 x 5.
    published = 2.5 + 36 + 63 + 20
    assert layout_value(COSTS, THREE, "paper") == published
    assert layout_value(COSTS, THREE, "makespan") == pytest.approx(published + 2 * 0.3 + 0.3)


@pytest.mark.parametrize("micro_batches", [0, -1, 9, 2.5, True, "auto"])
def test_micro_batches_that_cannot_be_cut_are_refused(micro_batches: Any) -> None:
    sizes = Architecture(
        name="model",
        blocks=2,
        hidden=8,
        heads=2,
        key_value_heads=2,
        head_size=4,
        intermediate=16,
        vocabulary=10,
    )
    profile = DeviceProfile(name="board", forward_tflops={"float16": 1.0}, memory_gb=1.0)
    cluster = Cluster(name="cluster", devices=(Device(name="board", profile=profile),))

    with pytest.raises(
        WorkloadError, match="expected a whole number from 1 to 8, the rows of the mini-batch"
    ):
        pipeline_costs(cluster, Workload(architecture=sizes), micro_batches=micro_batches, queries=1)
