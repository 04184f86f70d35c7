"""Puts together what one process runs of a pipeline: its part of the model, its neighbours, its engine."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_hybridop.pipeline.anatomy import Anatomy, CutError, find_language_model
from lightning_hybridop.pipeline.emulation import Emulation, Pace, PacedChannel
from lightning_hybridop.pipeline.engine import Engine
from lightning_hybridop.pipeline.exchange import clock_offset, gather_json
from lightning_hybridop.pipeline.executors import install_for
from lightning_hybridop.pipeline.grouping import Grouping, common_grouping, grouping_of
from lightning_hybridop.pipeline.model_calls import ModelCalls
from lightning_hybridop.pipeline.ownership import block_dtype, frozen_dtype, owned_parameters
from lightning_hybridop.pipeline.packing import DTYPES
from lightning_hybridop.pipeline.replicas import Replicas
from lightning_hybridop.pipeline.stage import StageModel
from lightning_hybridop.pipeline.transport import Channel
from lightning_hybridop.pipeline.weights import check_materialised, materialise
from lightning_hybridop.planning.plan import Plan, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """One process's part of a pipeline.

    `owned` are every stage's trainable parameters by name, `arithmetic` the dtype that each stage computes in.
    `grouping` says what all zo stages together can do with groups of rows.
    """

    owned: tuple[dict[str, nn.Parameter], ...]
    engine: Engine
    calls: ModelCalls
    arithmetic: tuple[torch.dtype, ...]
    grouping: Grouping


def assemble(
    module: nn.Module,
    anatomy: Anatomy,
    *,
    plan: Plan,
    replicas: Replicas,
    device: torch.device,
    autocast: torch.dtype | None,
    perturbable: set[str] | None,
    emulation: Emulation | None,
    timeout: timedelta,
    notice: Callable[[str], None],
) -> Assembly:
    """Cut `module` down to this rank's stage and connect it to its neighbours. Collective.

    Args:
        module: what the user's step runs through.
        anatomy: from `read_anatomy(module)`.
        plan: of the whole pipeline.
        replicas: the ranks of all stages.
        device: where this stage computes.
        autocast: the dtype of mixed precision, None without it.
        perturbable: names of the parameters that zo stages may perturb, None for all.
        emulation: times to keep to, in the place of other devices.
        timeout: how long to wait for a neighbour.
        notice: told what of the plan the zo stages' adapters do not go along with.

    Raises:
        CutError: the plan asks for an early exit around something that is trained.
    """
    rank_of_stage = replicas.own
    stage = rank_of_stage.index(_rank())
    owned = owned_parameters(module, anatomy, tuple(part.last for part in plan.stages))
    _check_exit(plan, anatomy, owned[-1])
    model = stage_model(module, anatomy, plan=plan, stage=stage)
    own_dtype = block_dtype(module.get_submodule(f"{anatomy.blocks_name}.{plan.stages[stage].first}"))
    names = gather_in_order(str(own_dtype).removeprefix("torch."), rank_of_stage)
    dtypes = [DTYPES[name] for name in names]
    estimates = plan.stages[stage].role == "zo"
    zo_parameters = {
        name: parameter
        for name, parameter in owned[stage].items()
        if estimates and (perturbable is None or name in perturbable)
    }
    names = [f"{anatomy.blocks_name}.{i}" for i in range(plan.stages[stage].first, plan.stages[stage].last)]
    blocks = {name: module.get_submodule(name) for name in names}
    factors, own_grouping = grouping_of(module, blocks, zo_parameters, width=anatomy.width)
    groupings = [Grouping(**values) for values in gather_in_order(asdict(own_grouping), rank_of_stage)]
    grouping = common_grouping(groupings, zo_stages=plan.zo_stages)
    plan = _within_grouping(plan, grouping, notice)
    install_for(model, plan.stages[stage], estimator=plan.estimator)
    engine = Engine(
        model=model,
        plan=plan,
        stage=stage,
        parameters=owned[stage],
        zo_parameters=zo_parameters,
        factors=factors,
        channels={
            neighbour: _channel(stage, neighbour, rank_of_stage[neighbour], emulation, timeout)
            for neighbour in (stage - 1, stage + 1)
            if 0 <= neighbour < len(plan.stages)
        },
        width=anatomy.width,
        boundary_dtypes=dtypes,
        device=device,
        clock_offset=clock_offset(),
        pace=None if emulation is None else Pace(emulation, stage),
    )
    calls = ModelCalls(
        engine,
        language_model=find_language_model(module, anatomy.blocks_name),
        last_rank=replicas.first[-1],
        listens=replicas.index > 0,
    )
    arithmetic = tuple(
        _arithmetic(part, dtype, autocast) for part, dtype in zip(plan.stages, dtypes, strict=True)
    )
    return Assembly(
        owned=owned,
        engine=engine,
        calls=calls,
        arithmetic=arithmetic,
        grouping=grouping,
    )


def stage_model(module: nn.Module, anatomy: Anatomy, *, plan: Plan, stage: int) -> StageModel:
    """Cut `module` down to a stage, in the stage's dtype, and read what it needs of weights that are not read yet."""
    part = plan.stages[stage]
    if part.dtype is not None and part.executor == "torch":  # what else computes has weights of its own
        frozen_dtype(module, getattr(torch, part.dtype))
    model = StageModel(
        module,
        anatomy,
        first=part.first,
        last=part.last,
        keep_behind=plan.exit_queries > 0 and stage == plan.exit_stage,
    )
    with model.whole():  # what other stages train lies on all ranks
        materialise(module.parameters())
    check_materialised(module)
    return model


