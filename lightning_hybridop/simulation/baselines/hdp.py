"""HDP, hybrid data and pipeline parallelism: a pipeline inside each group of devices, data parallel across groups."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_hybridop.planning.costs import DeviceCosts, PipelineCosts
from lightning_hybridop.planning.plan import even_plan
from lightning_hybridop.schedules.actions import Action, Kind
from lightning_hybridop.schedules.dependencies import dependencies
from lightning_hybridop.schedules.one_forward_one_backward import one_forward_one_backward
from lightning_hybridop.simulation.baselines.common import (
    Baseline,
    back_propagating,
    best_split,
    kind_of,
    named_range,
    range_bytes,
    range_seconds,
    split_evenly,
    whole_rows,
)
from lightning_hybridop.simulation.baselines.replicated import adapter_seconds
from lightning_hybridop.simulation.program import Collective, Edge, Numbers, Task, assemble


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Devices in pipeline order, the bounds of their blocks, and the rows of each of the group's micro-batches."""

    devices: tuple[int, ...]
    bounds: tuple[int, ...]
    rows: tuple[int, ...] = ()


def hdp(costs: PipelineCosts) -> Baseline:
    """Return HDP: every group holds the whole model and trains on its own share of the mini-batch's rows.

    Chosen here: devices that only run forward elsewhere form one group, whose micro-batches have one row; all others are
    grouped by kind (equal costs), with micro-batches of as many rows as anywhere. Inside a group the blocks are split to
    minimise the time of 1F1B within memory, or evenly if nothing fits. Every group gets one row, so that all take
    part, and each further row goes to the group that would finish it first; a group stays out only if the mini-batch has
    fewer rows than there are groups. The holders of a block in all groups all-reduce its adapters at the end.

    Raises:
        BaselineError: a device cannot back-propagate, or a group has more devices than there are blocks.
    """
    forward_only = [device.zo for device in costs.devices]
    costs = back_propagating(costs)
    rows = whole_rows(costs)
    kinds: dict[DeviceCosts | str, list[int]] = {}
    for index, device in enumerate(costs.devices):
        kinds.setdefault("zo" if forward_only[index] else kind_of(device), []).append(index)
    largest = [1 if forward_only[members[0]] else rows for members in kinds.values()]
    groups = [
        _Group(devices=tuple(members), bounds=_split(costs, members, most / rows))
        for members, most in zip(kinds.values(), largest, strict=True)
    ]
    shares = _share_out(costs, groups, largest, rows * costs.micro_batches, rows)
    idle = [group for group, share in zip(groups, shares, strict=True) if share == 0]
    groups = [
        _Group(devices=group.devices, bounds=group.bounds, rows=_micro_batches(share, most))
        for group, share, most in zip(groups, shares, largest, strict=True)
        if share
    ]
    stays_out = [costs.devices[device].name for group in idle for device in group.devices]
    baseline = _program(costs, groups, rows)
    if not stays_out:
        return baseline
    return Baseline(
        program=baseline.program,
        description=f"{baseline.description}; without rows: {', '.join(stays_out)}",
    )


