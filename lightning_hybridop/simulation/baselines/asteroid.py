"""Asteroid (Ye et al., 2024): pipelines with replicated stages on unlike edge devices, within their memory."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_hybridop.planning.costs import PipelineCosts
from lightning_hybridop.simulation.baselines.common import (
    Baseline,
    BaselineError,
    back_propagating,
    largest_remainders,
    range_bytes,
    range_seconds,
    slowest_link,
    whole_rows,
)
from lightning_hybridop.simulation.baselines.replicated import (
    ReplicatedStage,
    adapter_seconds,
    replicated_pipeline,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tail:
    """A pipeline over the last blocks: one micro-batch through it, its dominant step, its longest all-reduce."""

    total: float
    largest: float
    reduce: float
    stages: tuple[ReplicatedStage, ...]

    def latency(self, micro_batches: int) -> float:
        return self.total + (micro_batches - 1) * self.largest + self.reduce


def asteroid(costs: PipelineCosts) -> Baseline:
    """Return Asteroid's pipeline: 1F1B over stages of neighbouring devices in order of memory, largest first.

    Its second algorithm: for the last l blocks on the last n devices in p stages, the first of these stages takes some
    blocks and some devices, and the best pipeline of p - 1 stages the rest; the latency is that of one micro-batch
    through all steps (stages and the slowest link between them), M - 1 times the dominant step, and the longest
    all-reduce of adapters. Its first algorithm, `balance_rows`, shares out the rows of a stage. Chosen here: a stage
    with k stages behind it keeps `min(M, k + 1)` micro-batches; a device that gets no rows stays out.

    Raises:
        BaselineError: a device cannot back-propagate, or no pipeline fits the memory.
    """
    costs = back_propagating(costs)
    by_memory = sorted(range(len(costs.devices)), key=lambda device: (-costs.devices[device].memory, device))
    best = min(_tails(costs, by_memory), key=lambda tail: tail.latency(costs.micro_batches), default=None)
    if best is None:
        raise BaselineError(
            "No pipeline of replicated stages fits the devices' memory; add devices or memory."
        )
    baseline = replicated_pipeline(costs, best.stages)
    names = [device.name for device in costs.devices if device.name not in baseline.program.devices]
    if not names:
        return baseline
    return Baseline(
        program=baseline.program, description=f"{baseline.description}; without rows: {', '.join(names)}"
    )


def balance_rows(seconds: Sequence[float], most: Sequence[int], rows: int) -> tuple[int, ...] | None:
    """Share out a micro-batch's rows among devices that take `seconds` for a row and have memory for `most` rows.

    Rows go out in proportion to capacity (rows per second) as far as memory allows, the rest to those that have memory
    left, and then one by one from the straggler to the device that would finish first, as long as that helps. None if
    memory is too small for all rows.
    """
    if sum(most) < rows:
        return None
    proportional = largest_remainders([1 / each for each in seconds], rows)
    shares = [min(share, limit) for share, limit in zip(proportional, most, strict=True)]

    def next_finish(device: int) -> tuple[float, int]:
        full = shares[device] >= most[device]
        return math.inf if full else (shares[device] + 1) * seconds[device], device

    everyone = range(len(shares))
    while sum(shares) < rows:
        shares[min(everyone, key=next_finish)] += 1
    while True:
        straggler = max(everyone, key=lambda device: shares[device] * seconds[device])
        target = min(everyone, key=next_finish)
        if next_finish(target)[0] >= shares[straggler] * seconds[straggler]:
            return tuple(shares)
        shares[straggler] -= 1
        shares[target] += 1


def _tails(costs: PipelineCosts, devices: Sequence[int]) -> list[_Tail]:
    """Return the best pipeline of each number of stages over all blocks and all devices."""
    table = _StageTable(costs, devices)
    # By number of devices at the end of the order and of blocks at the end of the model.
    best = {(0, 0): _Tail(total=0.0, largest=0.0, reduce=0.0, stages=())}
    complete = []
    for stages in range(1, min(len(devices), costs.blocks) + 1):
        longer = {}
        for used in range(stages, len(devices) + 1):
            for length in range(stages, costs.blocks + 1):
                found = _best_tail(costs, table, best, used, length, min(costs.micro_batches, stages))
                if found is not None:
                    longer[used, length] = found
        best = longer
        if (len(devices), costs.blocks) in best:
            complete.append(best[len(devices), costs.blocks])
    return complete


def _best_tail(
    costs: PipelineCosts,
    table: "_StageTable",
    shorter: Mapping[tuple[int, int], _Tail],
    used: int,
    length: int,
    in_flight: int,
) -> _Tail | None:
    """Return the best pipeline over the last `length` blocks on the last `used` devices; `shorter` has a stage less."""
    first, start = costs.blocks - length, len(table.devices) - used
    best: _Tail | None = None
    bound = math.inf
    for behind in range(used):
        for blocks_behind in range(length):
            tail = shorter.get((behind, blocks_behind))
            if tail is None:
                continue
            part = (first, costs.blocks - blocks_behind, start, used - behind)
            ideal = table.ideal_seconds(*part)
            if tail.total + ideal + (costs.micro_batches - 1) * max(tail.largest, ideal) >= bound:
                continue
            stage = table.stage(*part, in_flight)
            if stage is None:
                continue
            candidate = _in_front(costs, table, stage, tail)
            if candidate.latency(costs.micro_batches) < bound:
                best, bound = candidate, candidate.latency(costs.micro_batches)
    return best


def _in_front(
    costs: PipelineCosts, table: "_StageTable", stage: tuple[ReplicatedStage, float], tail: _Tail
) -> _Tail:
    part, seconds = stage
    total, largest, reduce = tail.total + seconds, max(tail.largest, seconds), tail.reduce
    if tail.stages:
        # A hidden state crosses a cut in as many pieces as the larger stage has devices, side by side.
        pieces = max(len(part.devices), len(tail.stages[0].devices))
        transfer = table.link.transfer / pieces
        total += 2 * (transfer + table.link.latency)
        largest = max(largest, transfer)
    reduce = max(reduce, adapter_seconds(costs, part.devices, part.first, part.last))
    return _Tail(total=total, largest=largest, reduce=reduce, stages=(part, *tail.stages))


class _StageTable:
    """The time and the rows of every possible stage, worked out when first asked for."""

    def __init__(self, costs: PipelineCosts, devices: Sequence[int]) -> None:
        self.devices = devices
        self.link = slowest_link(costs, devices)
        self._micro_batch_rows = whole_rows(costs)
        ranges = [(a, b) for a in range(costs.blocks) for b in range(a + 1, costs.blocks + 1)]
        self._seconds = [
            {part: sum(range_seconds(costs.devices[device], *part)) for part in ranges} for device in devices
        ]
        self._bytes = [{part: range_bytes(costs, device, *part) for part in ranges} for device in devices]
        self._memory = [costs.devices[device].memory for device in devices]
        self._known: dict[tuple[int, int, int, int, int], tuple[ReplicatedStage, float] | None] = {}

    def ideal_seconds(self, first: int, last: int, start: int, count: int) -> float:
        """Return the time of blocks `[first, last)` if rows could be divided, which no stage is faster than."""
        return 1 / sum(1 / self._seconds[device][first, last] for device in range(start, start + count))

    def stage(
        self, first: int, last: int, start: int, count: int, in_flight: int
    ) -> tuple[ReplicatedStage, float] | None:
        """Return the stage of `count` devices from the one at `start` in the order, and its time; None: too large."""
        key = (first, last, start, count, in_flight)
        if key not in self._known:
            self._known[key] = self._balanced(*key)
        return self._known[key]

    def _balanced(
        self, first: int, last: int, start: int, count: int, in_flight: int
    ) -> tuple[ReplicatedStage, float] | None:
        group, rows = range(start, start + count), self._micro_batch_rows
        per_row = [self._seconds[device][first, last] / rows for device in group]
        most = []
        for device in group:
            resident, kept = self._bytes[device][first, last]
            left = self._memory[device] - resident
            fits = left >= in_flight * kept
            most.append(rows if fits else max(0, math.floor(left / (in_flight * kept) * rows)))
        shares = balance_rows(per_row, most, rows)
        if shares is None:
            return None
        working = [
            (self.devices[device], share) for device, share in zip(group, shares, strict=True) if share
        ]
        stage = ReplicatedStage(
            first=first,
            last=last,
            devices=tuple(device for device, _ in working),
            rows=tuple(share for _, share in working),
        )
        return stage, max(share * each for share, each in zip(shares, per_row, strict=True))
