"""Loaders that go on in the middle of an epoch."""

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_hybridop.loaders import ResumedLoader, batches_of_epoch, length_of


def shuffled(seed: int = 3) -> DataLoader[int]:
    return DataLoader(range(10), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(seed))  # type: ignore[arg-type]


def test_the_first_epoch_goes_on_and_the_next_one_is_whole() -> None:
    straight = shuffled()
    epochs = [[batch.tolist() for batch in straight] for _ in range(2)]

    resumed = ResumedLoader(shuffled(), trained=3)

    assert [batch.tolist() for batch in resumed] == epochs[0][3:]
    assert [batch.tolist() for batch in resumed] == epochs[1]


def test_nothing_is_drawn_before_the_first_batch_is_asked_for() -> None:
    loader = shuffled()
    iterator = iter(ResumedLoader(loader, trained=1))
    loader.generator.manual_seed(4)
    loader.sampler.generator.manual_seed(4)

    assert next(iterator).tolist() == [batch.tolist() for batch in shuffled(4)][1]


def test_a_wrapped_loader_is_read_as_the_loader_itself() -> None:
    loader = shuffled()
    resumed = ResumedLoader(loader, trained=1)

    assert len(resumed) == 5
    assert resumed.sampler is loader.sampler
    with pytest.raises(AttributeError):
        _ = resumed.no_such_attribute


def test_a_loader_without_a_length_has_none() -> None:
    endless = iter([])

    assert length_of(endless) is None
    assert length_of(ResumedLoader(endless, trained=1)) is None
    assert length_of(shuffled()) == 5


@pytest.mark.parametrize(
    ("length", "limit", "expected"),
    [(10, 1.0, 10), (10, 4, 4), (10, 40, 10), (10, 0.25, 2), (None, 7, 7), (None, 1.0, float("inf"))],
)
def test_an_epoch_ends_where_lightning_ends_it(length: int | None, limit: float, expected: float) -> None:
    assert batches_of_epoch(length, limit) == expected
