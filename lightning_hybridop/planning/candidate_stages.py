"""Every stage that a kind of device could run in one place of a pipeline, with what it costs, as arrays.

An array over stages has one row per number of blocks (the first row: one block) and one column per end: entry
`[n - 1, j]` is about the blocks `[j - n, j)`.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_hybridop.planning.costs import (
    ADJOINT_FORWARDS,
    DeviceCosts,
    LinkTimes,
    Objective,
    PipelineCosts,
    waiting_bytes,
)
from lightning_hybridop.planning.plan import Estimator

Floats = NDArray[np.float64]

Criterion = Literal["first_order", "busiest", "zo_stages"]
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

    `queries_to_the_end` are those whose perturbed forwards go through all stages. Without zo stages all of Q and Q' are 0.
    """

    criteria: tuple[Criterion, ...]
    estimator: Estimator
    micro_batches: int
    queries: int
    queries_to_the_end: int
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
        elif self.estimator == "adjoint":
            backward = ADJOINT_FORWARDS * range_sums(device.forward)
        goes_back = not device.zo or self.estimator == "adjoint"
        m, q, through = self.micro_batches, self.queries, self.queries_to_the_end
        nothing = 0.0 * forward
        sums, peaks = [], []
        for criterion in self.criteria:
            if criterion == "first_order":
                sums.append(forward + backward + (m * through * forward if place.first_bp else 0.0))
                peaks.append((m - 1) * (forward + backward) if goes_back else nothing)
            elif criterion == "busiest":
                sums.append(forward)
                peaks.append((m * (1 + through) - 1) * forward + m * backward)
            else:
                exits = m * (self.exit_queries * exit_forward + baseline)
                sums.append(forward if device.zo else nothing)
                peaks.append((m * (1 + q) - 1) * forward + m * backward + exits if device.zo else nothing)
        return np.stack(sums), np.stack(peaks)

    def link(self, link: LinkTimes, *, zo_before: bool, zo_after: bool) -> tuple[Floats, Floats]:
        """Return what a link adds to each criterion's sum, and its part in the largest, by criterion."""
        if not self.with_links:
            return np.zeros(len(self.criteria)), np.zeros(len(self.criteria))
        comes_back = not zo_before or self.estimator == "adjoint"
        among_zo = zo_before and zo_after
        sums = {
            "first_order": link.arrival + (link.back + link.latency if comes_back else 0.0),
            "busiest": link.arrival,
            "zo_stages": link.arrival if among_zo else 0.0,
        }
        m = self.micro_batches
        sent = m * (1 + self.queries + self.exit_queries) - 1 if self.estimator == "boundary" else 0
        peaks = {
            "first_order": 0.0,
            "busiest": (m * (1 + self.queries_to_the_end) - 1) * link.transfer,
            "zo_stages": sent * link.transfer if among_zo else 0.0,
        }
        return np.array([sums[c] for c in self.criteria]), np.array([peaks[c] for c in self.criteria])


def terms(costs: PipelineCosts, objective: Objective, *, zo: bool, bp: bool) -> Terms:
    """Return the terms of an objective for pipelines with zo stages, with bp stages, or with both."""
    criteria: tuple[Criterion, ...]
    estimator = costs.estimator
    # Without bp stages the first-order term is never above the busiest stage's.
    criteria = ("first_order", "busiest") if bp or estimator == "adjoint" else ("busiest",)
    if objective == "paper":
        criteria = criteria[:1]
    if zo and estimator == "boundary":
        criteria += ("zo_stages",)
    elif zo and costs.exit_queries and objective != "paper" and estimator == "loss":
        # Without exits, what a zo stage does ends before its pipeline's passes have drained.
        criteria += ("zo_stages",)
    queries = costs.queries if zo and estimator != "adjoint" else 0
    return Terms(
        criteria=criteria,
        estimator=estimator,
        micro_batches=costs.micro_batches,
        queries=queries,
        queries_to_the_end=queries if estimator == "loss" else 0,
        exit_queries=costs.exit_queries if zo and objective != "paper" else 0,
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
        needs += waiting_bytes(costs, exit_stage=place.exit)
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
