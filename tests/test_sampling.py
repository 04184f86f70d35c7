from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from lightning_hybridop.sampling import seed_samplers


class Numbers(Dataset[int]):
    """The numbers 0..19."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        return index


def epochs(dataloader: DataLoader[int], count: int, *, first: int = 0) -> list[list[int]]:
    """Run epochs as Lightning does: `set_epoch` of the sampler that has one, then the batches."""
    seen = []
    for epoch in range(first, first + count):
        if hasattr(dataloader.sampler, "set_epoch"):
            dataloader.sampler.set_epoch(epoch)
        inner = getattr(dataloader.batch_sampler, "sampler", None)
        if inner is not dataloader.sampler and hasattr(inner, "set_epoch"):
            inner.set_epoch(epoch)
        torch.rand(epoch + 3)  # a rank that draws dropout masks meanwhile
        seen.append([int(number) for batch in dataloader for number in batch])
    return seen


def shuffled(seed: int = 0, **options: object) -> DataLoader[int]:
    dataloader: DataLoader[int] = DataLoader(Numbers(), batch_size=4, shuffle=True, **options)  # type: ignore[arg-type]
    seed_samplers(dataloader, seed)
    return dataloader


def test_permutations_do_not_depend_on_the_global_random_state() -> None:
    torch.manual_seed(0)
    here = epochs(shuffled(), 3)
    torch.manual_seed(1)
    torch.rand(5)
    there = epochs(shuffled(), 3)

    assert here == there
    assert all(sorted(epoch) == list(range(20)) for epoch in here)


def test_permutations_differ_by_epoch_and_seed() -> None:
    one, two = epochs(shuffled(0), 3), epochs(shuffled(1), 3)

    assert len({tuple(epoch) for epoch in one + two}) == 6


def test_epoch_alone_decides_so_that_a_resumed_run_continues() -> None:
    assert epochs(shuffled(), 2, first=2) == epochs(shuffled(), 4)[2:]


def test_reading_leaves_the_global_random_state_alone() -> None:
    dataloader = shuffled()
    before = torch.get_rng_state()

    list(dataloader)

    assert torch.equal(torch.get_rng_state(), before)


def test_samplers_that_draw_with_weights_are_seeded() -> None:
    def weighted() -> DataLoader[int]:
        sampler = WeightedRandomSampler([1.0, 2.0] * 10, num_samples=20)
        dataloader: DataLoader[int] = DataLoader(Numbers(), batch_size=4, sampler=sampler)
        seed_samplers(dataloader, 0)
        return dataloader

    torch.manual_seed(0)
    here = epochs(weighted(), 2)
    torch.manual_seed(1)

    assert epochs(weighted(), 2) == here


def test_sampler_inside_a_batch_sampler_is_seeded() -> None:
    def batched() -> DataLoader[int]:
        batches = BatchSampler(RandomSampler(Numbers()), batch_size=3, drop_last=False)
        dataloader: DataLoader[int] = DataLoader(Numbers(), batch_sampler=batches)
        seed_samplers(dataloader, 0)
        return dataloader

    torch.manual_seed(0)
    here = epochs(batched(), 2)
    torch.manual_seed(1)

    assert epochs(batched(), 2) == here


def test_generator_of_the_users_own_is_kept() -> None:
    own = torch.Generator().manual_seed(5)
    dataloader = shuffled(generator=own)

    assert dataloader.generator is own
    assert dataloader.sampler.generator is own
    assert not hasattr(dataloader.sampler, "set_epoch")


def test_samplers_that_draw_nothing_are_left_alone() -> None:
    class Backwards(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(19, -1, -1))

    for sampler in (SequentialSampler(Numbers()), Backwards()):
        dataloader: DataLoader[int] = DataLoader(Numbers(), sampler=sampler)
        seed_samplers(dataloader, 0)
        assert not hasattr(sampler, "set_epoch")
        assert not hasattr(sampler, "generator")


def test_workers_base_seed_depends_on_the_seed_alone() -> None:
    generators = [shuffled(seed).generator for seed in (0, 0, 1)]

    first, again, other = (torch.rand(1, generator=generator) for generator in generators)
    assert first == again
    assert first != other


@pytest.mark.parametrize("loader", [[1, 2, 3], None, iter(())], ids=["list", "None", "iterator"])
def test_what_is_no_dataloader_is_left_alone(loader: object) -> None:
    seed_samplers(loader, 0)
