"""The graph of all pipelines over kinds of devices, built from the last stage to the first.

A node stands for ends of pipelines that use the same number of devices of each kind, begin with a stage of the same
kind, and are or are not ready for zo stages. All nodes with the same number of devices are one level; a `Turn` adds
one more stage in front.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

_Node = tuple[tuple[int, ...], bool, int]
"""Devices used of each kind, whether zo stages may follow, and the kind of the first stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Adding a stage of one kind and in one part of the pipeline to nodes of one level.

    `sources` are these nodes, `targets` the nodes of the next level that can be reached, and `sources[i]` leads to
    `targets[leads_to[i]]`. `first_bp` marks the first bp stage behind a zo stage, `exit` the last zo stage.
    """

    kind: int
    first_bp: bool
    exit: bool
    sources: Indices
    targets: Indices
    leads_to: Indices


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The nodes with one number of devices: which may be a whole pipeline, their first stages' kinds, and the turns.

    The only node of level 0 has the number of kinds as its kind.
    """

    complete: NDArray[np.bool_]
    kinds: Indices
    turns: tuple[Turn, ...]


@lru_cache(maxsize=32)
def chains(
    available: tuple[int, ...], zo: tuple[bool, ...], *, most: int, use_all: bool
) -> tuple[Level, ...]:
    """Return the levels of all pipelines of at most `most` stages of kinds with so many devices, zo or not.

    Every pipeline has a stage of each role that the kinds have; with `use_all` it has all devices.
    """
    nodes: list[_Node] = [((0,) * len(zo), all(zo), len(zo))]
    levels = []
    for stages in range(most + 1):
        following: dict[_Node, int] = {}
        edges: dict[tuple[int, bool, bool], tuple[list[int], list[int]]] = {}
        complete = []
        for index, (counts, ready_for_zo, _) in enumerate(nodes):
            uses_zo = any(count > 0 and is_zo for count, is_zo in zip(counts, zo, strict=True))
            complete.append(stages > 0 and uses_zo == any(zo) and (not use_all or counts == available))
            for kind, is_zo in enumerate(zo):
                if stages == most or counts[kind] == available[kind] or is_zo != ready_for_zo:
                    continue
                used = (*counts[:kind], counts[kind] + 1, *counts[kind + 1 :])
                for first_bp in (False, True) if any(zo) and not is_zo else (False,):
                    sources, targets = edges.setdefault((kind, first_bp, is_zo and not uses_zo), ([], []))
                    sources.append(index)
                    targets.append(following.setdefault((used, is_zo or first_bp, kind), len(following)))
        levels.append(
            Level(
                complete=np.array(complete),
                kinds=np.array([kind for _, _, kind in nodes]),
                turns=tuple(_turn(*key, *pairs) for key, pairs in edges.items()),
            )
        )
        nodes = list(following)
    return tuple(levels)


def _turn(kind: int, first_bp: bool, leaves: bool, sources: list[int], targets: list[int]) -> Turn:
    reached, leads_to = np.unique(targets, return_inverse=True)
    return Turn(
        kind=kind,
        first_bp=first_bp,
        exit=leaves,
        sources=np.array(sources),
        targets=reached,
        leads_to=leads_to,
    )
