"""Which parts of a criterion the search tells apart: all at first, roughly; then finely those that still matter."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_hybridop.planning.candidate_stages import Floats
from lightning_hybridop.planning.chains import Indices
from lightning_hybridop.planning.search_bounds import Bounds, Ladder, Links
from lightning_hybridop.planning.steps import Steps

_RUNGS = 8


def first_ladders(steps: Steps, links: Links, counts: Sequence[int], *, limit: float) -> tuple[Ladder, ...]:
    """Return ladders over all parts below the limit, with rungs close together where the largest part is least.

    `counts` are the devices of each kind.
    """
    ladders = []
    for criterion in range(len(links.sums)):
        parts = _parts(steps, links, criterion)
        least = _counted_floor(steps, counts, criterion)
        begin, end = _range(parts, least, min(limit, parts[-1]))
        rising = parts[begin] + (parts[end - 1] - parts[begin]) * 4.0 ** np.arange(1 - _RUNGS, 0)
        ends = np.unique([*np.searchsorted(parts, rising, side="right"), end])
        ladders.append(_ladder(parts, np.array([begin, *ends[ends > begin]])))
    return tuple(ladders)


def finer_ladders(steps: Steps, links: Links, table: Bounds, *, limit: float) -> tuple[Ladder, ...]:
    """Return ladders over the largest parts that a pipeline below the limit can have by these bounds."""
    ladders = []
    for criterion, ladder in enumerate(table.ladders):
        sums = table.whole(criterion)
        alive = np.flatnonzero(sums + ladder.least < limit)
        parts = _parts(steps, links, criterion)
        highest = min(ladder.most[alive[-1]], limit - sums[-1])
        begin, end = _range(parts, ladder.least[alive[0]], highest)
        splits = np.linspace(begin, end, min(_RUNGS, end - begin) + 1).round().astype(int)
        ladders.append(_ladder(parts, splits))
    return tuple(ladders)


def within_ladders(steps: Steps, links: Links, ladders: Sequence[Ladder]) -> tuple[Steps, Links]:
    """Return the stages and links whose parts are on the ladders; others cannot be part of a better pipeline."""
    highest = np.array([ladder.most[-1] for ladder in ladders])[:, None, None]
    sums = np.where(np.all(links.peaks <= highest, axis=0), links.sums, np.inf)
    allowed: NDArray[np.bool_] = np.all(steps.peaks <= highest, axis=0)
    return steps.only(allowed), Links(sums=sums, peaks=links.peaks)


def _counted_floor(steps: Steps, counts: Sequence[int], criterion: int) -> float:
    """Return the least part that lets all devices together have all blocks."""
    least = np.full((len(counts), steps.blocks + 1), np.inf)
    parts = np.where(np.isfinite(steps.sums[criterion]), steps.peaks[criterion], np.inf)
    np.minimum.at(least, (steps.kinds, steps.sizes), parts.min(axis=1))
    caps = np.unique(least[np.isfinite(least)])
    sizes = np.where(least <= caps[:, None, None], np.arange(steps.blocks + 1), 0).max(axis=2)
    enough = sizes @ np.array(counts) >= steps.blocks
    return float(caps[np.argmax(enough)]) if enough.any() else 0.0


def _parts(steps: Steps, links: Links, criterion: int) -> Floats:
    """Return every part that a stage or link can have, in order."""
    possible = steps.peaks[criterion][np.isfinite(steps.sums[criterion])]
    return np.unique(np.concatenate([links.peaks[criterion].ravel(), possible]))


def _range(parts: Floats, least: float, most: float) -> tuple[int, int]:
    """Return the range of parts from `least` to `most`, of at least one part."""
    end = max(int(np.searchsorted(parts, most, side="right")), 1)
    return min(int(np.searchsorted(parts, least)), end - 1), end


def _ladder(parts: Floats, splits: Indices) -> Ladder:
    """Return the ladder whose rungs are the parts between neighbouring splits."""
    return Ladder(least=parts[splits[:-1]], most=parts[splits[1:] - 1])
