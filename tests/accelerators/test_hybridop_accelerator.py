from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry

import lightning_hybridop
from lightning_hybridop.accelerators import HybridOPAccelerator, NPUAccelerator, default_role, register
from lightning_hybridop.devices.host import available_memory


def test_npu_stages_estimate_and_all_others_back_propagate() -> None:
    assert [default_role(device) for device in ("npu", "npu:3", "cuda", "cuda:0", "cpu")] == [
        "zo",
        "zo",
        "bp",
        "bp",
        "bp",
    ]


@pytest.mark.usefixtures("npu")
def test_an_npu_comes_first_and_ranks_share_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    computed = [HybridOPAccelerator.compute_device(rank) for rank in range(3)]
    assert computed == [torch.device("npu", 0), torch.device("npu", 1), torch.device("npu", 0)]


@pytest.mark.usefixtures("without_cann")
def test_an_unusable_npu_falls_back_to_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    computed = [HybridOPAccelerator.compute_device(rank) for rank in range(3)]
    assert computed == [torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cuda", 0)]


@pytest.mark.usefixtures("not_installed")
def test_without_either_it_computes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert HybridOPAccelerator.compute_device(5) == torch.device("cpu")


def test_setup_statistics_and_teardown_go_to_the_device_s_own_accelerator(npu: Mock) -> None:
    accelerator = HybridOPAccelerator()
    accelerator.setup_device(torch.device("cpu"))
    npu.set_device.assert_not_called()
    accelerator.setup_device(torch.device("npu", 1))
    npu.set_device.assert_called_once_with(torch.device("npu", 1))
    assert accelerator.get_device_stats(torch.device("npu", 1))["allocated_bytes.all.current"] == 7
    # What Lightning's monitor asks for in a pipeline.
    stats = accelerator.get_device_stats(torch.device("cpu"))
    assert "cpu_percent" in stats
    assert stats["allocated_bytes.all.current"] == 7
    accelerator.setup_device(torch.device("cpu"))
    assert "allocated_bytes.all.current" not in accelerator.get_device_stats(torch.device("cpu"))
    accelerator.teardown()
    npu.empty_cache.assert_called_once_with()


@pytest.mark.usefixtures("npu")
def test_lightning_s_devices_are_cpu_devices_even_beside_an_npu() -> None:
    assert HybridOPAccelerator.is_available()
    assert HybridOPAccelerator.auto_device_count() == 1
    assert HybridOPAccelerator.get_parallel_devices(2) == [torch.device("cpu")] * 2


@pytest.mark.parametrize(("devices", "count"), [(3, 3), ("2", 2), ("auto", 1)])
def test_devices_are_a_number_of_processes(devices: int | str, count: int) -> None:
    assert HybridOPAccelerator.parse_devices(devices) == count


@pytest.mark.parametrize("devices", [0, -1, "x", "", True, [0, 1], 1.0])
def test_anything_else_is_refused(devices: object) -> None:
    with pytest.raises(TypeError, match="expected a positive integer or 'auto'"):
        HybridOPAccelerator.parse_devices(devices)  # type: ignore[arg-type]


def test_registering_twice_leaves_one_entry_each() -> None:
    register()
    before = dict(AcceleratorRegistry)
    register()
    assert dict(AcceleratorRegistry) == before
    assert isinstance(AcceleratorRegistry.get("npu"), NPUAccelerator)
    assert isinstance(AcceleratorRegistry.get("hybridop"), HybridOPAccelerator)


def test_the_trainer_finds_it_by_name() -> None:
    register()
    trainer = Trainer(accelerator="hybridop", devices="auto", logger=False, enable_checkpointing=False)
    assert isinstance(trainer.accelerator, HybridOPAccelerator)
    assert trainer.strategy.root_device == torch.device("cpu")


def test_a_jetson_s_gpu_has_its_rails_load_and_memory_beside_torch_s_statistics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = "lightning_hybridop.accelerators.hybridop"
    monkeypatch.setattr(f"{module}.CUDAAccelerator.get_device_stats", lambda *_: {"allocated": 1})
    gpu = torch.device("cuda", 0)
    assert HybridOPAccelerator().get_device_stats(gpu) == {"allocated": 1}
    monkeypatch.setattr(f"{module}.jetson_model", lambda: "NVIDIA Jetson Orin NX")
    monkeypatch.setattr(f"{module}.gpu_load", lambda: 0.25)
    monkeypatch.setattr(f"{module}.board_power", lambda: None)
    monkeypatch.setattr(f"{module}.unified_memory", lambda: (7.0, 8.0))
    assert HybridOPAccelerator().get_device_stats(gpu) == {
        "allocated": 1,
        "jetson_gpu_load": 0.25,
        "jetson_memory_available": 7.0,
    }
    monkeypatch.setattr("lightning_hybridop.devices.host.jetson_model", lambda: "NVIDIA Jetson Orin NX")
    monkeypatch.setattr("lightning_hybridop.devices.host.unified_memory", lambda: (7.0, 8.0))
    assert available_memory(gpu) == 7.0


def test_nothing_of_the_package_asks_nvml() -> None:
    package = Path(lightning_hybridop.__file__).parent
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for asked in ("pynvml", "cuda.utilization", "cuda.power_draw", "cuda.temperature", "nvidia-smi"):
            assert asked not in text, path
