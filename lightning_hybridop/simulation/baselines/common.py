"""What the baselines share: who may take part, rows and bytes shared out among devices, and their words."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_hybridop.planning.costs import DeviceCosts, LinkTimes, PipelineCosts
from lightning_hybridop.simulation.program import Program


class BaselineError(ValueError):
    """A method that cannot run on these devices; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A method on given devices: its program, and one line that says who holds what."""

    program: Program
    description: str


def back_propagating(costs: PipelineCosts) -> PipelineCosts:
    """Return the costs with every device back-propagating and nothing perturbed, as all baselines train.

    Raises:
        BaselineError: there is no device, or one whose backward time is unknown.
    """
    if not costs.devices:
        raise BaselineError("No device is left that back-propagates; add one.")
    for device in costs.devices:
        if min(device.backward) <= 0:
            raise BaselineError(
                f"{device.name}: the time of its backward is unknown, but every device of this method back-propagates; "
                "give its profile backward_tflops or leave it out."
            )
    devices = tuple(dataclasses.replace(device, zo=False) for device in costs.devices)
    return dataclasses.replace(costs, devices=devices, queries=0, exit_queries=0)


def only_devices(costs: PipelineCosts, keep: Sequence[int]) -> PipelineCosts:
    """Return the costs of the devices with these indices alone, in this order."""
    return dataclasses.replace(
        costs,
        devices=tuple(costs.devices[device] for device in keep),
        links=tuple(tuple(costs.links[a][b] for b in keep) for a in keep),
    )


def kind_of(device: DeviceCosts) -> DeviceCosts:
    """Return a device's costs without its name: equal for devices of one kind."""
    return dataclasses.replace(device, name="")


def whole_rows(costs: PipelineCosts) -> int:
    """Return into how many rows a micro-batch can be divided; at least one."""
    return max(1, math.floor(costs.rows))


def total_seconds(device: DeviceCosts) -> float:
    """Return how long one micro-batch's forward and backward through the whole model take on a device."""
    return (
        sum(device.forward)
        + sum(device.backward)
        + device.embedding_forward
        + device.head_forward
        + device.head_backward
    )


def range_seconds(device: DeviceCosts, first: int, last: int) -> tuple[float, float]:
    """Return the forward and the backward time of blocks `[first, last)`, with embedding and head where they are."""
    forward, backward = sum(device.forward[first:last]), sum(device.backward[first:last])
    if first == 0:
        forward += device.embedding_forward
    if last == len(device.forward):
        forward += device.head_forward
        backward += device.head_backward
    return forward, backward


def range_bytes(costs: PipelineCosts, device: int, first: int, last: int) -> tuple[float, float]:
    """Return what blocks `[first, last)` take on a device: for good, and for one micro-batch in flight."""
    costs_of = costs.devices[device]
    resident, kept = sum(costs_of.resident[first:last]), sum(costs_of.kept[first:last])
    has_head = last == costs.blocks
    if has_head:
        resident += costs_of.head_resident
        kept += costs_of.head_kept
    if first == 0 and not (has_head and costs.tied_embeddings):
        resident += costs_of.embedding_resident
    return resident, kept


def largest_remainders(weights: Sequence[float], rows: int) -> tuple[int, ...]:
    """Share out whole rows in proportion to weights; those left over go where the fraction cut off is largest."""
    exact = [rows * weight / sum(weights) for weight in weights]
    shares = [math.floor(share) for share in exact]
    by_fraction = sorted(range(len(exact)), key=lambda i: (shares[i] - exact[i], i))
    for index in by_fraction[: rows - sum(shares)]:
        shares[index] += 1
    return tuple(shares)


def slowest_link(costs: PipelineCosts, devices: Sequence[int]) -> LinkTimes:
    """Return the longest transfer and the longest latency between any two of these devices."""
    links = [costs.links[a][b] for a in devices for b in devices if a != b]
    return LinkTimes(
        transfer=max((link.transfer for link in links), default=0.0),
        latency=max((link.latency for link in links), default=0.0),
    )


def all_reduce_seconds(costs: PipelineCosts, devices: Sequence[int], size: float) -> float:
    """Return the time of a ring all-reduce: `2 (n - 1) / n` of the bytes over the slowest link, 2 (n - 1) latencies."""
    return 2 * all_gather_seconds(costs, devices, size)


def all_gather_seconds(costs: PipelineCosts, devices: Sequence[int], size: float) -> float:
    """Return the time of a ring all-gather of `size` bytes in all: half of an all-reduce."""
    count = len(devices)
    link = slowest_link(costs, devices)
    return (count - 1) * (link.transfer * in_hidden_states(costs, size) / count + link.latency)


def exchange_seconds(costs: PipelineCosts, devices: Sequence[int], size: float) -> float:
    """Return the time in which each of n devices hands every other its part, `size / n^2` bytes, one after another."""
    return all_gather_seconds(costs, devices, size / len(devices))


def in_hidden_states(costs: PipelineCosts, size: float) -> float:
    """Return a number of bytes in units of one micro-batch's hidden state, which links are the times of."""
    return size / costs.hidden_bytes if costs.hidden_bytes else 0.0


def named_range(first: int, last: int) -> str:
    """Return `block 3`, or `blocks 0-7` for `[0, 8)`."""
    return f"block {first}" if last - first == 1 else f"blocks {first}-{last - 1}"


def split_evenly(costs: PipelineCosts, stages: int) -> tuple[int, ...]:
    """Return the bounds of `stages` stages whose numbers of blocks differ by one at most, larger ones first.

    Raises:
        BaselineError: there are fewer blocks than stages.
    """
    if stages > costs.blocks:
        raise BaselineError(
            f"Found {stages} devices for {costs.blocks} blocks, but each needs a block of its own; use fewer devices."
        )
    quotient, remainder = divmod(costs.blocks, stages)
    return tuple(index * quotient + min(index, remainder) for index in range(stages + 1))


def best_split(
    stages: int, blocks: int, cost: Callable[[int, int, int], tuple[float, float] | None]
) -> tuple[int, ...] | None:
    """Return the bounds of the stages that minimise `sum of a + largest b`; None if no split is possible.

    `cost(stage, first, last)` gives a and b of a stage with blocks `[first, last)`, or None where it does not fit.
    Exact: of all ways to reach a block, those that no other beats in both terms are kept.
    """
    fronts: list[list[tuple[float, float, tuple[int, ...]]]] = [[] for _ in range(blocks + 1)]
    fronts[0] = [(0.0, 0.0, (0,))]
    for stage in range(stages):
        reached: list[list[tuple[float, float, tuple[int, ...]]]] = [[] for _ in range(blocks + 1)]
        for first in range(blocks):
            if not fronts[first]:
                continue
            for last in range(first + 1, blocks + 1):
                found = cost(stage, first, last)
                if found is not None:
                    added, most = found
                    reached[last] += [
                        (total + added, max(largest, most), (*bounds, last))
                        for total, largest, bounds in fronts[first]
                    ]
        fronts = [_unbeaten(candidates) for candidates in reached]
    best = min(fronts[blocks], key=lambda found: (found[0] + found[1], found[2]), default=None)
    return None if best is None else best[2]


def _unbeaten(
    candidates: list[tuple[float, float, tuple[int, ...]]],
) -> list[tuple[float, float, tuple[int, ...]]]:
    kept: list[tuple[float, float, tuple[int, ...]]] = []
    for candidate in sorted(candidates):
        if not kept or candidate[1] < kept[-1][1]:
            kept.append(candidate)
    return kept