def gather_in_order(value: Any, rank_of_stage: list[int]) -> list[Any]:
    """Return every stage's `value`, plain containers as JSON has them, on every rank. Collective."""
    together = dist.is_initialized() and dist.get_world_size() > 1
    gathered = gather_json(value) if together else [value]
    return [gathered[rank] for rank in rank_of_stage]


def _within_grouping(plan: Plan, grouping: Grouping, notice: Callable[[str], None]) -> Plan:
    """Return the plan with one query in a forward where several cannot ride together."""
    reason = grouping.refusal
    if reason is None and grouping.dropout is not None:
        reason = f"{grouping.dropout} would give each query another dropout mask."
    if plan.queries_per_forward == 1 or reason is None:
        return plan
    notice(f"{reason} Queries run one after the other instead.")
    return replace(plan, queries_per_forward=1)


def _arithmetic(stage: Stage, held: torch.dtype, autocast: torch.dtype | None) -> torch.dtype:
    """Return what the blocks of a stage compute in, given the dtype of what they hold and send."""
    if stage.executor != "torch":
        named: torch.dtype = getattr(torch, stage.dtype or "float32")
        return named
    return held if autocast is None else autocast


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _check_exit(plan: Plan, anatomy: Anatomy, owned_by_last: dict[str, nn.Parameter]) -> None:
    if not plan.exit_queries or plan.exit_stage == len(plan.stages) - 1:
        return
    trained_behind = [name for name in owned_by_last if anatomy.is_behind(name)]
    if trained_behind:
        raise CutError(
            f"exit_queries is {plan.exit_queries}, but {trained_behind[0]} behind the blocks is trained on the "
            "last stage, so an early exit would use a stale copy; freeze it or set exit_queries=0."
        )


def _channel(
    stage: int, neighbour: int, rank: int, emulation: Emulation | None, timeout: timedelta
) -> Channel | PacedChannel:
    channel = Channel(
        peer=rank,
        description=f"Stage {stage} waited: stage {neighbour} (rank {rank})",
        timeout=timeout,
    )
    if emulation is None:
        return channel
    return PacedChannel(channel, emulation.links[min(neighbour, stage)], emulation.time_scale)
