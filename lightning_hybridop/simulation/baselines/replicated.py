"""Pipelines whose stages are replicated: the rows of every micro-batch are shared out among a stage's devices."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hybridop.planning.costs import PipelineCosts
from lightning_hybridop.planning.plan import even_plan
from lightning_hybridop.schedules.actions import Action, Kind
from lightning_hybridop.schedules.dependencies import dependencies
from lightning_hybridop.schedules.one_forward_one_backward import one_forward_one_backward
from lightning_hybridop.simulation.baselines.common import (
    Baseline,
    all_reduce_seconds,
    named_range,
    range_bytes,
    range_seconds,
)
from lightning_hybridop.simulation.program import Collective, Edge, Numbers, Task, assemble


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedStage:
    """Blocks `[first, last)` on several devices, each with so many rows of every micro-batch, at least one."""

    first: int
    last: int
    devices: tuple[int, ...]
    rows: tuple[int, ...]


def replicated_pipeline(costs: PipelineCosts, stages: Sequence[ReplicatedStage]) -> Baseline:
    """Return the 1F1B program of replicated stages, which all-reduce their adapters after their last backward.

    Rows keep their order, so that a device sends each device of the next stage the rows that both of them have. Times
    and activations are in proportion to rows.
    """
    rows = sum(stages[0].rows)
    plan = even_plan(
        blocks=len(stages),
        stages=len(stages),
        micro_batches=costs.micro_batches,
        queries=0,
        schedule="1f1b",
    )
    schedule = one_forward_one_backward(plan)
    place = {
        device: (index, replica)
        for index, stage in enumerate(stages)
        for replica, device in enumerate(stage.devices)
    }
    devices = sorted(place)
    position = {device: index for index, device in enumerate(devices)}
    spans = [_spans(stage.rows) for stage in stages]

    def describe(index: int, action: Action, numbers: Numbers) -> Task:
        stage, replica = place[devices[index]]
        part = stages[stage]
        share = part.rows[replica] / rows
        forward, backward = range_seconds(costs.devices[devices[index]], part.first, part.last)
        _, kept = range_bytes(costs, devices[index], part.first, part.last)
        after = []
        for other, needed in dependencies(plan, stage, action):
            if other == stage:
                after.append(Edge(task=numbers[index, needed]))
                continue
            for source, span in zip(stages[other].devices, spans[other], strict=True):
                shared = _overlap(span, spans[stage][replica])
                if shared > 0:
                    link = costs.links[source][devices[index]]
                    after.append(
                        Edge(
                            task=numbers[position[source], needed],
                            link=(position[source], index),
                            transfer=link.transfer * shared / rows,
                            latency=link.latency,
                        )
                    )
        goes_back = action.kind is Kind.BACKWARD
        return Task(
            device=index,
            action=action,
            seconds=share * (backward if goes_back else forward),
            after=tuple(after),
            holds=0.0 if goes_back else share * kept,
            releases=share * kept if goes_back else 0.0,
        )

    def resident(device: int) -> float:
        stage = stages[place[device][0]]
        return range_bytes(costs, device, stage.first, stage.last)[0]

    program = assemble(
        [costs.devices[device].name for device in devices],
        [schedule[place[device][0]] for device in devices],
        describe,
        resident=[resident(device) for device in devices],
        collectives=[
            Collective(
                name="all-reduce of adapters",
                devices=tuple(position[device] for device in stage.devices),
                seconds=adapter_seconds(costs, stage.devices, stage.first, stage.last),
            )
            for stage in stages
            if len(stage.devices) > 1
        ],
    )
    return Baseline(program=program, description="; ".join(_text(costs, stage) for stage in stages))


def adapter_seconds(costs: PipelineCosts, devices: Sequence[int], first: int, last: int) -> float:
    """Return how long these devices take to all-reduce the adapters of blocks `[first, last)`."""
    return all_reduce_seconds(costs, devices, costs.adapter_bytes * (last - first))


def _spans(rows: Sequence[int]) -> list[tuple[int, int]]:
    return [(sum(rows[:index]), sum(rows[: index + 1])) for index in range(len(rows))]


def _overlap(first: tuple[int, int], second: tuple[int, int]) -> int:
    return min(first[1], second[1]) - max(first[0], second[0])


def _text(costs: PipelineCosts, stage: ReplicatedStage) -> str:
    names = " + ".join(costs.devices[device].name for device in stage.devices)
    shares = ""
    if len(stage.devices) > 1:
        shares = f" ({' + '.join(map(str, stage.rows))} rows of each micro-batch)"
    return f"{names}: {named_range(stage.first, stage.last)}{shares}"
