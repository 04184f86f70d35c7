"""Directions `z`: pure functions of their key, so that a device replays them instead of storing them."""

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy
import torch
from torch import Tensor

Distribution = Literal["normal", "rademacher"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectionKey:
    """What a direction is a function of, besides the parameter's name.

    `step` counts training batches from the start of training. `micro_batch` is None when all micro-batches of
    a mini-batch share their directions (`directions="minibatch"`), `row` is that of the micro-batch when each row has
    its own (`directions="row"`). Elements are standard normal, or 1 and -1 with equal chances (`rademacher`).
    """

    seed: int
    step: int
    micro_batch: int | None
    query: int
    row: int | None = None
    distribution: Distribution = "normal"


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed that is a pure function of `parts` (their `repr`), equal on every host."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def direction(key: DirectionKey, name: str, shape: torch.Size) -> Tensor:
    """Return the direction of one parameter, float32 on the CPU, of the parameter's `shape`.

    Counter-based (Philox): the value depends on the key and the parameter's name alone, not on what was drawn
    before, on the device, on the stage split or on any global random state.
    """
    parts: tuple[object, ...] = (key.seed, key.step, key.micro_batch, key.query, name)
    if key.row is not None:
        parts += (key.row,)
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()
    generator = numpy.random.Generator(numpy.random.Philox(key=int.from_bytes(digest, "little")))
    if key.distribution == "normal":
        return torch.from_numpy(generator.standard_normal(tuple(shape), dtype=numpy.float32))
    bits = numpy.frombuffer(generator.bytes(-(-shape.numel() // 8)), dtype=numpy.uint8)
    signs = 2.0 * numpy.unpackbits(bits)[: shape.numel()].astype(numpy.float32) - 1.0
    return torch.from_numpy(signs.reshape(tuple(shape)))
