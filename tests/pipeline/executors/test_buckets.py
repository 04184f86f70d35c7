import pytest
import torch

from lightning_hybridop.pipeline.executors.buckets import DEFAULT_LENGTHS, bucket, padded
from lightning_hybridop.pipeline.executors.executor import ExecutorError


def test_the_smallest_length_that_holds_a_row_is_taken() -> None:
    assert [bucket(length, (64, 32, 48)) for length in (1, 32, 33, 48, 49, 64)] == [32, 32, 48, 48, 64, 64]
    with pytest.raises(ExecutorError, match="rows of 65 tokens"):
        bucket(65, (64, 32, 48))


def test_at_most_half_of_what_is_computed_is_padding() -> None:
    assert list(DEFAULT_LENGTHS) == sorted(DEFAULT_LENGTHS)
    assert all(bucket(length, DEFAULT_LENGTHS) <= 1.5 * length for length in range(32, 4097))


def test_no_real_query_sees_a_padding_key_and_no_row_is_empty() -> None:
    mask = torch.ones(2, 1, 3, 3, dtype=torch.bool).tril()
    wide = padded(mask, "attention_mask", length=3, to=5)
    assert wide.shape == (2, 1, 5, 5)
    assert torch.equal(wide[..., :3, :3], mask)
    assert not wide[..., :3, 3:].any()
    assert wide[..., 3:, :].all()


def test_a_mask_of_numbers_hides_padding_better_than_it_hides_anything() -> None:
    lowest = torch.finfo(torch.float32).min
    mask = torch.full((1, 1, 3, 3), lowest)
    wide = padded(mask, "attention_mask", length=3, to=4)
    assert torch.equal(wide[..., :3, :3], mask)
    assert (wide[..., :3, 3] == float("-inf")).all()
    assert (wide[..., 3, :] == 0).all()


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("hidden", (2, 3, 8), (2, 5, 8)),
        ("position_ids", (1, 3), (1, 5)),
        ("attention_mask", (2, 3), (2, 5)),
        ("attention_mask", (2, 1, 1, 3), (2, 1, 1, 5)),
        ("attention_mask", (2, 3, 3), (2, 5, 5)),
        ("position_embeddings_0", (1, 3, 8), (1, 5, 8)),
        ("position_embeddings_0", (1, 3, 3), (1, 5, 3)),  # a head as wide as the sequence is long
        ("position_embeddings_0", (2, 4, 3, 8), (2, 4, 5, 8)),
        ("freqs", (3, 8), (5, 8)),
        ("alibi", (8, 1, 3), (8, 1, 5)),
        ("cache_position", (3,), (5,)),
        ("scale", (), ()),
        ("table", (7, 8), (7, 8)),
    ],
)
def test_dimensions_along_the_sequence_are_padded(
    name: str, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert padded(torch.ones(shape), name, length=3, to=5).shape == expected
