import dataclasses
from typing import Any, get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_hybridop.planning.costs import (
    Assignment,
    DeviceCosts,
    LinkTimes,
    Objective,
    PipelineCosts,
    layout_memory,
    layout_value,
)
from lightning_hybridop.planning.infeasible import InfeasibleError
from lightning_hybridop.planning.partition import PlannedLayout, best_layout
from lightning_hybridop.planning.plan import Estimator
from tests.planning.by_hand import every_layout, lacks, random_costs, values

OBJECTIVES: tuple[Objective, ...] = ("makespan", "paper")

# 300 instances: few large ones, because all their layouts are tried.
SIZES = {seed: (10, 5) if seed % 15 == 0 else (1 + seed % 8, 1 + seed * 7 % 4) for seed in range(300)}


def costs_of(*devices: DeviceCosts, **options: Any) -> PipelineCosts:
    links = options.pop("links", None) or ((LinkTimes(),) * len(devices),) * len(devices)
    return PipelineCosts(devices=devices, links=links, **{"micro_batches": 4, "queries": 1, **options})


def device(
    name: str, *, zo: bool = False, blocks: int = 4, forward: float = 1.0, **options: Any
) -> DeviceCosts:
    return DeviceCosts(
        name=name,
        zo=zo,
        forward=(forward,) * blocks,
        backward=(0.0 if zo else 2 * forward,) * blocks,
        resident=(1.0,) * blocks,
        kept=(options.pop("kept", 0.0),) * blocks,
        **options,
    )


def shape(planned: PlannedLayout) -> list[tuple[int, int, int]]:
    return [(part.device, part.first, part.last) for part in planned.layout]


def planned_or_none(costs: PipelineCosts, **options: Any) -> PlannedLayout | None:
    try:
        return best_layout(costs, **options)
    except InfeasibleError:
        return None


def check_constraints(costs: PipelineCosts, planned: PlannedLayout, *, use_all: bool) -> None:
    layout = planned.layout
    assert [part.first for part in layout] == [0, *(part.last for part in layout[:-1])]
    assert layout[-1].last == costs.blocks
    assert all(part.first < part.last for part in layout)
    devices = [part.device for part in layout]
    assert len(set(devices)) == len(devices)
    assert not use_all or len(devices) == len(costs.devices)
    zo = [costs.devices[index].zo for index in devices]
    assert zo == sorted(zo, reverse=True)
    assert not all(zo) or all(device.zo for device in costs.devices)
    for need, index in zip(layout_memory(costs, layout), devices, strict=True):
        assert need <= costs.devices[index].memory


@pytest.mark.parametrize(
    ("estimator", "part"),
    [
        *(("loss", part) for part in range(10)),
        *((name, part) for name in ("boundary", "adjoint") for part in (0, 1, 2)),
    ],
)
def test_no_layout_of_300_instances_is_better(estimator: Estimator, part: int) -> None:
    infeasible = 0
    for seed in range(part * 30, part * 30 + 30):
        blocks, devices = SIZES[seed]
        costs = random_costs(seed, blocks=blocks, devices=devices, estimator=estimator)
        best: dict[tuple[str, bool], float] = {}
        for layout in every_layout(costs):
            if any(lacks(costs, layout)):
                continue
            for objective, value in values(costs, layout).items():
                for use_all in (False, True) if len(layout) == devices else (False,):
                    best[objective, use_all] = min(best.get((objective, use_all), value), value)
        for objective in OBJECTIVES:
            for use_all in (False, True):
                planned = planned_or_none(costs, objective=objective, use_all=use_all)
                if planned is None:
                    assert (objective, use_all) not in best, (seed, objective, use_all)
                    infeasible += 1
                    continue
                assert planned.value == pytest.approx(best[objective, use_all], rel=1e-9), (seed, objective)
                assert planned.value == pytest.approx(values(costs, planned.layout)[objective], rel=1e-12)
                check_constraints(costs, planned, use_all=use_all)
    assert 0 < infeasible < 90


