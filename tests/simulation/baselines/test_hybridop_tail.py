import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hybridop.planning.costs import Assignment, layout_memory, layout_times, tail_time
from lightning_hybridop.schedules.actions import Kind
from lightning_hybridop.simulation.baselines import BaselineError, hybridop_tail
from lightning_hybridop.simulation.baselines.hybridop_tail import tail_program
from lightning_hybridop.simulation.simulator import simulate
from tests.simulation.cases import cluster_costs, device, equal


def layout_of(bounds: tuple[int, ...]) -> tuple[Assignment, ...]:
    return tuple(
        Assignment(device=index, first=first, last=last)
        for index, (first, last) in enumerate(itertools.pairwise(bounds))
    )


def two_bp_two_zo(blocks: int = 4, **fields: float):  # type: ignore[no-untyped-def]
    npus = [device(f"npu-{index}", blocks=blocks, speed=0.5, zo=True, **fields) for index in range(2)]  # type: ignore[arg-type]
    return [*equal(2, blocks=blocks, **fields), *npus]


def test_two_bp_and_two_zo_stages() -> None:
    costs = cluster_costs(two_bp_two_zo(), micro_batches=4, queries=1)
    layout = layout_of((0, 1, 2, 3, 4))
    stages, _ = layout_times(costs, layout)

    assert tail_time(stages, micro_batches=4, queries=1) == 24
    assert simulate(tail_program(costs, layout)).makespan == 24
    assert simulate(hybridop_tail(costs).program).makespan == 24


@pytest.mark.parametrize("queries", [0, 1, 2, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 6])
def test_takes_as_long_as_the_papers_formula_where_zo_stages_are_the_slowest(
    queries: int, micro_batches: int
) -> None:
    costs = cluster_costs(two_bp_two_zo(), micro_batches=micro_batches, queries=queries)
    layout = layout_of((0, 1, 2, 3, 4))
    stages, _ = layout_times(costs, layout)
    simulation = simulate(tail_program(costs, layout))

    expected = tail_time(stages, micro_batches=micro_batches, queries=queries)
    if queries:
        assert simulation.makespan == expected
    else:
        # Base forwards alone leave the bp stages as the slowest ones: the published formula has no term for them.
        assert simulation.makespan >= expected


def test_a_backward_waits_for_all_perturbed_forwards_of_its_micro_batch() -> None:
    costs = cluster_costs(two_bp_two_zo(), micro_batches=3, queries=2, transfer=0.5, latency=0.25)

    timeline = simulate(tail_program(costs, layout_of((0, 1, 2, 3, 4)))).timeline

    for micro_batch in range(3):
        passes = [t for t in timeline if t.stage == 3 and t.action.micro_batch == micro_batch]
        assert [str(t.action.kind) for t in passes] == ["F", "P", "P"]
        (backward,) = (
            t
            for t in timeline
            if t.stage == 1 and t.action.kind is Kind.BACKWARD and t.action.micro_batch == micro_batch
        )
        assert backward.start >= passes[-1].end + 0.75
    assert not [t for t in timeline if t.stage < 2 and t.action.kind is Kind.PERTURBED]
    assert not [t for t in timeline if t.stage >= 2 and t.action.kind is Kind.BACKWARD]


def test_bp_stages_keep_no_more_than_the_planner_grants_them() -> None:
    costs = cluster_costs(two_bp_two_zo(resident=10.0, ends=1.0), micro_batches=6, queries=2)
    layout = layout_of((0, 1, 2, 3, 4))

    memory = [figures.memory for figures in simulate(tail_program(costs, layout)).devices]

    assert tuple(memory) == layout_memory(costs, layout)


def test_exit_queries_count_as_queries() -> None:
    costs = cluster_costs(two_bp_two_zo(), queries=1, exit_queries=2)

    assert hybridop_tail(costs) == hybridop_tail(replace(costs, queries=3, exit_queries=0))


@given(
    st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=1, max_size=2),
    st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=1, max_size=2),
    st.integers(4, 6),
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from([float("inf"), 60.0, 45.0]),
)
@settings(max_examples=60, deadline=None)
def test_the_split_is_the_best_one_by_the_papers_formula(
    bp: list[float], zo: list[float], blocks: int, micro_batches: int, queries: int, memory: float
) -> None:
    devices = [
        device(
            f"{'zo' if role else 'bp'}-{index}",
            blocks=blocks,
            speed=speed,
            zo=role,
            resident=10.0,
            kept=4.0,
            memory=memory,
        )
        for role, speeds in ((False, bp), (True, zo))
        for index, speed in enumerate(speeds)
    ]
    costs = cluster_costs(devices, micro_batches=micro_batches, queries=queries)
    splits = [
        layout_of((0, *inner, blocks)) for inner in itertools.combinations(range(1, blocks), len(devices) - 1)
    ]

    def value(layout: tuple[Assignment, ...]) -> float:
        # The busiest bp stage counts as well, where it has more to do than the busiest zo stage.
        stages, _ = layout_times(costs, layout)
        slow = (micro_batches - 1) * max(s.forward + s.backward for s in stages if s.role == "bp")
        formula = tail_time(stages, micro_batches=micro_batches, queries=queries)
        slowest = max(s.forward for s in stages if s.role == "zo")
        return formula + max(0.0, slow - ((1 + queries) * micro_batches - 1) * slowest)

    fitting = [layout for layout in splits if all(need <= memory for need in layout_memory(costs, layout))]
    if not fitting:
        with pytest.raises(BaselineError, match="fits the devices' memory"):
            hybridop_tail(costs)
        return
    described = hybridop_tail(costs).description

    best = min(map(value, fitting))
    texts = {
        "; ".join(
            f"{costs.devices[part.device].name} ({'zo' if costs.devices[part.device].zo else 'bp'}): "
            + (
                f"block {part.first}"
                if part.last - part.first == 1
                else f"blocks {part.first}-{part.last - 1}"
            )
            for part in layout
        ): value(layout)
        for layout in fitting
    }
    assert texts[described] == pytest.approx(best)


@pytest.mark.parametrize("roles", [[True, True], [False]])
def test_one_role_alone(roles: list[bool]) -> None:
    devices = [device(f"device-{index}", blocks=4, zo=zo) for index, zo in enumerate(roles)]

    with pytest.raises(BaselineError, match="need at least one of each"):
        hybridop_tail(cluster_costs(devices))


def test_fewer_blocks_than_devices() -> None:
    with pytest.raises(BaselineError, match="Found 4 devices for 3 blocks"):
        hybridop_tail(cluster_costs(two_bp_two_zo(blocks=3)))
