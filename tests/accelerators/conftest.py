"""Hosts with and without Ascend's software, played by modules in sys.modules and folders on sys.path."""

import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests on a host with NPUs last: torch cannot be told again that it has no device type "npu"."""
    items.sort(key=lambda item: "npu" in getattr(item, "fixturenames", ()))


def _npu_module(devices: int) -> ModuleType:
    module = ModuleType("torch_npu")
    module.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    module.npu = Mock(  # type: ignore[attr-defined]
        device_count=Mock(return_value=devices),
        is_available=Mock(return_value=devices > 0),
        memory_stats=Mock(return_value={"allocated_bytes.all.current": 7}),
        mem_get_info=Mock(return_value=(3, 4)),
        utilization=Mock(return_value=50),
    )
    return module


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A host with two NPUs; returns the namespace that takes the calls."""
    torch.utils.rename_privateuse1_backend("npu")  # what importing the real torch_npu does
    module = _npu_module(2)
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    namespace: Mock = module.npu
    return namespace


@pytest.fixture
def no_npu_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose torch_npu works and finds nothing."""
    monkeypatch.setitem(sys.modules, "torch_npu", _npu_module(0))


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without torch_npu."""
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torch_npu" else find(name, *rest)
    )


@pytest.fixture
def without_cann(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host where torch_npu is installed and Ascend's libraries are not loadable."""
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    message = "libhccl.so: cannot open shared object file"
    (tmp_path / "torch_npu.py").write_text(f"raise ImportError({message!r})\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
