"""Comparison of what two runs have."""

from typing import Any

import pytest


def assert_close(found: Any, expected: Any) -> None:
    """Compare nested values: numbers to 1e-6, everything else exactly."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_close(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-6, rel=1e-6)
    else:
        assert found == expected
