import pytest

from lightning_hybridop.pipeline.anatomy import Anatomy, CutError
from lightning_hybridop.placement import check_given_plan, place_evenly, ranks_on_hosts
from lightning_hybridop.planning.plan import even_plan

ANATOMY = Anatomy(
    blocks_name="layers", blocks=6, embedding_name=None, behind=(), width=8, returns_tuple=False
)


def test_forward_only_devices_stand_at_the_head_whatever_their_ranks() -> None:
    plan, ranks = place_evenly(
        ANATOMY,
        devices=["cpu", "npu:0", "cuda:0", "npu:1"],
        hosts=["nx"] * 4,
        zo_stages=None,
        options={"queries": 3},
    )

    assert ranks == [1, 3, 0, 2]
    assert [(stage.device, stage.role) for stage in plan.stages] == [
        ("npu:0", "zo"),
        ("npu:1", "zo"),
        ("cpu", "bp"),
        ("cuda:0", "bp"),
    ]
    assert [stage.host for stage in plan.stages] == [None] * 4
    assert plan.queries == 3


def test_a_number_of_zo_stages_keeps_the_order_of_ranks() -> None:
    plan, ranks = place_evenly(
        ANATOMY, devices=["cpu"] * 3, hosts=["nx", "nx", "nano"], zo_stages=1, options={}
    )

    assert ranks == [0, 1, 2]
    assert [stage.host for stage in plan.stages] == ["nx", "nx", "nano"]
    assert [stage.role for stage in plan.stages] == ["zo", "bp", "bp"]


def test_a_plan_of_replicas_names_no_hosts_of_one_of_them() -> None:
    plan, _ = place_evenly(
        ANATOMY, devices=["cpu"] * 2, hosts=["nx", "nano"], zo_stages=0, options={"replicas": 2}
    )

    assert [stage.host for stage in plan.stages] == [None, None]


def test_a_plan_must_be_for_this_model_and_these_processes() -> None:
    check_given_plan(even_plan(blocks=6, stages=2), ANATOMY, ranks=2)
    with pytest.raises(CutError, match="block 5 is in no stage"):
        check_given_plan(even_plan(blocks=5, stages=2), ANATOMY, ranks=2)
    with pytest.raises(CutError, match="for 7 blocks, but layers has 6;"):
        check_given_plan(even_plan(blocks=7, stages=2), ANATOMY, ranks=2)
    with pytest.raises(CutError, match="2 stages, but 3 processes"):
        check_given_plan(even_plan(blocks=6, stages=2), ANATOMY, ranks=3)


@pytest.mark.parametrize(
    ("wanted", "hosts", "ranks"),
    [
        ([None] * 3, ["a", "b", "b"], [0, 1, 2]),
        (["b", "a"], ["a", "b"], [1, 0]),
        (["b", None, "b", "a"], ["b", "a", "b", "c"], [0, 3, 2, 1]),
        # A stage that goes anywhere leaves room for one that does not.
        ([None, "a", None], ["a", "b", "c"], [1, 0, 2]),
    ],
)
def test_a_stage_goes_to_the_host_that_the_plan_names(
    wanted: list[str | None], hosts: list[str], ranks: list[int]
) -> None:
    assert ranks_on_hosts(wanted, hosts) == ranks


def test_a_host_that_is_missing_or_too_small_is_named_with_those_that_came() -> None:
    with pytest.raises(
        CutError,
        match=r"^Stages 0, 2 of the plan are for the host atlas, where no processes of this run came up \(hosts and their "
        r"processes: nx \(2\), nano \(1\)\); start one there for each",
    ):
        ranks_on_hosts(["atlas", None, "atlas"], ["nx", "nx", "nano"])
    with pytest.raises(CutError, match=r"^Stages 0, 1 of the plan are for the host nano, where 1 process of"):
        ranks_on_hosts(["nano", "nano"], ["nx", "nano"])
    with pytest.raises(
        CutError,
        match=r"^Stage 1 of the plan is for the host nano, where 1 process of .* start one there for each and replica \(",
    ):
        ranks_on_hosts(["nx", "nano"], ["nx", "nano", "nx"], replicas=2)


def test_each_replica_has_its_own_ranks_on_the_hosts_of_the_plan() -> None:
    assert ranks_on_hosts(["nx", "nano"], ["nano", "nx", "nano", "nx"], replicas=2) == [1, 0, 3, 2]


def test_replicas_need_as_many_times_the_processes() -> None:
    plan = even_plan(blocks=6, stages=2, replicas=3)

    assert plan.processes == 6
    check_given_plan(plan, ANATOMY, ranks=6)
    with pytest.raises(CutError, match="2 stages and 3 replicas, but 4 processes run; start one process per"):
        check_given_plan(plan, ANATOMY, ranks=4)
