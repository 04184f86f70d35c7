"""Lower bounds on what completes a pipeline, by dynamic programmes over all its possible beginnings.

Each criterion is a sum plus the largest of the stages' parts. With a cap on that largest part, the least sum is a
shortest path; for a ladder of caps, all shortest paths are found at once. Between two rungs of the ladder the largest
part is at least the next value that a stage or link can have, which gives a bound; where there is a rung for every
value, it is exact for that criterion.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_hybridop.planning.candidate_stages import Floats
from lightning_hybridop.planning.chains import Indices, Level
from lightning_hybridop.planning.steps import Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Links by `[criterion, kind before, kind behind]`; one kind more stands for the end of the pipeline."""

    sums: Floats
    peaks: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """The rungs of one criterion: each has the parts in `[least, most]`."""

    least: Floats
    most: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """By level, the least sum `[node, j, column]` of a beginning that covers the blocks `[0, j)`.

    Columns are the rungs of the first criterion, then those of the next: the beginning's parts are on this rung or
    lower.
    """

    ladders: tuple[Ladder, ...]
    tables: tuple[Floats, ...]

    def whole(self, criterion: int) -> Floats:
        """Return the least sums of whole pipelines, by rung of a criterion."""
        return self.tables[0][0, -1, self._columns(criterion)]

    def value(self, level: int, node: Indices, block: Indices, sums: Floats, parts: Floats) -> Floats:
        """Return bounds on the value of whole pipelines, given the sums and parts `[criterion, end]` of their ends.

        The least over all rungs: on those below the end's own part the beginning's sum is only larger.
        """
        by_column = np.ascontiguousarray(self.tables[level][node, block].T)
        value = np.full(len(node), -np.inf)
        for criterion, ladder in enumerate(self.ladders):
            largest = np.maximum(parts[criterion], ladder.least[:, None])
            rest = (by_column[self._columns(criterion)] + largest).min(axis=0)
            np.maximum(value, sums[criterion] + rest, out=value)
        return value

    def _columns(self, criterion: int) -> slice:
        first = sum(len(ladder.most) for ladder in self.ladders[:criterion])
        return slice(first, first + len(self.ladders[criterion].most))


def bounds(levels: Sequence[Level], steps: Steps, links: Links, ladders: tuple[Ladder, ...]) -> Bounds:
    """Return the bounds of all nodes, for stages of which none has a part above the last rung of its ladder."""
    tables = least_sums(
        levels,
        steps,
        _by_column(steps.sums, steps.peaks, ladders),
        _by_column(links.sums, links.peaks, ladders),
    )
    return Bounds(ladders=ladders, tables=tables)


def _by_column(sums: Floats, peaks: Floats, ladders: tuple[Ladder, ...]) -> Floats:
    """Return `[..., column]`: the sum where the part is allowed, else infinite."""
    return np.concatenate(
        [
            np.where(peaks[c][..., None] <= ladder.most, sums[c][..., None], np.inf)
            for c, ladder in enumerate(ladders)
        ],
        axis=-1,
    )


def least_sums(
    levels: Sequence[Level], steps: Steps, stage_costs: Floats, link_costs: Floats
) -> tuple[Floats, ...]:
    """Return, by level, the least total cost `[node, j, column]` of a beginning that covers the blocks `[0, j)`.

    `stage_costs` are `[row, j, column]`, `link_costs` `[kind before, kind behind, column]`. Infinite where nothing
    completes the pipeline.
    """
    blocks, columns = steps.blocks, link_costs.shape[-1]
    sizes = steps.sizes.tolist()
    tables: list[Floats] = []
    for level, spans in zip(reversed(levels), reversed(steps.spans), strict=True):
        table = np.full((len(level.complete), blocks + 1, columns), np.inf)
        table[level.complete, 0] = 0.0
        for turn, span in zip(level.turns, spans, strict=True):
            following = tables[-1][turn.targets]
            best = np.full_like(following, np.inf)
            for row in range(*span):
                n = sizes[row]
                reached = following[:, : blocks + 1 - n] + stage_costs[row, n:]
                np.minimum(best[:, n:], reached, out=best[:, n:])
            with_link = best[turn.leads_to] + link_costs[turn.kind, level.kinds[turn.sources]][:, None]
            table[turn.sources] = np.minimum(table[turn.sources], with_link)
        tables.append(table)
    return tuple(reversed(tables))
