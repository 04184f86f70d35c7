"""Search for the best pipeline over kinds of devices: from the last stage to the first, all of one length at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_hybridop.planning.candidate_stages import Floats
from lightning_hybridop.planning.chains import Indices, Level
from lightning_hybridop.planning.ladders import finer_ladders, first_ladders, within_ladders
from lightning_hybridop.planning.search_bounds import Bounds, Links, bounds
from lightning_hybridop.planning.steps import Steps

# Values that differ by less than this share count as equal, or rounding would make the search look at all of them.
PRECISION = 1e-10

# How many ends of pipelines the first round keeps per level, and how many times more each further round.
_WIDTH = 64
_WIDER = 16

# How many better ends with the same devices and blocks each end is compared with; more finds more to leave out.
_COMPARED = 6

Chain = tuple[tuple[int, int, int], ...]
"""Stages in pipeline order: kind, first block, block behind the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A pipeline and its value."""

    value: float
    chain: Chain


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    """Ends of pipelines of one length: they stand at `node` of their level and cover the blocks from `block` on.

    `sums` and `parts` are by `[criterion, end]`. `parents` are the ends of the level before, `value` bounds what can
    become of them.
    """

    block: Indices
    node: Indices
    sums: Floats
    parts: Floats
    parents: Indices
    value: Floats

    def pick(self, which: NDArray[np.int64] | NDArray[np.bool_]) -> "_Ends":
        return _Ends(
            block=self.block[which],
            node=self.node[which],
            sums=self.sums[:, which],
            parts=self.parts[:, which],
            parents=self.parents[which],
            value=self.value[which],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Extensions:
    """All that can be added at one level, a row for each turn and number of blocks.

    `sums` and `parts` are by `[criterion, row, block behind the stage]`, `targets` the nodes by `[turn, node]`, -1 for
    none.
    """

    turn: Indices
    size: Indices
    sums: Floats
    parts: Floats
    kinds: Indices
    targets: Indices


def best_chain(
    levels: Sequence[Level],
    steps: Steps,
    links: Links,
    *,
    counts: Sequence[int],
    below: float = np.inf,
) -> Found | None:
    """Return the pipeline of the least value, None if none is below `below`; `counts` are the devices of each kind.

    Each round bounds what completes every end (the finer, the better the best pipeline so far is) and keeps a limited
    number of ends per level. What it had to drop bounds the value of all that it has not seen: the search is over when
    the best pipeline is no worse than that.
    """
    found, limit, width = None, below, _WIDTH
    ladders = first_ladders(steps, links, counts, limit=limit)
    while True:
        steps, links = within_ladders(steps, links, ladders)
        table = bounds(levels, steps, links, ladders)
        if not np.isfinite(table.whole(0)).any():
            return found
        better, unseen = _beam(levels, steps, links, table, limit=limit, width=width)
        if better is not None:
            found, limit = better, better.value
        if unseen >= limit * (1 - PRECISION):
            return found
        ladders = finer_ladders(steps, links, table, limit=limit)
        width *= _WIDER


def _beam(
    levels: Sequence[Level], steps: Steps, links: Links, table: Bounds, *, limit: float, width: int
) -> tuple[Found | None, float]:
    """Return the best pipeline found below `limit`, and a bound on the value of all that were not looked at."""
    ends = _no_end(table)
    history = [ends]
    found, unseen = None, np.inf
    for number in range(1, len(levels)):
        added = _extensions(levels[number - 1], steps, steps.spans[number - 1])
        ends = _extended(added, levels[number - 1], links, table, number, ends, limit)
        whole = np.flatnonzero((ends.block == 0) & levels[number].complete[ends.node])
        if len(whole):
            best = int(whole[np.argmin(ends.value[whole])])
            limit = float(ends.value[best])
            found = Found(value=limit, chain=_traced(levels, [*history, ends], best))
        ends = _undominated(ends.pick((ends.block > 0) & (ends.value < limit * (1 - PRECISION))))
        if len(ends.block) > width:
            order = np.argsort(ends.value, kind="stable")
            unseen = min(unseen, float(ends.value[order[width]]))
            ends = ends.pick(order[:width])
        if not len(ends.block):
            break
        history.append(ends)
    return found, unseen


def _no_end(table: Bounds) -> _Ends:
    """Return the one end that has no stage yet. No largest part will be below the least that a whole pipeline has."""
    parts = [[ladder.least[np.argmax(np.isfinite(table.whole(c)))]] for c, ladder in enumerate(table.ladders)]
    zero = np.zeros(1, dtype=np.int64)
    return _Ends(
        block=zero + table.tables[0].shape[1] - 1,
        node=zero,
        sums=np.zeros((len(parts), 1)),
        parts=np.array(parts),
        parents=zero,
        value=np.zeros(1),
    )


def _extensions(level: Level, steps: Steps, spans: Sequence[tuple[int, int]]) -> _Extensions:
    targets = np.full((len(level.turns), len(level.complete)), -1)
    for index, turn in enumerate(level.turns):
        targets[index, turn.sources] = turn.targets[turn.leads_to]
    rows = np.concatenate([np.arange(*span) for span in spans])
    return _Extensions(
        turn=np.repeat(np.arange(len(spans)), [behind - first for first, behind in spans]),
        size=steps.sizes[rows],
        sums=steps.sums[:, rows],
        parts=steps.peaks[:, rows],
        kinds=np.array([turn.kind for turn in level.turns]),
        targets=targets,
    )


def _extended(
    added: _Extensions, level: Level, links: Links, table: Bounds, number: int, ends: _Ends, limit: float
) -> _Ends:
    """Return what the ends become with one more stage, as far as they can stay below the limit."""
    limit *= 1 - PRECISION
    behind = level.kinds[ends.node]
    linked = ends.sums[:, None] + links.sums[:, added.kinds][..., behind]
    linked = np.where(added.targets[:, ends.node] >= 0, linked, np.inf)
    sums = added.sums[:, :, ends.block] + linked[:, added.turn]
    possible = (sums + ends.parts[:, None] < limit).all(axis=0) & (added.size[:, None] <= ends.block)
    row, parents = np.nonzero(possible)
    sums, turn, block = sums[:, row, parents], added.turn[row], ends.block[parents]
    parts = np.maximum(ends.parts[:, parents], added.parts[:, row, block])
    parts = np.maximum(parts, links.peaks[:, added.kinds[turn], behind[parents]])
    node = added.targets[turn, ends.node[parents]]
    block = block - added.size[row]
    value = table.value(number, node, block, sums, parts)
    return _Ends(block=block, node=node, sums=sums, parts=parts, parents=parents, value=value).pick(
        value < limit
    )


def _undominated(ends: _Ends) -> _Ends:
    """Leave out ends for which another at the same node and block is no worse in any respect."""
    facts = np.concatenate([ends.sums, ends.parts])
    order = np.lexsort((facts.sum(axis=0), ends.block, ends.node))
    facts, node, block = facts[:, order], ends.node[order], ends.block[order]
    nearly = facts * (1 - PRECISION / 100)
    worse = np.zeros(len(order), dtype=np.bool_)
    for shift in range(1, min(_COMPARED + 1, len(order))):
        same = (node[shift:] == node[:-shift]) & (block[shift:] == block[:-shift])
        worse[shift:] |= same & (facts[:, shift:] >= nearly[:, :-shift]).all(axis=0)
    return ends.pick(np.sort(order[~worse]))


def _traced(levels: Sequence[Level], history: Sequence[_Ends], index: int) -> Chain:
    """Return the stages of the end of that index in the last level of the history."""
    chain = []
    for number in range(len(history) - 1, 0, -1):
        after = history[number]
        parent = int(after.parents[index])
        kind = int(levels[number].kinds[after.node[index]])
        chain.append((kind, int(after.block[index]), int(history[number - 1].block[parent])))
        index = parent
    return tuple(chain)
