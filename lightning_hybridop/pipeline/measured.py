"""What training measured of its own plan: the iteration time, Comu_ti and memory of each stage."""

import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from lightning_hybridop.pipeline.exchange import gather_numbers
from lightning_hybridop.planning.plan import MIB, Figures
from lightning_hybridop.schedules.timeline import Timeline

_NUMBERS = 3  # of each mini-batch


class MiniBatchTimes:
    """Notes when each mini-batch began and ended on this stage, how long the stage was busy, and what it sent."""

    def __init__(self) -> None:
        self._numbers: list[float] = []
        self._sent_bytes = 0

    def add(self, timeline: Timeline, sent_bytes: int = 0) -> None:
        """Note one mini-batch's actions on this stage, and the bytes that it sent to its neighbours."""
        self._sent_bytes += sent_bytes
        busy = sum(timed.end - timed.start for timed in timeline)
        # A replica may have had nothing to do.
        self._numbers += [
            min((timed.start for timed in timeline), default=0.0),
            max((timed.end for timed in timeline), default=0.0),
            busy,
        ]

    def gather(self, rank_of_stage: Sequence[int]) -> Figures | None:
        """Return the figures of the whole pipeline on every rank; None before the first mini-batch. Collective."""
        if not self._numbers:
            return None
        stages = gather_numbers([peak_memory_mib(), *self._numbers], rank_of_stage)
        return figures([stage[1:] for stage in stages], [stage[0] for stage in stages])

    def gather_sent_mib(self, rank_of_stage: Sequence[int]) -> tuple[float, ...]:
        """Return the mean MiB that each stage sends in a mini-batch, on every rank; none before the first. Collective."""
        if not self._numbers:
            return ()
        mine = self._sent_bytes * _NUMBERS / len(self._numbers) / MIB
        return tuple(mean for (mean,) in gather_numbers([mine], rank_of_stage))


def figures(stages: Sequence[Sequence[float]], memory_mib: Sequence[float]) -> Figures:
    """Return the medians over mini-batches, the first one left out if there are more: it allocates and compiles.

    `stages` holds, for each stage, start, end and busy time of one mini-batch after the other.
    """
    per_stage = [
        [tuple(numbers[i : i + _NUMBERS]) for i in range(0, len(numbers), _NUMBERS)] for numbers in stages
    ]
    mini_batches = list(zip(*per_stage, strict=True))
    counted = mini_batches[1:] or mini_batches
    spans = [max(end for _, end, _ in one) - min(start for start, _, _ in one) for one in counted]
    shares = [
        sum(busy for _, _, busy in one) / (len(stages) * span)
        for one, span in zip(counted, spans, strict=True)
    ]
    return Figures(
        iteration_seconds=median(spans), comu_ti=median(shares), memory_mib=tuple(map(float, memory_mib))
    )


def peak_memory_mib() -> float:
    """Return this process's peak resident set in MiB, device memory not included."""
    # On Linux a program started by a large process inherits that one's ru_maxrss; VmHWM is this program's own.
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / MIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MIB if sys.platform == "darwin" else peak * 1024 / MIB
