"""A whole pipeline in one process: every stage's work, one action after the other, without any transport."""

import copy
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from lightning_hybridop.pipeline.anatomy import Anatomy
from lightning_hybridop.pipeline.engine import Engine
from lightning_hybridop.pipeline.executors import install_for
from lightning_hybridop.pipeline.grouping import grouping_of
from lightning_hybridop.pipeline.ownership import block_dtype, frozen_dtype, owned_parameters
from lightning_hybridop.pipeline.stage import StageModel
from lightning_hybridop.pipeline.work import Work
from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.schedules.actions import Action, Kind, Schedule
from lightning_hybridop.schedules.dependencies import dependencies
from lightning_hybridop.schedules.timeline import TimedAction

CPU = torch.device("cpu")


def engines_of(
    module: nn.Module, anatomy: Anatomy, plan: Plan, *, perturbable: Collection[str]
) -> list[Engine]:
    """Return an engine for each stage, without neighbours, over a copy of `module` that is cut down to the stage.

    `perturbable` are the names of the parameters that zo stages train.
    """
    engines = []
    for number, stage in enumerate(plan.stages):
        own = copy.deepcopy(module)
        parameters = owned_parameters(own, anatomy, tuple(part.last for part in plan.stages))[number]
        if stage.dtype is not None and stage.executor == "torch":
            frozen_dtype(own, getattr(torch, stage.dtype))
        names = [f"{anatomy.blocks_name}.{index}" for index in range(stage.first, stage.last)]
        blocks = {name: own.get_submodule(name) for name in names}
        estimates = stage.role == "zo"
        zo_parameters = {n: p for n, p in parameters.items() if estimates and n in perturbable}
        factors, _ = grouping_of(own, blocks, zo_parameters, width=anatomy.width)
        keep_behind = plan.exit_queries > 0 and number == plan.exit_stage
        model = StageModel(own, anatomy, first=stage.first, last=stage.last, keep_behind=keep_behind)
        install_for(model, stage, estimator=plan.estimator)
        engines.append(
            Engine(
                model=model,
                plan=plan,
                stage=number,
                parameters=parameters,
                zo_parameters=zo_parameters,
                factors=factors,
                channels={},
                width=anatomy.width,
                boundary_dtypes=[block_dtype(blocks[names[0]])],
                device=CPU,
                clock_offset=0.0,
            )
        )
    return engines


def run_schedule(works: Sequence[Work], schedule: Schedule, plan: Plan) -> dict[tuple[int, Action], int]:
    """Run a mini-batch, each stage's actions in its order; return the bytes that each (stage, action) sends to another.

    The outcomes are in the works, with timelines as if each stage had run alone.
    """
    waiting: dict[tuple[int, Action], Tensor] = {}
    done: set[tuple[int, Action]] = set()
    positions: dict[int, int] = defaultdict(int)
    sent: dict[tuple[int, Action], int] = {}
    with ExitStack() as stack:
        for work in works:
            stack.enter_context(work.own_gradients())
        while len(done) < sum(map(len, schedule)):
            for stage, work in enumerate(works):
                while positions[stage] < len(schedule[stage]):
                    action = schedule[stage][positions[stage]]
                    if not done.issuperset(dependencies(plan, stage, action)):
                        break
                    started = time.perf_counter()
                    outgoing = work.run(action, waiting.pop((stage, action), None))
                    ended = time.perf_counter()
                    work.outcome.timeline.append(
                        TimedAction(stage=stage, action=action, start=started, end=ended)
                    )
                    if outgoing is not None:
                        target = stage - 1 if action.kind is Kind.BACKWARD else stage + 1
                        waiting[target, action] = outgoing.detach()
                        sent[stage, action] = outgoing.numel() * outgoing.element_size()
                    done.add((stage, action))
                    positions[stage] += 1
    return sent
