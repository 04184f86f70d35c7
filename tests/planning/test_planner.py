import dataclasses
from collections.abc import Sequence

import pytest

from lightning_hybridop.planning.cluster import Cluster, Device, DeviceProfile, Link
from lightning_hybridop.planning.costs import Assignment, layout_times, pipeline_costs
from lightning_hybridop.planning.infeasible import InfeasibleError
from lightning_hybridop.planning.partition import best_layout
from lightning_hybridop.planning.plan import Plan, PlanError, Stage
from lightning_hybridop.planning.planner import layout_plan, plan_layout, plan_pipeline
from lightning_hybridop.planning.workload import Architecture, Workload

# One GB for each block; a micro-batch of one row takes 0.13 s at 1 TFLOP/s.
SIZES = Architecture(
    name="model",
    blocks=8,
    hidden=4096,
    heads=32,
    key_value_heads=32,
    head_size=128,
    intermediate=35_000,
    vocabulary=1000,
)
WORKLOAD = Workload(architecture=SIZES, rows=4, length=128)


def devices(
    name: str, count: int, *, tflops: float, zo: bool = False, memory: float = 16
) -> tuple[Device, ...]:
    profile = DeviceProfile(
        name=name,
        forward_only=zo,
        forward_tflops={"float16": tflops},
        backward_tflops={} if zo else {"float16": tflops},
        memory_gb=memory,
    )
    return tuple(Device(name=f"{name}-{index}", profile=profile) for index in range(count))


def cluster(*groups: Sequence[Device]) -> Cluster:
    return Cluster(
        name="cluster", devices=tuple(each for group in groups for each in group), link=Link(latency_ms=1)
    )


MIXED = cluster(devices("board", 2, tflops=4, zo=True), devices("nano", 2, tflops=10))


def test_the_plan_is_that_of_the_best_layout() -> None:
    found = plan_pipeline(MIXED, WORKLOAD, micro_batches=4, queries=2, exit_queries=1, exit_baseline="full")
    costs = pipeline_costs(MIXED, WORKLOAD, micro_batches=4, queries=2, exit_queries=1, exit_baseline=False)
    best = best_layout(costs)

    assert found.costs == costs
    assert (found.layout, found.value) == (best.layout, best.value)
    assert (found.plan.micro_batches, found.plan.queries, found.plan.exit_baseline) == (4, 2, "full")
    assert found.plan.blocks == 8
    assert plan_layout(found.plan, costs) == found.layout


def test_the_objective_and_the_use_of_all_devices_are_passed_on() -> None:
    costs = pipeline_costs(MIXED, WORKLOAD, micro_batches=4, queries=3)
    for objective in ("makespan", "paper"):
        for use_all in (False, True):
            found = plan_pipeline(
                MIXED, WORKLOAD, micro_batches=4, queries=3, objective=objective, use_all=use_all
            )
            assert found.value == best_layout(costs, objective=objective, use_all=use_all).value


def test_the_best_number_of_micro_batches_is_searched() -> None:
    values = {
        m: plan_pipeline(MIXED, WORKLOAD, micro_batches=m, queries=1).value
        for m in WORKLOAD.micro_batch_choices()
    }
    found = plan_pipeline(MIXED, WORKLOAD, queries=1)

    assert values.keys() == {1, 2, 4}
    assert found.value == min(values.values())
    assert found.plan.micro_batches == min(values, key=lambda m: values[m]) > 1


def test_of_equally_fast_numbers_of_micro_batches_the_smaller_one_is_taken() -> None:
    # One device without memory bandwidth to wait for takes the same time however the rows are cut.
    assert plan_pipeline(cluster(devices("nano", 1, tflops=10)), WORKLOAD).plan.micro_batches == 1


def test_a_number_of_micro_batches_that_fits_is_found() -> None:
    small = cluster(devices("nano", 2, tflops=10, memory=6))
    kept = dataclasses.replace(WORKLOAD, activation_elements=7e5)

    assert plan_pipeline(small, kept).plan.micro_batches == 4
    with pytest.raises(InfeasibleError) as error:
        plan_pipeline(small, kept, micro_batches=1)
    assert str(error.value).startswith("No layout with 1 micro-batch fits into memory: nano-0 needs ")
    assert str(error.value).endswith(" GB or more and has 6.00 GB; 4 micro-batches would fit.")


def test_what_fits_with_no_number_of_micro_batches_is_said() -> None:
    with pytest.raises(InfeasibleError) as error:
        plan_pipeline(cluster(devices("nano", 2, tflops=10, memory=3)), WORKLOAD)

    assert str(error.value).startswith("No layout with 4 micro-batches fits into memory: nano-0 needs ")
    assert "GB more on this device alone would be enough." in str(error.value)


def test_more_devices_than_blocks_cannot_all_be_used() -> None:
    many = cluster(devices("nano", 9, tflops=10))

    with pytest.raises(InfeasibleError, match="use_all: found 9 devices for 8 blocks"):
        plan_pipeline(many, WORKLOAD, use_all=True)


