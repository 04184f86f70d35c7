"""What the processes of a run tell each other before they are connected: small facts, over the store that they met at."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

TO_HEAR = timedelta(seconds=5)
"""How long the holder of the store stays for the others."""


class AbsentError(RuntimeError):
    """A process of the run did not come; the message names its rank."""


def tell_all(store: dist.Store, value: Any, *, topic: str, rank: int, size: int) -> list[Any]:
    """Return the JSON-serialisable values of all ranks, in order of rank, on every rank. Collective over `store`.

    Waits for as long as the store does. `topic` is what the store keeps them under: each may be told once.

    Raises:
        AbsentError: naming the ranks that told nothing in time.
    """
    store.set(f"{topic}/{rank}", json.dumps(value))
    try:
        told = [json.loads(store.get(f"{topic}/{other}")) for other in range(size)]
        store.set(f"{topic}/heard/{rank}", "")
    except RuntimeError as error:
        raise AbsentError(_absent(store, topic=topic, size=size)) from error
    if rank == 0:
        # The store may be this process's own, and what was told a reason to end: not before all have heard it.
        with suppress(RuntimeError):
            store.wait([f"{topic}/heard/{other}" for other in range(size)], TO_HEAR)
    return told


def _absent(store: dist.Store, *, topic: str, size: int) -> str:
    try:
        missing = [rank for rank in range(size) if not store.check([f"{topic}/{rank}"])]
    except RuntimeError:
        return "The store that the processes met at is gone, and with it the process of rank 0 or its torchrun; look there first."
    return (
        f"{in_words(missing)} of {size} did not come within the time limit; see whether "
        f"{'its host runs' if len(missing) == 1 else 'their hosts run'} the command, and whether MASTER_ADDR and MASTER_PORT "
        "can be reached from there."
    )


def in_words(ranks: Sequence[int], hosts: Mapping[int, str] | None = None) -> str:
    """Return ranks as a person would write them, such as "ranks 0-2, 5 (hosts nano, nx)"; `hosts` is by rank."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    text = f"{'rank' if len(ordered) == 1 else 'ranks'} {', '.join(parts)}"
    if hosts is None:
        return text
    names = list(dict.fromkeys(hosts[rank] for rank in ordered))
    return f"{text} ({'host' if len(names) == 1 else 'hosts'} {', '.join(names)})"


def grouped(values: Mapping[int, str], hosts: Mapping[int, str]) -> str:
    """Return who has which value, such as "1 on rank 0 (host nano) and 2 on ranks 1-2 (host nx)"; both are by rank."""
    ranks: dict[str, list[int]] = {}
    for rank in sorted(values):
        ranks.setdefault(values[rank], []).append(rank)
    parts = [f"{value} on {in_words(those, hosts)}" for value, those in ranks.items()]
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
