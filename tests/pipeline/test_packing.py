"""Batches survive being taken apart and put together again, whatever is nested in them."""

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hybridop.pipeline.batches import BatchError
from lightning_hybridop.pipeline.packing import pack, unpack

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64)

tensors = st.builds(
    lambda shape, dtype, seed: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(
        dtype
    ),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.sampled_from(DTYPES),
    st.integers(0, 9),
)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
nested = st.recursive(
    tensors | plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and found.shape == expected.shape and found.equal(expected)
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
        pairs = zip(found, expected, strict=True)
        return type(found) is type(expected) and all(same(ours, theirs) for ours, theirs in pairs)
    return bool(found == expected and type(found) is type(expected))


@given(nested)
def test_what_is_packed_comes_back(value: Any) -> None:
    assert same(unpack(pack(value)), value)


def test_a_view_is_packed_without_what_it_is_a_view_of() -> None:
    whole = torch.arange(10_000.0).view(100, 100)
    packed = pack(whole[:, 3])
    assert len(packed) < 1000
    assert unpack(packed).equal(whole[:, 3])


def test_any_mapping_comes_back_as_a_dict() -> None:
    assert unpack(pack(UserDict(a=1))) == {"a": 1}


class Pair(NamedTuple):
    first: int
    second: int


@pytest.mark.parametrize("value", [{1, 2}, Pair(1, 2), object(), b"bytes", {"a": [complex(1, 2)]}])
def test_what_others_may_not_know_is_refused_by_name(value: Any) -> None:
    with pytest.raises(
        BatchError, match=r"A \w+ cannot be sent to other processes; use dicts, lists and tuples"
    ):
        pack(value)
