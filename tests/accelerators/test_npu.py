import importlib.util
import sys
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_hybridop.accelerators import NPUAccelerator, npu_problem, register
from lightning_hybridop.accelerators import npu as npu_module
from lightning_hybridop.accelerators.npu import load_npu
from lightning_hybridop.devices.host import available_memory, has_bfloat16
from lightning_hybridop.devices.npu_smi import NpuReading


@pytest.mark.usefixtures("not_installed")
def test_without_torch_npu_the_extra_is_named() -> None:
    problem = npu_problem()
    assert problem is not None
    assert "not installed" in problem and "lightning-hybridop[npu]" in problem
    assert not NPUAccelerator.is_available()
    assert NPUAccelerator.auto_device_count() == 0
    with pytest.raises(ModuleNotFoundError, match="not installed"):
        NPUAccelerator().setup_device(Mock(type="npu"))


@pytest.mark.usefixtures("without_cann")
def test_without_cann_the_environment_script_is_named() -> None:
    problem = npu_problem()
    assert problem is not None
    assert "CANN" in problem and "set_env.sh" in problem and "libhccl.so" in problem
    assert not NPUAccelerator.is_available()
    assert NPUAccelerator.auto_device_count() == 0
    with pytest.raises(RuntimeError, match="CANN") as raised:
        load_npu()
    assert isinstance(raised.value.__cause__, ImportError)


@pytest.mark.usefixtures("no_npu_found")
def test_without_a_device_the_driver_tool_is_named() -> None:
    problem = npu_problem()
    assert problem is not None and "npu-smi info" in problem
    assert not NPUAccelerator.is_available()


def test_with_npus_it_is_available_and_uses_torch_npu(npu: Mock) -> None:
    assert npu_problem() is None
    assert NPUAccelerator.is_available()
    assert NPUAccelerator.auto_device_count() == 2
    device = torch.device("npu", 1)
    accelerator = NPUAccelerator()
    accelerator.setup_device(device)
    npu.set_device.assert_called_once_with(device)
    assert accelerator.get_device_stats(device)["allocated_bytes.all.current"] == 7
    npu.memory_stats.assert_called_once_with(device)
    accelerator.teardown()
    npu.empty_cache.assert_called_once_with()


def test_statistics_hold_what_torch_npu_and_the_driver_tool_say(
    npu: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = tuple(
        NpuReading(
            chip=chip,
            name="310B4",
            health="OK",
            power=10.5 + chip,
            temperature=60.0,
            core_percent=None,
            memory_used=1.0,
            memory_total=2.0,
        )
        for chip in range(2)
    )
    monkeypatch.setattr(npu_module, "npu_readings", lambda: readings)
    accelerator = NPUAccelerator()
    accelerator.setup_device(torch.device("npu", 1))
    # Lightning's monitor asks for the root device, which is the CPU in a pipeline.
    asked = [accelerator.get_device_stats(device) for device in (torch.device("npu", 1), torch.device("cpu"))]
    assert asked[0] == {
        "allocated_bytes.all.current": 7,
        "npu_memory_free": 3,
        "npu_memory_total": 4,
        "npu_utilization": 50,
        "npu_power": 11.5,
        "npu_temperature": 60.0,
    }
    assert asked[1] == asked[0]


def test_statistics_that_cannot_be_read_are_left_out(npu: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu_module, "npu_readings", lambda: ())
    npu.memory_stats.side_effect = RuntimeError("driver")
    npu.utilization.side_effect = RuntimeError("driver")
    del npu.mem_get_info
    assert NPUAccelerator().get_device_stats(torch.device("npu", 0)) == {}


def test_the_memory_of_an_npu_is_what_is_free(npu: Mock) -> None:
    assert available_memory(torch.device("npu", 0)) == 3.0
    del npu.mem_get_info
    npu.get_device_properties.return_value.total_memory = 4
    assert available_memory(torch.device("npu", 0)) == 4.0


@pytest.mark.parametrize(
    ("name", "expected"), [("Ascend310B4", False), ("Ascend310P3", False), ("Ascend910B3", True)]
)
def test_npus_of_the_310_series_have_no_bfloat16(npu: Mock, name: str, expected: bool) -> None:
    npu.get_device_name.return_value = name
    assert has_bfloat16(torch.device("npu", 0)) is expected
    assert has_bfloat16(torch.device("cpu"))


@pytest.mark.usefixtures("npu")
def test_a_cpu_device_is_refused() -> None:
    with pytest.raises(ValueError, match="expected an NPU"):
        NPUAccelerator().setup_device(torch.device("cpu"))


@pytest.mark.usefixtures("npu")
@pytest.mark.parametrize(
    ("devices", "indices"),
    [
        (1, [0]),
        (2, [0, 1]),
        (-1, [0, 1]),
        ("auto", [0, 1]),
        ("-1", [0, 1]),
        ("1", [0]),
        ("1,", [1]),
        ("0, 1", [0, 1]),
        ([1], [1]),
    ],
)
def test_devices_are_counts_lists_or_all(devices: int | str | list[int], indices: list[int]) -> None:
    assert NPUAccelerator.parse_devices(devices) == indices
    assert NPUAccelerator.get_parallel_devices(indices) == [torch.device("npu", index) for index in indices]


@pytest.mark.usefixtures("npu")
@pytest.mark.parametrize("devices", [0, 3, -2, "", "x", "0,x", "--1", [2], [-1], [0, 0], []])
def test_devices_that_do_not_fit_are_refused(devices: int | str | list[int]) -> None:
    with pytest.raises(ValueError, match=r"does not fit the 2 NPU\(s\)"):
        NPUAccelerator.parse_devices(devices)


@pytest.mark.usefixtures("npu")
def test_the_trainer_finds_it_by_name() -> None:
    register()
    trainer = Trainer(accelerator="npu", devices=2, logger=False, enable_checkpointing=False)
    assert isinstance(trainer.accelerator, NPUAccelerator)
    assert trainer._accelerator_connector._parallel_devices == [
        torch.device("npu", 0),
        torch.device("npu", 1),
    ]


def test_loading_the_module_does_not_import_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trap:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            assert name != "torch_npu", "torch_npu was imported"

    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Trap, *sys.meta_path])
    spec = importlib.util.spec_from_file_location("freshly_loaded_npu", npu_module.__file__)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    with pytest.raises(AssertionError, match="torch_npu was imported"):
        load_npu()
