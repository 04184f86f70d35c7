"""Every stage that a kind of device could run in one place of a pipeline, with what it costs, as arrays.

An array over stages has one row per number of blocks (the first row: one block) and one column per end: entry
`[n - 1, j]` is about the blocks `[j - n, j)`.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_hybridop.planning.costs import DeviceCosts, LinkTimes, Objective, PipelineCosts

Floats = NDArray[np.float64]

Criterion = Literal["first_order", "busiest", "exits"]
"""The terms of which `makespan_estimate` is the largest, in its order. Each is a sum over stages and links plus the
largest of what single stages and links contribute; so is either objective, with fewer terms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What the costs of a stage depend on besides its device and blocks.

    `in_flight` micro-batches are kept by a bp stage (0 on a zo stage). `last`, `first_bp` and `exit` say whether it is
    the last stage, the first bp stage behind a zo stage, and the last zo stage.
    """

    in_flight: int = 0
    last: bool = False
    first_bp: bool = False
    exit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the iteration time consists of in one kind of pipeline: M, Q, Q' and the criteria that can be largest.

    Without zo stages Q and Q' are 0.
    """

    criteria: tuple[Criterion, ...]
    micro_batches: int
    queries: int
    exit_queries: int
    exit_baseline: bool
    with_links: bool

    def stages(self, device: DeviceCosts, place: Place) -> tuple[Floats, Floats]:
        """Return what each stage adds to each criterion's sum, and its part in the largest: `[criterion, n - 1, j]`."""
        forward = range_sums(device.forward).copy()
        forward[_first(device)] += device.embedding_forward
        exit_forward, baseline = forward, 0.0 * forward
        if place.exit and self.exit_queries:
            exit_forward = forward + device.head_forward
            baseline = exit_forward if self.exit_baseline else baseline
        forward = forward + device.head_forward if place.last else forward
        backward = 0.0 * forward
        if not device.zo:
            backward = range_sums(device.backward) + (device.head_backward if place.last else 0.0)
        m, q = self.micro_batches, self.queries
        work = (m * (1 + q) - 1) * forward + m * backward
        sums, peaks = [], []
        for criterion in self.criteria:
            if criterion == "first_order":
                sums.append(forward + backward + (m * q * forward if place.first_bp else 0.0))
                peaks.append(0.0 * work if device.zo else (m - 1) * (forward + backward))
            elif criterion == "busiest":
                sums.append(forward)
                peaks.append(work)
            else:
                sums.append(forward if device.zo else 0.0 * work)
                peaks.append(
                    work + m * (self.exit_queries * exit_forward + baseline) if device.zo else 0.0 * work
                )
        return np.stack(sums), np.stack(peaks)

    def link(self, link: LinkTimes, *, zo_before: bool, zo_after: bool) -> tuple[Floats, Floats]:
        """Return what a link adds to each criterion's sum, and its part in the largest, by criterion."""
        if not self.with_links:
            return np.zeros(len(self.criteria)), np.zeros(len(self.criteria))
        sums = {
            "first_order": link.arrival * (1 if zo_before else 2),
            "busiest": link.arrival,
            "exits": link.arrival if zo_before and zo_after else 0.0,
        }
        busy = (self.micro_batches * (1 + self.queries) - 1) * link.transfer
        peaks = {"first_order": 0.0, "busiest": busy, "exits": 0.0}
        return np.array([sums[c] for c in self.criteria]), np.array([peaks[c] for c in self.criteria])


def terms(costs: PipelineCosts, objective: Objective, *, zo: bool, bp: bool) -> Terms:
    """Return the terms of an objective for pipelines with zo stages, with bp stages, or with both."""
    criteria: tuple[Criterion, ...]
    if objective == "paper":
        criteria = ("first_order",) if bp else ("busiest",)
    else:
        # Without bp stages the first-order term is never above the busiest stage's.
        criteria = ("first_order", "busiest") if bp else ("busiest",)
        # Without exits, what a zo stage does ends before its pipeline's passes have drained.
        criteria += ("exits",) if zo and costs.exit_queries else ()
    return Terms(
        criteria=criteria,
        micro_batches=costs.micro_batches,
        queries=costs.queries if zo else 0,
        exit_queries=costs.exit_queries if zo else 0,
        exit_baseline=costs.exit_baseline,
        with_links=objective != "paper",
    )


def stage_needs(costs: PipelineCosts, device: DeviceCosts, place: Place) -> Floats:
    """Return the bytes that each stage needs, infinite where there is no such stage; as `layout_memory`, to the bit."""
    resident = range_sums(device.resident).copy()
    kept = range_sums(device.kept)
    has_head = place.last or (place.exit and costs.exit_queries > 0)
    if not (has_head and costs.tied_embeddings):
        resident[_first(device)] += device.embedding_resident
    if has_head:
        resident += device.head_resident
        kept = kept + device.head_kept
    if device.zo:
        needs = resident + (device.head_kept if has_head else 0.0)
    else:
        needs = resident + place.in_flight * kept
    return np.where(_exists(costs.blocks), needs, np.inf)


@lru_cache(maxsize=256)
def range_sums(values: tuple[float, ...]) -> Floats:
    """Return the sum of `values[j - n : j]` at `[n - 1, j]`, 0 where n > j.

    They are Python's sums, so that a stage that just fits by `layout_memory` fits here.
    """
    blocks = len(values)
    table = np.zeros((blocks, blocks + 1))
    equal = len(set(values)) == 1
    for n in range(1, blocks + 1):
        if equal:
            table[n - 1, n:] = sum(values[:n])
        else:
            table[n - 1, n:] = [sum(values[j - n : j]) for j in range(n, blocks + 1)]
    table.flags.writeable = False
    return table


def _first(device: DeviceCosts) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the stages that begin with block 0."""
    rows = np.arange(len(device.forward))
    return rows, rows + 1


@lru_cache(maxsize=16)
def _exists(blocks: int) -> NDArray[np.bool_]:
    return np.tri(blocks + 1, blocks, -1, dtype=np.bool_).T
