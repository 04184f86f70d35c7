"""HybridOP with the zo stages at the tail, the placement that the paper compares its own with."""

import dataclasses

from lightning_hybridop.planning.costs import Assignment, Layout, PipelineCosts, layout_bytes, layout_times
from lightning_hybridop.planning.plan import even_plan
from lightning_hybridop.schedules.actions import Action, Kind
from lightning_hybridop.schedules.one_forward_one_backward import one_forward_one_backward
from lightning_hybridop.simulation.baselines.common import (
    Baseline,
    BaselineError,
    best_split,
    named_range,
    range_bytes,
    range_seconds,
)
from lightning_hybridop.simulation.program import Edge, Numbers, Program, Task, assemble


def hybridop_tail(costs: PipelineCosts) -> Baseline:
    """Return bp stages followed by zo stages, split to minimise the paper's `T_tail` within memory.

    Devices stand in the cluster's order within each role; what the links take is added to `T_tail`. Early exits would
    leave at the last stage, where every pass ends, so that exit queries count as queries here.

    Raises:
        BaselineError: only one role is there, fewer blocks than devices, or no split fits the memory.
    """
    bp = [index for index, device in enumerate(costs.devices) if not device.zo]
    zo = [index for index, device in enumerate(costs.devices) if device.zo]
    if not bp or not zo:
        raise BaselineError(
            f"Found {len(bp)} devices that back-propagate and {len(zo)} that only run forward, but zo stages behind bp "
            "stages need at least one of each; add one."
        )
    devices = bp + zo
    if len(devices) > costs.blocks:
        raise BaselineError(
            f"Found {len(devices)} devices for {costs.blocks} blocks, but each needs a block of its own; use fewer "
            "devices."
        )
    costs = dataclasses.replace(costs, queries=costs.queries + costs.exit_queries, exit_queries=0)
    bounds = best_split(len(devices), costs.blocks, lambda *part: _stage_cost(costs, devices, *part))
    if bounds is None:
        raise BaselineError("No split with the zo stages behind the bp stages fits the devices' memory.")
    layout = tuple(
        Assignment(device=device, first=bounds[index], last=bounds[index + 1])
        for index, device in enumerate(devices)
    )
    return Baseline(
        program=tail_program(costs, layout),
        description="; ".join(
            f"{costs.devices[part.device].name} ({'zo' if costs.devices[part.device].zo else 'bp'}): "
            f"{named_range(part.first, part.last)}"
            for part in layout
        ),
    )


def tail_program(costs: PipelineCosts, layout: Layout) -> Program:
    """Return the program of a layout of bp stages followed by zo stages.

    Base forwards run through all stages, the Q perturbed ones of a micro-batch through the zo stages alone, from what
    the last bp stage sent them. That stage's backward of a micro-batch waits until the last zo stage has finished all
    of them, which gives it the estimate of its gradient. bp stages run in the order of 1F1B over all stages.
    """
    stages, _ = layout_times(costs, layout)
    held = layout_bytes(costs, layout)
    last = len(stages) - 1
    first_zo = next(index for index, stage in enumerate(stages) if stage.role != "bp")
    pipeline = even_plan(
        blocks=len(stages), stages=len(stages), micro_batches=costs.micro_batches, queries=0, schedule="1f1b"
    )
    orders = [
        actions if index < first_zo else _zo_order(costs)
        for index, actions in enumerate(one_forward_one_backward(pipeline))
    ]

    def edge(source: int, target: int, action: Action, numbers: Numbers) -> Edge:
        link = costs.links[layout[source].device][layout[target].device]
        return Edge(
            task=numbers[source, action],
            link=(source, target),
            transfer=link.transfer,
            latency=link.latency,
        )

    def describe(stage: int, action: Action, numbers: Numbers) -> Task:
        forward = Action(kind=Kind.FORWARD, micro_batch=action.micro_batch)
        if action.kind is Kind.BACKWARD:
            source, needed = (
                (last, _last_pass(costs, action)) if stage == first_zo - 1 else (stage + 1, action)
            )
            after = (Edge(task=numbers[stage, forward]), edge(source, stage, needed, numbers))
            return Task(
                device=stage,
                action=action,
                seconds=stages[stage].backward,
                after=after,
                releases=held[stage].kept,
            )
        if action.kind is Kind.PERTURBED and stage == first_zo:
            after_forward: tuple[Edge, ...] = (Edge(task=numbers[stage, forward]),)
        else:
            after_forward = (edge(stage - 1, stage, action, numbers),) if stage > 0 else ()
        return Task(
            device=stage,
            action=action,
            seconds=stages[stage].forward,
            after=after_forward,
            holds=held[stage].kept if stage < first_zo else 0.0,
        )

    return assemble(
        [costs.devices[part.device].name for part in layout],
        orders,
        describe,
        resident=[stage.resident for stage in held],
    )


def _zo_order(costs: PipelineCosts) -> tuple[Action, ...]:
    return tuple(
        action
        for micro_batch in range(costs.micro_batches)
        for action in (
            Action(kind=Kind.FORWARD, micro_batch=micro_batch),
            *(
                Action(kind=Kind.PERTURBED, micro_batch=micro_batch, query=query)
                for query in range(costs.queries)
            ),
        )
    )


def _last_pass(costs: PipelineCosts, backward: Action) -> Action:
    """Return the last forward of a micro-batch on the zo stages."""
    if costs.queries == 0:
        return Action(kind=Kind.FORWARD, micro_batch=backward.micro_batch)
    return Action(kind=Kind.PERTURBED, micro_batch=backward.micro_batch, query=costs.queries - 1)


def _stage_cost(
    costs: PipelineCosts, devices: list[int], stage: int, first: int, last: int
) -> tuple[float, float] | None:
    """Return what a stage adds to the first pass, and what its other work takes; None if its memory is too small."""
    device = costs.devices[devices[stage]]
    forward, backward = range_seconds(device, first, last)
    resident, kept = range_bytes(costs, devices[stage], first, last)
    arrival, transfer = 0.0, 0.0
    if stage > 0:
        link = costs.links[devices[stage - 1]][devices[stage]]
        arrival, transfer = link.arrival, link.transfer
    passes = costs.micro_batches * (1 + costs.queries)
    if device.zo:
        logits = device.head_kept if last == costs.blocks else 0.0
        if resident + logits > device.memory:
            return None
        inside = stage > 0 and costs.devices[devices[stage - 1]].zo
        crossing = (passes - 1 if inside else costs.micro_batches - 1) * transfer
        return forward + arrival, max((passes - 1) * forward, crossing)
    in_flight = min(costs.micro_batches, len(devices) - stage)
    if resident + in_flight * kept > device.memory:
        return None
    both = forward + backward
    return both + 2 * arrival, (costs.micro_batches - 1) * max(both, transfer)
