"""DAPPLE (Fan et al., 2021): a dynamic programme over layers and devices that replicates the stages of a pipeline."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from lightning_hybridop.planning.costs import DeviceCosts, PipelineCosts
from lightning_hybridop.simulation.baselines.common import (
    Baseline,
    BaselineError,
    back_propagating,
    kind_of,
    range_seconds,
    slowest_link,
    total_seconds,
    whole_rows,
)
from lightning_hybridop.simulation.baselines.replicated import (
    ReplicatedStage,
    adapter_seconds,
    replicated_pipeline,
)

Floats = npt.NDArray[np.float64]
Counts = tuple[int, ...]
"""How many devices of each kind."""


@dataclass(slots=True, kw_only=True)
class _Best:
    """For every number of blocks laid out on given devices: the terms of the best pipeline, and how it was reached.

    `before` holds the devices used and the blocks laid out by all stages but the last.
    """

    value: Floats
    total: Floats
    largest: Floats
    reduce: Floats
    replicas: Floats
    before: list[tuple[Counts, int] | None]


def dapple(costs: PipelineCosts) -> Baseline:
    """Return DAPPLE's pipeline: 1F1B over stages, each replicated over some devices that share every micro-batch evenly.

    Chosen here: a kind of device (equal costs) plays the part of a machine in the placement policies; every device is
    used, as in the original, whose last stage takes all that are left; "evenly" means whole rows, those left over go to
    the fastest replicas, and a stage has no more replicas than rows; of the pipelines that lay out the same blocks on
    the same devices the one with the smallest latency so far is kept; memory plays no part. The latency is the time of
    one micro-batch through all stages and the slowest link between them, M - 1 times the dominant stage or transfer, and
    the longest all-reduce of adapters.

    Raises:
        BaselineError: a device cannot back-propagate, or there are fewer blocks than stages that the rows allow.
    """
    costs = back_propagating(costs)
    kinds: dict[DeviceCosts, list[int]] = {}
    for index, device in enumerate(costs.devices):
        kinds.setdefault(kind_of(device), []).append(index)
    members = list(kinds.values())
    available = tuple(map(len, members))
    found = _plan(costs, members, available)
    blocks: int = costs.blocks
    if found[available].before[blocks] is None:
        raise BaselineError(
            f"Found {len(costs.devices)} devices, {costs.blocks} blocks and micro-batches of {whole_rows(costs)} rows, "
            "but a replica needs a row and a stage a block; use fewer devices or fewer micro-batches."
        )
    stages: list[ReplicatedStage] = []
    used = available
    while blocks:
        previous = found[used].before[blocks]
        assert previous is not None
        devices = _concrete(members, previous[0], used)
        stages.append(
            ReplicatedStage(first=previous[1], last=blocks, devices=devices, rows=even_rows(costs, devices))
        )
        used, blocks = previous
    return replicated_pipeline(costs, stages[::-1])


def placements(used: Counts, available: Counts, count: int) -> tuple[Counts, ...]:
    """Return which devices the three policies would take for a stage of `count` devices, without repetitions.

    Fresh first: kinds none of which is used. Append first: kinds some of which are used. Scatter first: as evenly as
    possible from all kinds.
    """
    free = [have - gone for have, gone in zip(available, used, strict=True)]
    fresh = [kind for kind, gone in enumerate(used) if gone == 0]
    begun = [kind for kind, gone in enumerate(used) if gone > 0]
    taken = {_in_turn(free, fresh + begun, count): None, _in_turn(free, begun + fresh, count): None}
    scattered = [0] * len(free)
    for _ in range(count):
        kind = min(
            (kind for kind in range(len(free)) if scattered[kind] < free[kind]),
            key=lambda kind: (scattered[kind], kind),
        )
        scattered[kind] += 1
    return tuple(taken | {tuple(scattered): None})


def even_rows(costs: PipelineCosts, devices: Sequence[int]) -> tuple[int, ...]:
    """Share a micro-batch's rows evenly among devices; rows left over go to the fastest of them."""
    quotient, remainder = divmod(whole_rows(costs), len(devices))
    fastest = sorted(devices, key=lambda device: (total_seconds(costs.devices[device]), device))[:remainder]
    return tuple(quotient + (device in fastest) for device in devices)


def _in_turn(free: Sequence[int], kinds: Sequence[int], count: int) -> Counts:
    taken = [0] * len(free)
    for kind in kinds:
        taken[kind] = min(free[kind], count - sum(taken))
    return tuple(taken)


