"""Chimera (Li and Hoefler, 2021): two pipelines over the same devices, in opposite directions."""

from collections.abc import Sequence

from lightning_hybridop.planning.costs import PipelineCosts
from lightning_hybridop.schedules.actions import Action, Kind
from lightning_hybridop.simulation.baselines.common import (
    Baseline,
    BaselineError,
    all_reduce_seconds,
    back_propagating,
    named_range,
    only_devices,
    range_bytes,
    range_seconds,
    split_evenly,
    total_seconds,
)
from lightning_hybridop.simulation.program import Collective, Edge, Numbers, Task, assemble


def chimera(costs: PipelineCosts) -> Baseline:
    """Return Chimera over an even number of devices, evenly split; each holds the weights of two stages.

    Even micro-batches go down the devices, odd ones up. Chosen here: of an odd number of devices the slowest stays out;
    more than D micro-batches run in units of D, directly concatenated, without the variants that double forwards or
    halve backwards. At the end the two holders of each stage all-reduce its adapters.

    Raises:
        BaselineError: a device cannot back-propagate, fewer than two devices, or fewer blocks than devices.
    """
    costs = back_propagating(costs)
    left_out = ""
    if len(costs.devices) % 2:
        everyone = range(len(costs.devices))
        slowest = max(everyone, key=lambda device: (total_seconds(costs.devices[device]), device))
        left_out = (
            f"; {costs.devices[slowest].name} stays out, the slowest of {len(costs.devices)}: two directions need an "
            "even number of devices"
        )
        costs = only_devices(costs, [device for device in everyone if device != slowest])
    count = len(costs.devices)
    if count == 0:
        raise BaselineError(
            "Found 1 device, but two pipelines in opposite directions need at least 2; add one."
        )
    bounds = split_evenly(costs, count)
    ranges = [
        [(bounds[stage], bounds[stage + 1]) for stage in stages_of(device, count)] for device in range(count)
    ]

    def describe(device: int, action: Action, numbers: Numbers) -> Task:
        stage = stages_of(device, count)[action.micro_batch % 2]
        first, last = bounds[stage], bounds[stage + 1]
        forward, backward = range_seconds(costs.devices[device], first, last)
        _, kept = range_bytes(costs, device, first, last)
        goes_back = action.kind is Kind.BACKWARD
        return Task(
            device=device,
            action=action,
            seconds=backward if goes_back else forward,
            after=tuple(
                _edge(costs, numbers[needed], needed[0], device) for needed in needs(device, action, count)
            ),
            holds=0.0 if goes_back else kept,
            releases=kept if goes_back else 0.0,
        )

    program = assemble(
        [device.name for device in costs.devices],
        orders(count, costs.micro_batches),
        describe,
        resident=[_resident(costs, device, ranges[device]) for device in range(count)],
        collectives=[
            _all_reduce(costs, (device, count - 1 - device), ranges[device]) for device in range(count // 2)
        ],
    )
    description = "; ".join(
        f"{costs.devices[device].name}: {named_range(*down)} and {named_range(*up)}"
        for device, (down, up) in enumerate(ranges)
    )
    return Baseline(program=program, description=description + left_out)


def stages_of(device: int, count: int) -> tuple[int, int]:
    """Return the stage that a device runs for micro-batches going down, and the one for those going up."""
    return device, count - 1 - device


def needs(device: int, action: Action, count: int) -> tuple[tuple[int, Action], ...]:
    """Return the (device, action) pairs that an action waits for."""
    step = 1 if action.micro_batch % 2 == 0 else -1
    stage = stages_of(device, count)[action.micro_batch % 2]
    if action.kind is Kind.FORWARD:
        return ((device - step, action),) if stage > 0 else ()
    own = (device, Action(kind=Kind.FORWARD, micro_batch=action.micro_batch))
    return (own, (device + step, action)) if stage < count - 1 else (own,)


def orders(count: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Return what each device does, in order, as if forwards and backwards took one slot each.

    A device prefers units that began earlier, then backwards. Of each unit it has at most `min(D/2, D - s)`
    micro-batches of each direction in flight on its stage s, and it starts a unit's n-th forward after the n-th
    backward of the unit before, so that it never holds more than D.
    """
    unit_of = [micro_batch // count for micro_batch in range(micro_batches)]
    left = [
        [
            Action(kind=kind, micro_batch=micro_batch)
            for unit in range(unit_of[-1] + 1)
            for kind in (Kind.BACKWARD, Kind.FORWARD)
            for micro_batch in range(unit * count, min(micro_batches, (unit + 1) * count))
        ]
        for _ in range(count)
    ]
    slots: dict[tuple[int, Action], int] = {}
    done: list[list[Action]] = [[] for _ in range(count)]

    def may_start(device: int, action: Action) -> bool:
        if action.kind is Kind.BACKWARD:
            return True
        unit, direction = unit_of[action.micro_batch], action.micro_batch % 2
        own = [other for other in done[device] if unit_of[other.micro_batch] == unit]
        in_flight = sum(
            1 if other.kind is Kind.FORWARD else -1 for other in own if other.micro_batch % 2 == direction
        )
        started = sum(other.kind is Kind.FORWARD for other in own)
        finished = sum(
            other.kind is Kind.BACKWARD and unit_of[other.micro_batch] == unit - 1 for other in done[device]
        )
        limit = min(count // 2, count - stages_of(device, count)[direction])
        return in_flight < limit and (unit == 0 or started < finished)

    now = 0
    while any(left):
        for device in range(count):
            for action in left[device]:
                if may_start(device, action) and all(
                    slots.get(needed, now) < now for needed in needs(device, action, count)
                ):
                    left[device].remove(action)
                    done[device].append(action)
                    slots[device, action] = now
                    break
        now += 1
    return tuple(map(tuple, done))


def _edge(costs: PipelineCosts, task: int, source: int, target: int) -> Edge:
    if source == target:
        return Edge(task=task)
    link = costs.links[source][target]
    return Edge(task=task, link=(source, target), transfer=link.transfer, latency=link.latency)


def _resident(costs: PipelineCosts, device: int, ranges: Sequence[tuple[int, int]]) -> float:
    """Return the bytes of two stages' weights; a device with both ends of a tied model holds the matrix once."""
    total = sum(range_bytes(costs, device, first, last)[0] for first, last in ranges)
    has_both = any(first == 0 for first, _ in ranges) and any(last == costs.blocks for _, last in ranges)
    return total - (costs.devices[device].embedding_resident if has_both and costs.tied_embeddings else 0.0)


def _all_reduce(costs: PipelineCosts, pair: tuple[int, int], ranges: Sequence[tuple[int, int]]) -> Collective:
    size = costs.adapter_bytes * sum(last - first for first, last in ranges)
    return Collective(
        name="all-reduce of adapters", devices=pair, seconds=all_reduce_seconds(costs, pair, size)
    )
