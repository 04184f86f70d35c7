"""Which rank runs which stage: a given plan checked against the model, or an even plan over the ranks' devices."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_hybridop.accelerators import default_role
from lightning_hybridop.pipeline.anatomy import Anatomy, CutError
from lightning_hybridop.pipeline.interface import hosts_to_name
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


def ranks_on_hosts(wanted: Sequence[str | None], hosts: Sequence[str], *, replicas: int = 1) -> list[int]:
    """Return the rank of each stage, given the host that each stage is for (None: any) and the host of each rank.

    Stages of one host go to its ranks in order, those for any host to the ranks left; all stages of one replica come
    before those of the next.

    Raises:
        CutError: a host is missing or runs too few processes; names the hosts that came.
    """
    free = list(range(len(hosts)))
    ranks: list[int | None] = []
    for host in [*wanted] * replicas:
        rank = None if host is None else next((rank for rank in free if hosts[rank] == host), None)
        if rank is not None:
            free.remove(rank)
        elif host is not None:
            stages = [str(stage) for stage, other in enumerate(wanted) if other == host]
            each = " and replica" if replicas > 1 else ""
            came = ", ".join(f"{name} ({hosts.count(name)})" for name in dict.fromkeys(hosts))
            raise CutError(
                f"{'Stage' if len(stages) == 1 else 'Stages'} {', '.join(stages)} of the plan {'is' if len(stages) == 1 else 'are'} "
                f"for the host {host}, where {hosts.count(host) or 'no'} process{'' if hosts.count(host) == 1 else 'es'} of this "
                f"run came up (hosts and their processes: {came}); start one there for each{each} (HYBRIDOP_HOST says what a host is "
                "called), or change `host` in the plan."
            )
        ranks.append(rank)
    return [free.pop(0) if rank is None else rank for rank in ranks]


def place_evenly(
    anatomy: Anatomy,
    *,
    devices: Sequence[str],
    hosts: Sequence[str],
    zo_stages: int | None,
    options: Mapping[str, Any],
) -> tuple[Plan, list[int]]:
    """Return an even plan with one stage per rank, and the rank of each stage.

    `devices` are the ranks' devices, `hosts` where they are: the plan names those if there are several. Without
    `zo_stages`, forward-only devices stand at the head, whatever their ranks; with it, stages are in the order of ranks.
    `options` are further fields of the plan.
    """
    ranks = list(range(len(devices)))
    if zo_stages is None:
        forward_only = [default_role(device) == "zo" for device in devices]
        ranks.sort(key=lambda rank: not forward_only[rank])
        zo_stages = sum(forward_only)
    plan = even_plan(blocks=anatomy.blocks, stages=len(devices), zo_stages=zo_stages, **options)
    # A plan has one host for a stage, whose replicas may be on several.
    named = hosts_to_name(hosts) if plan.replicas == 1 else [None] * len(devices)
    stages = [
        replace(stage, device=devices[rank], host=named[rank])
        for stage, rank in zip(plan.stages, ranks, strict=True)
    ]
    return replace(plan, stages=tuple(stages)), ranks
