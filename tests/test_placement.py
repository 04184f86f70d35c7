import pytest

from lightning_hybridop.pipeline.anatomy import Anatomy, CutError
from lightning_hybridop.placement import check_given_plan, place_evenly
from lightning_hybridop.planning.plan import even_plan

ANATOMY = Anatomy(
    blocks_name="layers", blocks=6, embedding_name=None, behind=(), width=8, returns_tuple=False
)


def test_forward_only_devices_stand_at_the_head_whatever_their_ranks() -> None:
    plan, ranks = place_evenly(
        ANATOMY, devices=["cpu", "npu:0", "cuda:0", "npu:1"], zo_stages=None, options={"queries": 3}
    )

    assert ranks == [1, 3, 0, 2]
    assert [(stage.device, stage.role) for stage in plan.stages] == [
        ("npu:0", "zo"),
        ("npu:1", "zo"),
        ("cpu", "bp"),
        ("cuda:0", "bp"),
    ]
    assert plan.queries == 3


def test_a_number_of_zo_stages_keeps_the_order_of_ranks() -> None:
    plan, ranks = place_evenly(ANATOMY, devices=["cpu"] * 3, zo_stages=1, options={})

    assert ranks == [0, 1, 2]
    assert [stage.role for stage in plan.stages] == ["zo", "bp", "bp"]


def test_a_plan_must_be_for_this_model_and_these_processes() -> None:
    check_given_plan(even_plan(blocks=6, stages=2), ANATOMY, ranks=2)
    with pytest.raises(CutError, match="block 5 is in no stage"):
        check_given_plan(even_plan(blocks=5, stages=2), ANATOMY, ranks=2)
    with pytest.raises(CutError, match="for 7 blocks, but layers has 6;"):
        check_given_plan(even_plan(blocks=7, stages=2), ANATOMY, ranks=2)
    with pytest.raises(CutError, match="2 stages, but 3 processes"):
        check_given_plan(even_plan(blocks=6, stages=2), ANATOMY, ranks=3)


def test_replicas_need_as_many_times_the_processes() -> None:
    plan = even_plan(blocks=6, stages=2, replicas=3)

    assert plan.processes == 6
    check_given_plan(plan, ANATOMY, ranks=6)
    with pytest.raises(CutError, match="2 stages and 3 replicas, but 4 processes run; start one process per"):
        check_given_plan(plan, ANATOMY, ranks=4)
