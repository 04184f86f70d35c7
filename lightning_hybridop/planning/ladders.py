"""Which parts of a criterion the search tells apart: all at first, roughly; then finely those that still matter."""

from collections.abc import Iterable, Sequence

import numpy as np

from lightning_hybridop.planning.candidate_stages import Floats
from lightning_hybridop.planning.chains import Indices, Level
from lightning_hybridop.planning.search_bounds import Bounds, Ladder, Links, Step

_RUNGS = 8


def first_ladders(
    levels: Sequence[Level],
    steps: Sequence[Sequence[Step]],
    links: Links,
    counts: Sequence[int],
    *,
    limit: float,
) -> tuple[Ladder, ...]:
    """Return ladders over all parts below the limit, with rungs close together where the largest part is least.

    `counts` are the devices of each kind.
    """
    ladders = []
    for criterion in range(len(links.sums)):
        parts = _parts(steps, links, criterion)
        least = _counted_floor(levels, steps, counts, criterion)
        begin, end = _range(parts, least, min(limit, parts[-1]))
        rising = parts[begin] + (parts[end - 1] - parts[begin]) * 4.0 ** np.arange(1 - _RUNGS, 0)
        ends = np.unique([*np.searchsorted(parts, rising, side="right"), end])
        ladders.append(_ladder(parts, np.array([begin, *ends[ends > begin]])))
    return tuple(ladders)


def finer_ladders(
    steps: Sequence[Sequence[Step]], links: Links, table: Bounds, *, limit: float
) -> tuple[Ladder, ...]:
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


def within_ladders(steps: Sequence[Sequence[Step]], ladders: Sequence[Ladder]) -> list[list[Step]]:
    """Return the steps without the stages whose parts are above a ladder."""
    restricted = {id(step): _restricted(step, ladders) for step in _distinct(steps)}
    return [[restricted[id(step)] for step in row] for row in steps]


def _restricted(step: Step, ladders: Sequence[Ladder]) -> Step:
    allowed = np.isfinite(step.sums[0])
    for peaks, ladder in zip(step.peaks, ladders, strict=True):
        allowed &= peaks <= ladder.most[-1]
    sizes = np.flatnonzero(allowed.any(axis=1))
    size = int(sizes[-1]) + 1 if len(sizes) else 0
    return Step(sums=np.where(allowed, step.sums, np.inf)[:, :size], peaks=step.peaks[:, :size])


def _counted_floor(
    levels: Sequence[Level], steps: Sequence[Sequence[Step]], counts: Sequence[int], criterion: int
) -> float:
    """Return the least part that lets all devices together have all blocks."""
    blocks = steps[0][0].sums.shape[2] - 1
    least = np.full((len(counts), blocks), np.inf)
    kinds = {
        id(step): turn.kind
        for level, row in zip(levels, steps, strict=True)
        for turn, step in zip(level.turns, row, strict=True)
    }
    for step in _distinct(steps):
        parts = np.where(np.isfinite(step.sums[criterion]), step.peaks[criterion], np.inf)
        known = least[kinds[id(step)], : len(parts)]
        np.minimum(known, parts.min(axis=1), out=known)
    caps = np.unique(least[np.isfinite(least)])
    sizes = np.where(least <= caps[:, None, None], np.arange(1, blocks + 1), 0).max(axis=2)
    enough = sizes @ np.array(counts) >= blocks
    return float(caps[np.argmax(enough)]) if enough.any() else 0.0


def _parts(steps: Sequence[Sequence[Step]], links: Links, criterion: int) -> Floats:
    """Return every part that a stage or link can have, in order."""
    arrays = [step.peaks[criterion][np.isfinite(step.sums[criterion])] for step in _distinct(steps)]
    return np.unique(np.concatenate([links.peaks[criterion].ravel(), *arrays]))


def _range(parts: Floats, least: float, most: float) -> tuple[int, int]:
    """Return the range of parts from `least` to `most`, of at least one part."""
    end = max(int(np.searchsorted(parts, most, side="right")), 1)
    return min(int(np.searchsorted(parts, least)), end - 1), end


def _ladder(parts: Floats, splits: Indices) -> Ladder:
    """Return the ladder whose rungs are the parts between neighbouring splits."""
    return Ladder(least=parts[splits[:-1]], most=parts[splits[1:] - 1])


def _distinct(steps: Sequence[Sequence[Step]]) -> Iterable[Step]:
    """Return every step once; levels share them."""
    return {id(step): step for row in steps for step in row}.values()
