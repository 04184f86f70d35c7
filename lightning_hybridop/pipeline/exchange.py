"""What all stages tell each other: small facts as JSON, never as pickles; batch checksums; clock offsets."""

import io
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_hybridop.pipeline.batches import BatchError
from lightning_hybridop.pipeline.packing import can_be_packed, checked_length, pack, unpack


def broadcast_json(value: Any, *, source: int) -> Any:
    """Return rank `source`'s JSON-serialisable `value` on every rank; floats arrive bit for bit."""
    encoded = json.dumps(value).encode() if dist.get_rank() == source else b""
    return json.loads(_broadcast_bytes(encoded, source=source))


def broadcast_nested(value: Any, *, source: int) -> Any:
    """Return rank `source`'s `value` on every rank: dicts, lists and tuples of tensors, strings, numbers and None.

    Raises:
        BatchError: on rank `source`, when there is something else in it.
    """
    mine = dist.get_rank() == source
    packed = _broadcast_bytes(pack(value) if mine else b"", source=source)
    return value if mine else unpack(packed)


def broadcast_object(value: Any, *, source: int) -> Any:
    """Return rank `source`'s `value` on every rank, whatever it is; nothing that is received can run code.

    Beside what `pack` takes that is what torch loads under `weights_only`: sets, ordered dicts, paths, and classes that
    `torch.serialization.add_safe_globals` knows.

    Raises:
        BatchError: on every rank, naming what cannot be sent.
    """
    mine = dist.get_rank() == source
    content, refusal = b"", None
    is_packed = mine and can_be_packed(value, exactly=True)
    if mine and not is_packed:
        content, refusal = _saved(value)
    is_packed, refusal = broadcast_json([is_packed, refusal], source=source)
    if refusal is not None:
        raise BatchError(refusal)
    if is_packed:
        return broadcast_nested(value, source=source)
    content = _broadcast_bytes(content, source=source)
    return value if mine else _loaded(content)


def _saved(value: Any) -> tuple[bytes, str | None]:
    """Return an object as bytes that load without running code, or in one sentence why it has none."""
    try:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        _loaded(buffer.getvalue())
    except Exception as error:  # whatever pickling the object raises
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return b"", (
            f"A {type(value).__name__} cannot be sent to other processes ({reason}); use dicts, lists and tuples of tensors, "
            "strings and numbers, or name its classes to torch.serialization.add_safe_globals on every rank."
        )
    return buffer.getvalue(), None


def _loaded(content: bytes) -> Any:
    with torch.serialization.safe_globals([pathlib.PosixPath, pathlib.PurePosixPath]):
        return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")


def gather_nested(value: Any) -> list[Any]:
    """Return the values of all ranks, in order of rank, on every rank; each is what `broadcast_nested` takes."""
    return [
        broadcast_nested(value if rank == dist.get_rank() else None, source=rank)
        for rank in range(dist.get_world_size())
    ]


def _broadcast_bytes(content: bytes, *, source: int) -> bytes:
    length = torch.tensor([len(content)], dtype=torch.int64)
    dist.broadcast(length, source)
    if dist.get_rank() == source:
        dist.broadcast(torch.frombuffer(bytearray(content), dtype=torch.uint8), source)
        return content
    received = torch.empty(checked_length(length), dtype=torch.uint8)
    dist.broadcast(received, source)
    return received.numpy().tobytes()


def gather_json(value: Any) -> list[Any]:
    """Return the JSON-serialisable values of all ranks, in order of rank, on every rank."""
    return [
        broadcast_json(value if rank == dist.get_rank() else None, source=rank)
        for rank in range(dist.get_world_size())
    ]


def gather_numbers(numbers: Sequence[float], ranks: Sequence[int]) -> list[list[float]]:
    """Return the numbers of each rank in `ranks`, in that order; lists may differ in length. Collective over all ranks."""
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(numbers)]))
    mine = torch.zeros(int(max(lengths)), dtype=torch.float64)
    mine[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
    gathered = [torch.empty_like(mine) for _ in lengths]
    dist.all_gather(gathered, mine)
    return [gathered[rank][: int(lengths[rank])].tolist() for rank in ranks]


def check_same_batch(checksum: int, *, stages_of_ranks: list[int]) -> None:
    """Compare the batch's checksum over all ranks.

    Raises:
        BatchError: on every rank, naming the ranks that read something else than rank 0.
    """
    mine = torch.tensor([checksum], dtype=torch.int64)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    checksums = [int(other) for other in gathered]
    odd = [rank for rank, other in enumerate(checksums) if other != checksums[0]]
    if odd:
        names = ", ".join(f"rank {rank} (stage {stages_of_ranks[rank]})" for rank in odd)
        raise BatchError(
            f"Every rank must read the same batch, but {names} read another one than rank 0; give all hosts the same "
            "data files and samplers a seeded generator of their own, or pass HybridOPStrategy(data='broadcast')."
        )


def clock_offset(*, rounds: int = 8) -> float:
    """Return what to add to this rank's `time.perf_counter()` to get rank 0's, in seconds. Collective.

    Cristian's method: the reply of the fastest of `rounds` round trips is taken to be from its middle.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    offset = 0.0
    for other in range(1, ranks):
        if rank not in (0, other):
            continue
        best = float("inf")
        stamp = torch.zeros(1, dtype=torch.float64)
        for _ in range(rounds):
            if rank == 0:
                dist.recv(stamp, other)
                stamp[0] = time.perf_counter()
                dist.send(stamp, other)
                continue
            sent = time.perf_counter()
            dist.send(stamp, 0)
            dist.recv(stamp, 0)
            arrived = time.perf_counter()
            if arrived - sent < best:
                best = arrived - sent
                offset = float(stamp[0]) - (sent + arrived) / 2
    return offset