def _concrete(members: Sequence[Sequence[int]], before: Counts, after: Counts) -> tuple[int, ...]:
    return tuple(
        device for kind, devices in enumerate(members) for device in devices[before[kind] : after[kind]]
    )


def _plan(costs: PipelineCosts, members: Sequence[Sequence[int]], available: Counts) -> dict[Counts, _Best]:
    link = slowest_link(costs, range(len(costs.devices)))
    seconds = [_range_matrix(costs, devices[0]) for devices in members]
    terms = cache(lambda chosen: _stage_terms(costs, members, seconds, chosen))
    all_used = sorted(itertools.product(*(range(have + 1) for have in available)), key=sum)
    found = {used: _nothing_yet(costs.blocks) for used in all_used}
    found[all_used[0]].value[0] = found[all_used[0]].total[0] = 0.0
    for used in all_used:
        here = found[used]
        for count in range(1, min(whole_rows(costs), sum(available) - sum(used)) + 1):
            # A hidden state crosses a cut in as many pieces as the larger stage has devices, side by side.
            pieces = np.maximum(here.replicas, count)
            transfer = np.where(here.replicas > 0, link.transfer / pieces, 0.0)
            latency = np.where(here.replicas > 0, link.latency, 0.0)
            for chosen in placements(used, available, count):
                time, busy, own_reduce = terms(chosen)
                total = (here.total + 2 * (transfer + latency))[:, None] + time
                largest = np.maximum(np.maximum(here.largest, transfer)[:, None], busy)
                reduce = np.maximum(here.reduce[:, None], own_reduce)
                value = total + (costs.micro_batches - 1) * largest + reduce
                after = tuple(gone + more for gone, more in zip(used, chosen, strict=True))
                _keep(found[after], used, count, value, (total, largest, reduce))
    return found


def _stage_terms(
    costs: PipelineCosts, members: Sequence[Sequence[int]], seconds: Sequence[Floats], chosen: Counts
) -> tuple[Floats, Floats, Floats]:
    """Return of a stage with blocks `[row, column)`: its time (infinite if empty), the same (0 if empty), all-reduce."""
    devices = _concrete(members, (0,) * len(chosen), chosen)
    shares = dict(zip(devices, even_rows(costs, devices), strict=True))
    time = np.maximum.reduce(
        [
            seconds[kind] * (max(shares.get(device, 0) for device in members[kind]) / whole_rows(costs))
            for kind, number in enumerate(chosen)
            if number
        ]
    )
    lengths = np.arange(costs.blocks + 1.0)[None, :] - np.arange(costs.blocks + 1.0)[:, None]
    latencies = adapter_seconds(costs, devices, 0, 0)
    per_block = adapter_seconds(costs, devices, 0, 1) - latencies
    return time, np.where(np.isfinite(time), time, 0.0), latencies + per_block * lengths


def _keep(best: _Best, used: Counts, count: int, value: Floats, terms: tuple[Floats, Floats, Floats]) -> None:
    """Note every pipeline that is better than the one known so far; rows of the matrices: blocks laid out before."""
    first = np.argmin(value, axis=0)
    last = np.arange(len(first))
    better = value[first, last] < best.value
    best.value[better] = value[first, last][better]
    for known, new in zip((best.total, best.largest, best.reduce), terms, strict=True):
        known[better] = new[first, last][better]
    best.replicas[better] = count
    for end in np.flatnonzero(better):
        best.before[end] = (used, int(first[end]))


def _nothing_yet(blocks: int) -> _Best:
    """Return that no pipeline is known: an infinite value and total."""

    def full(value: float) -> Floats:
        return np.full(blocks + 1, value)

    return _Best(
        value=full(np.inf),
        total=full(np.inf),
        largest=full(0.0),
        reduce=full(0.0),
        replicas=full(0.0),
        before=[None] * (blocks + 1),
    )


def _range_matrix(costs: PipelineCosts, device: int) -> Floats:
    """Return the time of one micro-batch's forward and backward through blocks `[row, column)`; infinite if empty."""
    matrix = np.full((costs.blocks + 1, costs.blocks + 1), np.inf)
    for first in range(costs.blocks):
        for last in range(first + 1, costs.blocks + 1):
            matrix[first, last] = sum(range_seconds(costs.devices[device], first, last))
    return matrix