@given(
    st.integers(0, 10**6),
    st.integers(1, 8),
    st.integers(1, 5),
    st.sampled_from(get_args(Estimator)),
    st.sampled_from(OBJECTIVES),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_no_constraint_is_ever_broken(
    seed: int, blocks: int, devices: int, estimator: Estimator, objective: Objective, use_all: bool
) -> None:
    costs = random_costs(seed, blocks=blocks, devices=devices, estimator=estimator)
    planned = planned_or_none(costs, objective=objective, use_all=use_all)
    assume(planned is not None)
    assert planned is not None

    check_constraints(costs, planned, use_all=use_all)
    assert planned.value == layout_value(costs, planned.layout, objective)
    assert planned == best_layout(costs, objective=objective, use_all=use_all)


@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(2, 5), st.sampled_from(OBJECTIVES))
@settings(max_examples=100, deadline=None)
def test_a_further_device_never_makes_it_slower(
    seed: int, blocks: int, devices: int, objective: Objective
) -> None:
    more = random_costs(seed, blocks=blocks, devices=devices)
    fewer = dataclasses.replace(
        more, devices=more.devices[:-1], links=tuple(row[:-1] for row in more.links[:-1])
    )
    # The first device that back-propagates must be used, however slow it is.
    assume(more.devices[-1].zo or not all(device.zo for device in fewer.devices))
    before, after = (planned_or_none(costs, objective=objective) for costs in (fewer, more))

    assert before is None or (after is not None and after.value <= before.value * (1 + 1e-9))


@given(
    st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 5), st.sampled_from(OBJECTIVES), st.booleans()
)
@settings(max_examples=100, deadline=None)
def test_more_memory_never_makes_it_slower(
    seed: int, blocks: int, devices: int, objective: Objective, use_all: bool
) -> None:
    costs = random_costs(seed, blocks=blocks, devices=devices)
    first = dataclasses.replace(costs.devices[0], memory=costs.devices[0].memory * 1.5)
    larger = dataclasses.replace(costs, devices=(first, *costs.devices[1:]))
    before, after = (
        planned_or_none(given, objective=objective, use_all=use_all) for given in (costs, larger)
    )

    assert before is None or (after is not None and after.value <= before.value * (1 + 1e-9))


@pytest.mark.parametrize(
    ("queries", "makespan", "paper"),
    [(1, 23, 23), (2, 28, 27), (3, 36, 31), (4, 44, 35), (6, 60, 43), (12, 108, 67), (20, 172, 99)],
)
def test_golden_two_zo_and_two_bp_stages(queries: int, makespan: float, paper: float) -> None:
    costs = costs_of(
        device("bp-0"),
        device("zo-0", zo=True, forward=2.0),
        device("bp-1"),
        device("zo-1", zo=True, forward=2.0),
        queries=queries,
    )

    assert shape(best_layout(costs, use_all=True)) == [(1, 0, 1), (3, 1, 2), (0, 2, 3), (2, 3, 4)]
    assert best_layout(costs, use_all=True).value == makespan
    assert best_layout(costs, objective="paper", use_all=True).value == paper


def test_devices_are_left_out_where_that_is_faster() -> None:
    costs = costs_of(device("fast"), device("slow", zo=True, forward=100.0), queries=12)

    assert shape(best_layout(costs)) == [(0, 0, 4)]
    assert shape(best_layout(costs, use_all=True)) == [(1, 0, 1), (0, 1, 4)]


def test_a_bp_device_is_used_however_slow() -> None:
    costs = costs_of(device("zo", zo=True), device("bp", forward=100.0))

    assert shape(best_layout(costs)) == [(0, 0, 3), (1, 3, 4)]


def test_zo_devices_alone_make_a_pipeline() -> None:
    costs = costs_of(device("a", zo=True), device("b", zo=True))

    # 4 blocks once through, then 7 further passes of 2 blocks on each.
    assert best_layout(costs).value == best_layout(costs, objective="paper").value == 4 + 7 * 2