def _program(costs: PipelineCosts, groups: Sequence[_Group], rows: int) -> Baseline:
    """Return the 1F1B programs of groups side by side, and the all-reduces behind them."""
    place = {device: (group, stage) for group in groups for stage, device in enumerate(group.devices)}
    devices = sorted(place)
    position = {device: index for index, device in enumerate(devices)}
    plans = {
        group.devices: even_plan(
            blocks=len(group.devices),
            stages=len(group.devices),
            micro_batches=len(group.rows),
            queries=0,
            schedule="1f1b",
        )
        for group in groups
    }
    schedules = {members: one_forward_one_backward(plan) for members, plan in plans.items()}

    def describe(index: int, action: Action, numbers: Numbers) -> Task:
        device = devices[index]
        group, stage = place[device]
        share = group.rows[action.micro_batch] / rows
        first, last = group.bounds[stage], group.bounds[stage + 1]
        forward, backward = range_seconds(costs.devices[device], first, last)
        kept = share * range_bytes(costs, device, first, last)[1]
        after = []
        for other, needed in dependencies(plans[group.devices], stage, action):
            source = position[group.devices[other]]
            if source == index:
                after.append(Edge(task=numbers[index, needed]))
                continue
            link = costs.links[group.devices[other]][device]
            after.append(
                Edge(
                    task=numbers[source, needed],
                    link=(source, index),
                    transfer=share * link.transfer,
                    latency=link.latency,
                )
            )
        goes_back = action.kind is Kind.BACKWARD
        return Task(
            device=index,
            action=action,
            seconds=share * (backward if goes_back else forward),
            after=tuple(after),
            holds=0.0 if goes_back else kept,
            releases=kept if goes_back else 0.0,
        )

    def resident(device: int) -> float:
        group, stage = place[device]
        return range_bytes(costs, device, group.bounds[stage], group.bounds[stage + 1])[0]

    program = assemble(
        [costs.devices[device].name for device in devices],
        [schedules[place[device][0].devices][place[device][1]] for device in devices],
        describe,
        resident=[resident(device) for device in devices],
        collectives=_collectives(costs, groups, position),
    )
    return Baseline(program=program, description="; ".join(_text(costs, group) for group in groups))


def _split(costs: PipelineCosts, devices: Sequence[int], share: float) -> tuple[int, ...]:
    """Return the bounds of a group's blocks, given the share of a micro-batch's rows that its own ones have.

    As many micro-batches are assumed as the mini-batch has: how many the group gets is not known yet.
    """

    def cost(stage: int, first: int, last: int) -> tuple[float, float] | None:
        resident, kept = range_bytes(costs, devices[stage], first, last)
        in_flight = min(costs.micro_batches, len(devices) - stage)
        if resident + in_flight * share * kept > costs.devices[devices[stage]].memory:
            return None
        seconds = sum(range_seconds(costs.devices[devices[stage]], first, last))
        return seconds, (costs.micro_batches - 1) * seconds

    even = split_evenly(costs, len(devices))
    return best_split(len(devices), costs.blocks, cost) or even


def _share_out(
    costs: PipelineCosts, groups: Sequence[_Group], largest: Sequence[int], total: int, rows: int
) -> list[int]:
    """Give one row to each group, fast ones first, and every other row to the group that would then be done first.

    A group's time is `sum (t + b) + (M - 1) max (t + b)`.
    """
    shares = [0] * len(groups)
    per_row = [
        [
            sum(range_seconds(costs.devices[device], group.bounds[stage], group.bounds[stage + 1])) / rows
            for stage, device in enumerate(group.devices)
        ]
        for group in groups
    ]

    def finish(index: int) -> float:
        share = shares[index] + 1
        size = min(largest[index], share)
        return size * sum(per_row[index]) + (share - size) * max(per_row[index])

    for _ in range(total):
        shares[min(range(len(groups)), key=lambda index: (shares[index] > 0, finish(index)))] += 1
    return shares


def _micro_batches(rows: int, most: int) -> tuple[int, ...]:
    whole, rest = divmod(rows, most)
    return (most,) * whole + ((rest,) if rest else ())


def _collectives(
    costs: PipelineCosts, groups: Sequence[_Group], position: Mapping[int, int]
) -> list[Collective]:
    """Return one all-reduce for each run of blocks that has the same holder in every group; the last blocks first."""
    if len(groups) < 2:
        return []
    cuts = sorted({bound for group in groups for bound in group.bounds}, reverse=True)
    collectives = []
    for last, first in itertools.pairwise(cuts):
        holders = tuple(
            group.devices[max(stage for stage, bound in enumerate(group.bounds) if bound <= first)]
            for group in groups
        )
        collectives.append(
            Collective(
                name="all-reduce of adapters",
                devices=tuple(position[device] for device in holders),
                seconds=adapter_seconds(costs, holders, first, last),
            )
        )
    return collectives


def _text(costs: PipelineCosts, group: _Group) -> str:
    stages = ", ".join(
        f"{costs.devices[device].name}: {named_range(group.bounds[stage], group.bounds[stage + 1])}"
        for stage, device in enumerate(group.devices)
    )
    return f"{stages} ({sum(group.rows)} rows of the mini-batch, micro-batches of {max(group.rows)})"
