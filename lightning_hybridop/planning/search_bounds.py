"""Lower bounds on what completes a pipeline, by dynamic programmes over all its possible beginnings.

Each criterion is a sum plus the largest of the stages' parts. With a cap on that largest part, the least sum is a
shortest path; for a ladder of caps, all shortest paths are found at once. Between two rungs of the ladder the largest
part is at least the next value that a stage or link can have, which gives a bound; where there is a rung for every value, it
is exact for that criterion.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_hybridop.planning.candidate_stages import Floats
from lightning_hybridop.planning.chains import Level


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The stages of one turn: `sums` and `peaks` by `[criterion, n - 1, j]`, sums infinite for what cannot be."""

    sums: Floats
    peaks: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Links by `[criterion, kind before, kind after]`; one kind more stands for the end of the pipeline."""

    sums: Floats
    peaks: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """The rungs of one criterion: parts in `[least[i], most[i]]` are told apart from those of other rungs only."""

    least: Floats
    most: Floats

    def rungs(self, parts: Floats) -> NDArray[np.int64]:
        """Return the rung of each part, at least the first; parts above the last rung must not be asked for."""
        return np.searchsorted(self.most[:-1], parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """By level, the least sum `[node, j, column]` of a beginning that covers the blocks `[0, j)`.

    Columns are the rungs of the first criterion, then those of the next; `starts` are each criterion's first. In
    `within` the beginning's parts are all on this rung or lower; `above` adds the least part and takes the best of all
    higher rungs.
    """

    ladders: tuple[Ladder, ...]
    starts: tuple[int, ...]
    within: tuple[Floats, ...]
    above: tuple[Floats, ...]

    def whole(self, criterion: int) -> Floats:
        """Return the least sums of whole pipelines, by rung of a criterion."""
        start = self.starts[criterion]
        return self.within[0][0, -1, start : start + len(self.ladders[criterion].most)]


def bounds(
    levels: Sequence[Level], steps: Sequence[Sequence[Step]], links: Links, ladders: tuple[Ladder, ...]
) -> Bounds:
    """Return the bounds of all nodes; nothing may have a part above the last rung of its ladder."""
    starts = tuple(int(start) for start in np.cumsum([0, *(len(ladder.most) for ladder in ladders[:-1])]))
    by_column = {id(step): _by_column(step.sums, step.peaks, ladders) for row in steps for step in row}
    within = least_sums(
        levels,
        [[by_column[id(step)] for step in row] for row in steps],
        _by_column(links.sums, links.peaks, ladders),
    )
    above = []
    for table in within:
        higher = np.full_like(table, np.inf)
        for start, ladder in zip(starts, ladders, strict=True):
            for column in range(start + len(ladder.most) - 2, start - 1, -1):
                np.minimum(
                    table[..., column + 1] + ladder.least[column + 1 - start],
                    higher[..., column + 1],
                    out=higher[..., column],
                )
        above.append(higher)
    return Bounds(ladders=ladders, starts=starts, within=tuple(within), above=tuple(above))


def _by_column(sums: Floats, peaks: Floats, ladders: tuple[Ladder, ...]) -> Floats:
    """Return `[..., column]`: the sum where every criterion's part is allowed, else infinite."""
    allowed = np.all([peaks[c] <= ladder.most[-1] for c, ladder in enumerate(ladders)], axis=0)
    sums = np.where(allowed, sums, np.inf)
    return np.concatenate(
        [
            np.where(peaks[c][..., None] <= ladder.most, sums[c][..., None], np.inf)
            for c, ladder in enumerate(ladders)
        ],
        axis=-1,
    )


def least_sums(
    levels: Sequence[Level], stage_costs: Sequence[Sequence[Floats]], link_costs: Floats
) -> list[Floats]:
    """Return, by level, the least total cost `[node, j, column]` of a beginning that covers the blocks `[0, j)`.

    `stage_costs` are `[n - 1, j, column]` by level and turn, `link_costs` `[kind before, kind behind, column]`.
    Infinite where nothing completes the pipeline.
    """
    columns = link_costs.shape[-1]
    blocks = stage_costs[0][0].shape[1] - 1
    tables: list[Floats] = []
    for level, costs in zip(reversed(levels), reversed(stage_costs), strict=True):
        table = np.full((len(level.complete), blocks + 1, columns), np.inf)
        table[level.complete, 0] = 0.0
        for turn, cost in zip(level.turns, costs, strict=True):
            following = tables[-1][turn.targets]
            best = np.full_like(following, np.inf)
            for n in range(1, len(cost) + 1):
                reached = following[:, : blocks + 1 - n] + cost[n - 1, n:]
                np.minimum(best[:, n:], reached, out=best[:, n:])
            with_link = best[turn.leads_to] + link_costs[turn.kind, level.kinds[turn.sources]][:, None]
            table[turn.sources] = np.minimum(table[turn.sources], with_link)
        tables.append(table)
    return tables[::-1]