def test_a_slow_device_is_left_out_with_a_reason() -> None:
    mixed = cluster(devices("board", 2, tflops=0.5, zo=True), devices("nano", 2, tflops=10))
    found = plan_pipeline(mixed, WORKLOAD, micro_batches=4, queries=12, exit_queries=1)
    whole = plan_pipeline(mixed, WORKLOAD, micro_batches=4, queries=12, exit_queries=1, use_all=True)

    assert found.left_out == (
        f"board-0 and board-1 are left out: the iteration takes {found.value:.3g} s without them and "
        f"{whole.value:.3g} s with every device in use.",
    )
    assert whole.left_out == ()
    # Without a zo stage there is nothing to exit from.
    assert found.plan.exit_queries == 0
    assert whole.plan.exit_queries == 1


def test_each_kind_that_is_left_out_has_its_sentence() -> None:
    found = plan_pipeline(
        cluster(
            devices("board", 1, tflops=0.01, zo=True),
            devices("nano", 2, tflops=10),
            devices("old", 3, tflops=0.01),
        ),
        WORKLOAD,
        micro_batches=4,
    )

    assert [sentence.split(":")[0] for sentence in found.left_out] == [
        "board-0 is left out",
        "old-0, old-1 and old-2 are left out",
    ]


def test_left_out_because_there_are_too_few_blocks_or_too_little_memory() -> None:
    tiny = dataclasses.replace(WORKLOAD, architecture=dataclasses.replace(SIZES, blocks=1))
    pair = cluster(devices("nano", 2, tflops=10))
    useless = cluster(devices("nano", 1, tflops=10), devices("toy", 1, tflops=10, memory=0.01))

    assert plan_pipeline(pair, tiny, micro_batches=4).left_out == (
        "nano-1 is left out: the cluster has 2 devices, more than the model has blocks.",
    )
    assert plan_pipeline(useless, WORKLOAD, micro_batches=4).left_out == (
        "toy-0 is left out: with every device in use nothing fits into memory.",
    )


@pytest.mark.parametrize(
    ("devices", "notes"),
    [
        (MIXED.devices, ()),
        (
            MIXED.devices[2:],
            ("no zo stage: every stage back-propagates, and nothing is perturbed, whatever Q.",),
        ),
        (
            MIXED.devices[:2],
            ("no device can back-propagate: every stage learns from perturbations alone.",),
        ),
        (
            MIXED.devices[:1],
            (
                "one device: no pipeline, it runs the whole model.",
                "no device can back-propagate: every stage learns from perturbations alone.",
            ),
        ),
    ],
)
def test_notes(devices: tuple[Device, ...], notes: tuple[str, ...]) -> None:
    found = plan_pipeline(cluster(devices), WORKLOAD, micro_batches=4)

    assert found.notes == notes
    assert {stage.role for stage in found.plan.stages} <= {
        "zo" if device.profile.forward_only else "bp" for device in devices
    }


def test_stages_have_names_roles_and_speeds() -> None:
    costs = pipeline_costs(MIXED, WORKLOAD, micro_batches=2, queries=5, exit_queries=3)
    layout = (
        Assignment(device=1, first=0, last=3),
        Assignment(device=3, first=3, last=4),
        Assignment(device=2, first=4, last=8),
    )
    plan = layout_plan(costs, layout)
    seconds = [stage.forward for stage in layout_times(costs, layout)[0]]

    assert [(stage.name, stage.role, stage.first, stage.last) for stage in plan.stages] == [
        ("board-1", "zo", 0, 3),
        ("nano-1", "bp", 3, 4),
        ("nano-0", "bp", 4, 8),
    ]
    assert plan.stages[0].speed == 1.0
    # The event simulation behind a schedule takes blocks / speed for a forward.
    simulated = [(stage.last - stage.first) / stage.speed for stage in plan.stages]
    for time, second in zip(simulated, seconds, strict=True):
        assert time / simulated[0] == pytest.approx(second / seconds[0], rel=1e-5)
    assert all(stage.speed == float(f"{stage.speed:.6g}") for stage in plan.stages)
    assert (plan.micro_batches, plan.queries, plan.exit_queries) == (2, 5, 3)


def plan_of(*names: str | None) -> Plan:
    return Plan(
        blocks=len(names),
        stages=tuple(Stage(first=i, last=i + 1, name=name) for i, name in enumerate(names)),
    )


def test_stages_without_names_take_the_other_devices_in_their_order() -> None:
    costs = pipeline_costs(MIXED, WORKLOAD, micro_batches=4, queries=1)

    def order(*names: str | None) -> list[int]:
        return [part.device for part in plan_layout(plan_of(*names), costs)]

    assert order(None, None) == [0, 1]
    assert order(None, "board-0", None) == [1, 0, 2]
    assert order("nano-1", "board-0") == [3, 0]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ("board-0", "tower"),
            "stages[1].name: there is no device tower; the cluster has board-0, board-1, nano-0, nano-1.",
        ),
        (
            ("board-0", "board-0"),
            "stages[0].name: board-0 has 2 stages; give each a device of its own.",
        ),
        (
            (None,) * 5,
            "stages: found 5 for the 4 devices of the cluster; use at most one stage per device.",
        ),
    ],
)
def test_a_plan_for_other_devices_is_refused(names: tuple[str | None, ...], message: str) -> None:
    costs = pipeline_costs(MIXED, WORKLOAD, micro_batches=4, queries=1)

    with pytest.raises(PlanError) as error:
        plan_layout(plan_of(*names), costs)

    assert str(error.value) == message
