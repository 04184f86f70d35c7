"""Which rank runs which stage: a given plan checked against the model, or an even plan over the ranks' devices."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_hybridop.accelerators import default_role
from lightning_hybridop.pipeline.anatomy import Anatomy, CutError
from lightning_hybridop.planning.plan import Plan, even_plan, named_blocks


def check_given_plan(plan: Plan, anatomy: Anatomy, *, ranks: int) -> None:
    """Check that a plan is for this model and this number of processes.

    Raises:
        CutError: naming the blocks in no stage, or both counts.
    """
    if plan.blocks != anatomy.blocks:
        short = plan.blocks < anatomy.blocks
        missing = f", so {named_blocks(plan.blocks, anatomy.blocks)} in no stage" if short else ""
        raise CutError(
            f"The plan is for {plan.blocks} blocks, but {anatomy.blocks_name} has {anatomy.blocks}{missing}; "
            "edit `blocks` and the stages of the plan."
        )
    check_process_count(plan, ranks=ranks)


def check_process_count(plan: Plan, *, ranks: int) -> None:
    """Raise CutError, naming both counts, unless there is one process for each stage of each of a plan's replicas."""
    if plan.processes != ranks:
        times = f" and {plan.replicas} replicas" if plan.replicas > 1 else ""
        each = " and replica" if plan.replicas > 1 else ""
        raise CutError(
            f"The plan has {len(plan.stages)} stages{times}, but {ranks} processes run; start one process per stage{each}."
        )


def place_evenly(
    anatomy: Anatomy, *, devices: Sequence[str], zo_stages: int | None, options: Mapping[str, Any]
) -> tuple[Plan, list[int]]:
    """Return an even plan with one stage per rank, and the rank of each stage.

    `devices` are the ranks' devices. Without `zo_stages`, forward-only devices stand at the head, whatever their
    ranks; with it, stages are in the order of ranks. `options` are further fields of the plan.
    """
    ranks = list(range(len(devices)))
    if zo_stages is None:
        forward_only = [default_role(device) == "zo" for device in devices]
        ranks.sort(key=lambda rank: not forward_only[rank])
        zo_stages = sum(forward_only)
    plan = even_plan(blocks=anatomy.blocks, stages=len(devices), zo_stages=zo_stages, **options)
    stages = [replace(stage, device=devices[rank]) for stage, rank in zip(plan.stages, ranks, strict=True)]
    return replace(plan, stages=tuple(stages)), ranks
