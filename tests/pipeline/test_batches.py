import dataclasses
from collections import UserDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import BatchEncoding

from lightning_hybridop.pipeline.batches import (
    BatchError,
    fingerprint,
    join_outputs,
    label_count,
    row_count,
    shares,
    split_rows,
    take_rows,
    tensors,
    token_shape,
)

ROWS = st.integers(min_value=1, max_value=12)
PARTS = st.integers(min_value=1, max_value=7)


class Pair(NamedTuple):
    """A batch as a named tuple."""

    left: Tensor
    right: Any


@dataclasses.dataclass(frozen=True)
class Record:
    """A batch as a dataclass."""

    tokens: Tensor
    name: str


def column(rows: int, length: int = 3) -> Tensor:
    return torch.arange(rows * length).reshape(rows, length)


# Every kind of batch with `rows` rows.
BATCHES = {
    "tensor": lambda rows: column(rows),
    "dict": lambda rows: {"input_ids": column(rows), "labels": column(rows, 1)[:, 0]},
    "nested dict": lambda rows: {"text": {"input_ids": column(rows)}, "weights": column(rows, 1).float()},
    "tuple": lambda rows: (column(rows), column(rows, 2)),
    "list": lambda rows: [column(rows), column(rows, 2)],
    "namedtuple": lambda rows: Pair(column(rows), {"labels": column(rows, 1)}),
    "dataclass": lambda rows: Record(column(rows), "kept"),
    "BatchEncoding": lambda rows: BatchEncoding({"input_ids": column(rows), "labels": column(rows, 2)}),
    "UserDict": lambda rows: UserDict(input_ids=column(rows)),
    "strings": lambda rows: {"input_ids": column(rows), "texts": [f"row {row}" for row in range(rows)]},
    "what has no rows": lambda rows: {
        "input_ids": column(rows),
        "temperature": 0.5,
        "scale": torch.tensor(2.0),
    },
}


