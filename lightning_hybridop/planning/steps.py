"""The stages that pipelines can consist of, as arrays that levels and turns share."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_hybridop.planning.candidate_stages import Floats
from lightning_hybridop.planning.chains import Indices, Level


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Stages of one kind in one place: `sums` and `peaks` by `[criterion, n - 1, j]`, sums infinite for what cannot be."""

    sums: Floats
    peaks: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """All steps: `sums` and `peaks` by `[criterion, row, j]`. A row has the stages of one kind, place and size.

    `sizes` and `kinds` are those of the rows, `spans` the first row of every turn, by level, and the one behind its last.
    """

    sums: Floats
    peaks: Floats
    sizes: Indices
    kinds: Indices
    spans: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def blocks(self) -> int:
        """Number of blocks of the model."""
        return int(self.sums.shape[2]) - 1

    def only(self, allowed: NDArray[np.bool_]) -> "Steps":
        """Return the steps without the stages that are not allowed, by `[row, j]`."""
        allowed = allowed & np.isfinite(self.sums[0])
        kept = allowed.any(axis=1)
        position = np.concatenate([[0], np.cumsum(kept)]).tolist()
        return Steps(
            sums=np.where(allowed[kept], self.sums[:, kept], np.inf),
            peaks=self.peaks[:, kept],
            sizes=self.sizes[kept],
            kinds=self.kinds[kept],
            spans=tuple(
                tuple((position[first], position[behind]) for first, behind in level) for level in self.spans
            ),
        )


def joined_steps(levels: Sequence[Level], steps: Sequence[Sequence[Step]]) -> Steps:
    """Return all turns' steps, each once however many turns share it."""
    kinds = {
        id(step): turn.kind
        for level, row in zip(levels, steps, strict=True)
        for turn, step in zip(level.turns, row, strict=True)
    }
    distinct = list({id(step): step for row in steps for step in row}.values())
    sizes = [step.sums.shape[1] for step in distinct]
    ends = np.cumsum(sizes).tolist()
    spans = {id(step): (end - size, end) for step, size, end in zip(distinct, sizes, ends, strict=True)}
    return Steps(
        sums=np.concatenate([step.sums for step in distinct], axis=1),
        peaks=np.concatenate([step.peaks for step in distinct], axis=1),
        sizes=np.concatenate([np.arange(1, size + 1) for size in sizes]),
        kinds=np.repeat([kinds[id(step)] for step in distinct], sizes),
        spans=tuple(tuple(spans[id(step)] for step in row) for row in steps),
    )
