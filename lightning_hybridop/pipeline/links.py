"""Measures the links between the processes of a pipeline."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import torch
import torch.distributed as dist

from lightning_hybridop.planning.cluster import Link

WARM_UP = 2
"""Untimed exchanges of each size: the first one connects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """What lies between two ranks, `first` < `second`."""

    first: int
    second: int
    link: Link


def measure_links(
    *, size_bytes: int = 2**20, repeats: int = 5, step: Callable[[], None] = lambda: None
) -> list[MeasuredLink]:
    """Measure the link between each two ranks of the world, and return all of them on every rank. Collective.

    Two ranks at a time send a message to and fro, all others wait. Latency is half of the median round trip of one
    byte; bandwidth follows from how much longer `size_bytes` take. `step` is called once for each link.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = list(combinations(range(world), 2))
    # Seconds one way of one byte and of the whole size, for each pair.
    table = torch.zeros(len(pairs), 2, dtype=torch.float64)
    for index, pair in enumerate(pairs):
        dist.barrier()
        if rank in pair:
            peer = pair[0] if rank == pair[1] else pair[1]
            times = [
                _one_way(peer, size, repeats=repeats, begins=rank == pair[0]) for size in (1, size_bytes)
            ]
            if rank == pair[0]:
                table[index] = torch.tensor(times, dtype=torch.float64)
        step()
    # All other ranks have zeros there.
    dist.all_reduce(table)
    return [
        MeasuredLink(first=first, second=second, link=_link(small, large, size_bytes))
        for (first, second), (small, large) in zip(pairs, table.tolist(), strict=True)
    ]


def _one_way(peer: int, size: int, *, repeats: int, begins: bool) -> float:
    """Return half of the median seconds that a message and its answer take."""
    message = torch.zeros(size, dtype=torch.uint8)
    seconds = []
    for _ in range(WARM_UP + repeats):
        began = time.perf_counter()
        if begins:
            dist.send(message, peer)
            dist.recv(message, peer)
        else:
            dist.recv(message, peer)
            dist.send(message, peer)
        seconds.append(time.perf_counter() - began)
    return median(seconds[WARM_UP:]) / 2


def _link(small: float, large: float, size: int) -> Link:
    """Return the link that takes these seconds for one byte and for `size` bytes."""
    # A jitter larger than the transfer itself must not give a link without limits.
    transfer = max(large - small, large / 10)
    return Link(bandwidth_mbit_s=size * 8 / transfer / 1e6, latency_ms=small * 1e3)
