"""Makes every rank draw the same batches: samplers get a private generator, seeded per epoch."""

from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_hybridop.estimation.directions import derive_seed


def seed_samplers(dataloader: Any, seed: int) -> None:
    """Give a DataLoader's samplers and workers generators of their own that depend on `seed` and the epoch alone.

    Samplers that draw from torch's global random state give every rank another permutation as soon as one rank draws
    a dropout mask more than the others. A sampler that was built with a generator keeps it.
    """
    if not isinstance(dataloader, DataLoader):
        return
    if dataloader.generator is None:
        dataloader.generator = torch.Generator().manual_seed(derive_seed("workers", seed))
    samplers: list[Any] = [dataloader.sampler, getattr(dataloader.batch_sampler, "sampler", None)]
    for sampler in samplers:
        # Only samplers that draw have the attribute, and it is None until somebody gives them a generator.
        if getattr(sampler, "generator", False) is not None:
            continue
        generator = torch.Generator()
        sampler.generator = generator
        _reseed(generator, seed, epoch=0)
        # Lightning calls `set_epoch` of any sampler that has one before each epoch.
        sampler.set_epoch = lambda epoch, generator=generator: _reseed(generator, seed, epoch=epoch)


def _reseed(generator: torch.Generator, seed: int, *, epoch: int) -> None:
    generator.manual_seed(derive_seed("samples", seed, epoch))