def concatenated(parts: list[Any]) -> Any:
    """Put micro-batches together again: the independent inverse of slicing."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts) if first.ndim else first
    if isinstance(first, (dict, UserDict)):
        return type(first)({key: concatenated([part[key] for part in parts]) for key in first})
    if dataclasses.is_dataclass(first):
        names = [field.name for field in dataclasses.fields(first)]
        return type(first)(*(concatenated([getattr(part, name) for part in parts]) for name in names))
    if isinstance(first, list) and isinstance(first[0], str):
        return [text for part in parts for text in part]
    if isinstance(first, (list, tuple)):
        items = [concatenated([part[i] for part in parts]) for i in range(len(first))]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return first


def equal(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, (dict, UserDict)):
        return list(left) == list(right) and all(equal(left[key], right[key]) for key in left)
    if dataclasses.is_dataclass(left):
        return equal(vars(left), vars(right))
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right)


@pytest.mark.parametrize("kind", BATCHES)
@settings(max_examples=30, deadline=None)
@given(rows=ROWS, parts=PARTS)
def test_micro_batches_put_together_are_the_mini_batch(kind: str, rows: int, parts: int) -> None:
    batch = BATCHES[kind](rows)

    micro_batches = split_rows(batch, parts)

    sizes = [row_count(part) for part in micro_batches]
    assert len(sizes) == min(parts, rows)
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert equal(concatenated(micro_batches), batch)


def test_a_matrix_as_long_as_wide_is_sliced_by_rows_only() -> None:
    first, second = split_rows({"input_ids": torch.arange(16).reshape(4, 4)}, 2)

    assert first["input_ids"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert second["input_ids"].tolist() == [[8, 9, 10, 11], [12, 13, 14, 15]]


def test_sequence_of_as_many_tensors_as_rows_is_not_taken_for_rows() -> None:
    batch = (column(2), column(2))

    assert equal(take_rows(batch, 2, 0, 1), (column(2)[:1], column(2)[:1]))


def test_batch_without_rows_is_refused() -> None:
    with pytest.raises(BatchError, match="A batch of type dict holds no tensor with rows"):
        split_rows({"texts": ["a", "b"], "scale": torch.tensor(1.0)}, 2)
    with pytest.raises(BatchError, match="a batch of 0 rows"):
        split_rows({"input_ids": torch.empty(0, 3)}, 2)


def test_tensors_of_a_nested_batch_come_in_order() -> None:
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)

    assert [
        len(tensor) for tensor in tensors({"a": [one, (two,)], "b": "text", "c": Record(three, "x")})
    ] == [1, 2, 3]


# Weights.


def labels_of(*counts: int, length: int = 32) -> Tensor:
    """Return labels whose rows hold these numbers of label tokens, at their end."""
    labels = torch.full((len(counts), length), -100)
    for row, count in enumerate(counts):
        labels[row, length - count :] = 5
    return labels


@pytest.mark.parametrize("shifted", [True, False])
def test_weight_is_the_share_of_label_tokens(shifted: bool) -> None:
    micro_batches = split_rows({"labels": labels_of(1, 1, 1, 30)}, 4)

    counts = [label_count(part, shifted=shifted) for part in micro_batches]

    assert counts == [1.0, 1.0, 1.0, 30.0]
    assert shares(counts) == [1 / 33, 1 / 33, 1 / 33, 30 / 33]


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize("shifted", [True, False])
def test_weighted_losses_are_the_mini_batchs_loss(parts: int, shifted: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 32, 9, generator=generator, dtype=torch.float64)
    # The third row starts with a label, which a shifted loss does not see.
    labels = labels_of(1, 3, 32, 30).clamp(max=8)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        if shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    micro_batches = split_rows({"logits": logits, "labels": labels}, parts)
    weights = shares([label_count(part, shifted=shifted) for part in micro_batches])
    weighted = sum(
        weight * loss(part["logits"], part["labels"])
        for weight, part in zip(weights, micro_batches, strict=True)
    )

    assert weighted == pytest.approx(float(loss(logits, labels)), abs=1e-12)


def test_first_label_of_a_row_counts_only_without_shift() -> None:
    batch = {"labels": torch.tensor([[7, -100, -100], [7, 7, -100]])}

    assert label_count(batch, shifted=True) == 1.0
    assert label_count(batch, shifted=False) == 3.0


def test_labels_of_rows_are_not_shifted() -> None:
    assert label_count({"labels": torch.tensor([0, 3, -100])}, shifted=True) == 2.0


def test_without_labels_rows_count() -> None:
    assert label_count({"input_ids": column(5)}, shifted=True) == 5.0
    assert label_count((column(3), column(3)), shifted=True) == 3.0


def test_all_masked_micro_batches_weigh_nothing() -> None:
    counts = [label_count({"labels": labels_of(count)}, shifted=True) for count in (0, 4, 0)]

    assert shares(counts) == [0.0, 1.0, 0.0]
    assert shares([0.0, 0.0]) == [0.0, 0.0]


# The shape of the hidden state.


def test_token_shape_is_that_of_the_tokens() -> None:
    assert token_shape({"pixels": torch.zeros(2, 3, 4), "input_ids": column(5, 7)}) == (5, 7)
    assert token_shape({"inputs_embeds": torch.zeros(2, 3, 4)}) == (2, 3)
    assert token_shape((torch.zeros(2, 9), column(2, 3))) == (2, 3)


def test_batch_without_tokens_is_refused() -> None:
    with pytest.raises(BatchError, match="holds no `input_ids` and no other matrix of token numbers"):
        token_shape({"features": torch.zeros(2, 3), "labels": torch.zeros(2, dtype=torch.long)})


# The fingerprint.


def test_fingerprint_is_a_function_of_the_content() -> None:
    batch = BATCHES["nested dict"](4)

    assert fingerprint(batch) == fingerprint(BATCHES["nested dict"](4))
    assert 0 <= fingerprint(batch) < 2**32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_fingerprint_sees_every_value(dtype: torch.dtype) -> None:
    batch = torch.zeros(3, 4, dtype=dtype)
    seen = {fingerprint(batch)}
    for position in range(batch.numel()):
        changed = batch.clone()
        changed.view(-1)[position] = 1
        seen.add(fingerprint(changed))

    assert len(seen) == 1 + batch.numel()


def test_fingerprint_sees_shape_dtype_and_order() -> None:
    zeros = torch.zeros(2, 6, dtype=torch.int32)
    batches = [
        zeros,
        zeros.reshape(6, 2),
        zeros.reshape(12),
        zeros.float(),
        zeros[:1],
        [zeros, zeros + 1],
        [zeros + 1, zeros],
        torch.zeros(2, 6, dtype=torch.bfloat16),
        torch.zeros(2, 6, dtype=torch.float16),
    ]

    assert len({fingerprint(batch) for batch in batches}) == len(batches)


def test_fingerprint_does_not_depend_on_memory_layout() -> None:
    matrix = column(3, 4)

    assert fingerprint(matrix.t().contiguous().t()) == fingerprint(matrix)


def test_fingerprint_takes_scalars_and_empty_tensors() -> None:
    assert fingerprint({"scale": torch.tensor(2.0)}) != fingerprint({"scale": torch.tensor(3.0)})
    assert fingerprint(torch.empty(0, 3)) != fingerprint(torch.empty(0, 4))


def test_a_mapping_keeps_its_type() -> None:
    batch: defaultdict[str, torch.Tensor] = defaultdict(
        lambda: torch.zeros(0), input_ids=torch.arange(6).view(3, 2)
    )

    first, second = split_rows(batch, 2)

    assert type(first) is type(second) is defaultdict
    assert first["input_ids"].tolist() == [[0, 1], [2, 3]]
    assert second["input_ids"].tolist() == [[4, 5]]
    assert len(batch["input_ids"]) == 3


# What micro-batches returned.


def test_outputs_of_micro_batches_are_joined_by_rows() -> None:
    first, second = torch.arange(4.0).view(2, 2), torch.arange(2.0).view(1, 2)
    rows = torch.cat([first, second])
    assert join_outputs([first, second], [0.5, 0.5]).equal(rows)
    joined = join_outputs(
        [{"logits": first, "words": ["a", "b"]}, {"logits": second, "words": ["c"]}], [0.5, 0.5]
    )
    assert joined["logits"].equal(rows)
    assert joined["words"] == ["a", "b", "c"]
    assert join_outputs([["a", "b"], ["c"]], [0.5, 0.5]) == ["a", "b", "c"]
    assert join_outputs([None, None], [0.5, 0.5]) is None
    tensor, words = join_outputs([(first, ["a", "b"]), (second, ["c"])], [0.5, 0.5])
    assert tensor.equal(rows)
    assert words == ["a", "b", "c"]
    pair = join_outputs([Pair(first, first), Pair(second, second)], [0.5, 0.5])
    assert isinstance(pair, Pair)
    assert pair[1].equal(rows)


def test_numbers_of_micro_batches_are_averaged_as_their_loss_is() -> None:
    assert join_outputs([torch.tensor(1.0), torch.tensor(5.0)], [0.75, 0.25]) == torch.tensor(2.0)
    assert join_outputs([1.0, 5.0], [0.75, 0.25]) == 2.0
    assert join_outputs([1.0, float("nan")], [1.0, 0.0]) == 1.0


def test_outputs_that_fit_nowhere_stay_apart() -> None:
    short, long = torch.zeros(1, 2), torch.zeros(1, 3)
    found = join_outputs([short, long], [0.5, 0.5])
    assert found[0] is short
    assert found[1] is long
    assert join_outputs(["a", "b"], [0.5, 0.5]) == ["a", "b"]
    assert join_outputs(["a"], [1.0]) == "a"
