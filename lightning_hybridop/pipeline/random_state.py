"""Torch's global random state, lent and given back."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Put the random state of the CPU and of `device` back at the end of the block."""
    if device.type in ("cpu", "meta"):
        # Named, because torch otherwise asks for whatever accelerator it finds; no device of it is touched.
        with torch.random.fork_rng(devices=[], device_type="cuda"):
            yield
    else:
        with torch.random.fork_rng(devices=[device], device_type=device.type):
            yield