def test_the_order_follows_the_links() -> None:
    slow, fast = LinkTimes(transfer=5.0), LinkTimes(transfer=0.1)
    # Only 0 - 2 - 1 has fast links.
    links = (
        (LinkTimes(), slow, fast),
        (slow, LinkTimes(), fast),
        (fast, fast, LinkTimes()),
    )
    costs = costs_of(*(device(name, blocks=3) for name in "abc"), links=links)

    assert [part.device for part in best_layout(costs, use_all=True).layout] in ([0, 2, 1], [1, 2, 0])


def test_a_link_that_would_be_busiest_is_not_used() -> None:
    # Two stages: 4 + 12 once over the link + 7 x 12 on it, 100 in all; one stage: 8 micro-batches of 12.
    links = ((LinkTimes(), LinkTimes(transfer=12.0)), (LinkTimes(transfer=12.0), LinkTimes()))
    costs = costs_of(device("a"), device("b"), links=links, micro_batches=8)

    assert best_layout(costs, use_all=True).value == 100
    assert best_layout(costs) == PlannedLayout(layout=(Assignment(device=0, first=0, last=4),), value=96.0)


def test_a_stage_that_needs_exactly_what_there_is_fits() -> None:
    # 0.1 + 0.2 + 0.3 depends on the order of summation.
    sizes = (0.3, 0.1, 0.2, 0.3)
    exact = sum(sizes[1:])
    small = dataclasses.replace(device("b"), resident=sizes, memory=exact)
    large = dataclasses.replace(device("a", zo=True), resident=sizes, memory=sizes[0])

    assert shape(best_layout(costs_of(large, small))) == [(0, 0, 1), (1, 1, 4)]
    with pytest.raises(InfeasibleError):
        best_layout(costs_of(large, dataclasses.replace(small, memory=exact - 1e-15)))


def test_later_stages_keep_fewer_micro_batches() -> None:
    # In the first of two bp stages two are in flight: 2 x 1 + 2 x 2 = 6; in the last one 2 x 1 + 1 x 2 = 4.
    costs = costs_of(device("a", kept=1.0, memory=6.0), device("b", kept=1.0, memory=4.0))

    assert shape(best_layout(costs)) == [(0, 0, 2), (1, 2, 4)]


GB = 1e9


def sized(name: str, *, memory: float, zo: bool = False, blocks: int = 4) -> DeviceCosts:
    """A device on which every block takes 1 GB."""
    return dataclasses.replace(
        device(name, zo=zo, blocks=blocks, memory=memory * GB), resident=(GB,) * blocks
    )


@pytest.mark.parametrize(
    ("costs", "use_all", "message"),
    [
        (
            costs_of(sized("nano", memory=2.5), sized("board", zo=True, memory=1.25)),
            False,
            "No layout fits into memory: nano needs 3.00 GB or more and has 2.50 GB; 0.50 GB more on this device alone "
            "would be enough.",
        ),
        # Rounded so that following the advice is enough.
        (
            costs_of(dataclasses.replace(sized("nano", memory=3.0088), resident=(1.0011 * GB,) * 4)),
            False,
            "No layout fits into memory: nano needs 4.01 GB or more and has 3.00 GB; 1.00 GB more on this device alone "
            "would be enough.",
        ),
        (
            costs_of(sized("nano", memory=0.5), sized("board", zo=True, memory=0.9)),
            False,
            "No layout fits into memory: nano needs 4.00 GB or more and has 0.50 GB; 3.50 GB more on this device alone "
            "would be enough.",
        ),
        (
            costs_of(sized("nano", memory=0.5), sized("board", zo=True, memory=0.75)),
            True,
            "No layout fits into memory: nano needs 2.00 GB or more and has 0.50 GB; no single device can make up for it, "
            "1.50 GB more on every device would.",
        ),
        (
            costs_of(*(sized(name, memory=9, blocks=2) for name in "abc")),
            True,
            "use_all: found 3 devices for 2 blocks, expected a block for each; leave devices out.",
        ),
    ],
)
def test_what_does_not_fit_is_named(costs: PipelineCosts, use_all: bool, message: str) -> None:
    with pytest.raises(InfeasibleError) as error:
        best_layout(costs, use_all=use_all)

    assert str(error.value) == message
