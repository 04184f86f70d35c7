"""The store that all processes of one attempt at a run meet over, apart from what earlier attempts left in it."""

import os
import socket
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

BETWEEN_LOOKS = 0.05
"""Seconds between two looks of rank 0 for processes that have come."""


class MeetingError(RuntimeError):
    """The processes of a run could not meet, or could not meet again after a failure."""


_stores: dict[tuple[str, int, str], dist.Store] = {}


def meeting_store(*, rank: int, size: int, timeout: timedelta) -> dist.Store:
    """Return the store at MASTER_ADDR and MASTER_PORT, under a prefix that only the processes of this attempt know. Collective.

    torchrun may keep one store for all attempts at a run, and counts only some of them in its variables. What one
    process calls returns the same store every time. Where no agent holds the store, rank 0 does.

    Raises:
        MeetingError: not all processes came within `timeout`; says which, on rank 0.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    key = (address, port, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if key not in _stores:
        store = _connect(address, port, rank=rank, timeout=timeout)
        _stores[key] = dist.PrefixStore(_attempt(store, rank=rank, size=size, timeout=timeout), store)
    return _stores[key]


def held_by_agent() -> bool:
    """Tell whether torchrun holds the store, rather than rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _connect(address: str, port: int, *, rank: int, timeout: timedelta) -> dist.Store:
    holds_it = rank == 0 and not held_by_agent()
    try:
        return dist.TCPStore(
            address, port, is_master=holds_it, timeout=timeout, multi_tenant=True, wait_for_workers=False
        )
    except (RuntimeError, ValueError) as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise MeetingError(
                f"Port {port} on {address} is in use; set MASTER_PORT to a free port, or leave it unset."
            ) from error
        raise MeetingError(
            f"{socket.gethostname()} (rank {rank}) cannot reach rank 0's store at {address}:{port} within "
            f"{timeout.total_seconds():g} s; check that the host of rank 0 is up, that {address} is its address on this network, "
            "and that no firewall closes the port."
        ) from error


def _attempt(store: dist.Store, *, rank: int, size: int, timeout: timedelta) -> str:
    """Return rank 0's name for this attempt. A number of its own tells every process that the answer is not an old one."""
    deadline = time.monotonic() + timeout.total_seconds()
    if rank > 0:
        own = uuid.uuid4().hex
        store.set(f"hybridop/hello/{rank}", own)
        try:
            store.wait([f"hybridop/welcome/{own}"], timeout)
        except RuntimeError as error:
            raise MeetingError(
                f"Rank {rank} on {socket.gethostname()} waited {timeout.total_seconds():g} s for rank 0; check that all "
                f"{size} processes were started, with the same command."
            ) from error
        attempt = store.get(f"hybridop/welcome/{own}").decode()
        store.set(f"{attempt}/came/{rank}", "")
        return attempt
    attempt = f"hybridop/attempt/{uuid.uuid4().hex}"
    awaited = set(range(1, size))
    welcomed: dict[int, bytes] = {}
    while awaited:
        for other in sorted(awaited):
            if not store.check([f"hybridop/hello/{other}"]):
                continue
            greeting = store.get(f"hybridop/hello/{other}")
            if welcomed.get(other) != greeting:
                welcomed[other] = greeting
                store.set(f"hybridop/welcome/{greeting.decode()}", attempt)
            if store.check([f"{attempt}/came/{other}"]):
                awaited.discard(other)
        if awaited and time.monotonic() > deadline:
            missing = ", ".join(f"rank {other}" for other in sorted(awaited))
            raise MeetingError(
                f"{len(awaited)} of {size} processes ({missing}) did not come within {timeout.total_seconds():g} s; start "
                "them, or correct --nnodes and --nproc-per-node."
            )
        time.sleep(BETWEEN_LOOKS if awaited else 0.0)
    return attempt
