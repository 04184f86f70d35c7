"""The accelerator of a mixed pipeline: every rank uses the best device that its own host has."""

from typing import Any

import torch
from lightning.fabric.accelerators.registry import _AcceleratorRegistry
from lightning.fabric.utilities.types import _DEVICE
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator

from lightning_hybridop.accelerators.npu import NPUAccelerator
from lightning_hybridop.devices.jetson import board_power, gpu_load, jetson_model, unified_memory
from lightning_hybridop.planning.plan import Role


def default_role(device_type: str) -> Role:
    """Return the role of a stage on a device such as `"npu"`, `"cuda:1"` or `"cpu"`, where the plan names none."""
    return "zo" if device_type.partition(":")[0] == "npu" else "bp"


class HybridOPAccelerator(Accelerator):
    """Whatever this rank has, an NPU before a GPU before the CPU: registered as `accelerator="hybridop"`.

    Lightning's parallel devices are CPU devices on every rank, because Lightning broadcasts control tensors from the
    root device and Gloo, the one backend that all of these hosts share, moves CPU tensors. What a stage computes
    on is `compute_device`.
    """

    def __init__(self) -> None:
        self._current = torch.device("cpu")

    @staticmethod
    def compute_device(local_rank: int = 0) -> torch.device:
        """Return the device that rank `local_rank` of this host computes on; ranks beyond the devices share them."""
        npus = NPUAccelerator.auto_device_count()
        if npus:
            return NPUAccelerator.get_parallel_devices([local_rank % npus])[0]
        gpus = torch.cuda.device_count()
        return torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")

    def setup_device(self, device: torch.device) -> None:
        """Make `device` (of any type that `compute_device` returns) this process's current one."""
        _accelerator(device).setup_device(device)
        self._current = device

    def teardown(self) -> None:
        """Give cached device memory back."""
        _accelerator(self.compute_device()).teardown()

    def get_device_stats(self, device: _DEVICE) -> dict[str, Any]:
        """Return the statistics that the accelerator of `device`'s own type gives.

        Of the CPU, which is Lightning's root device in a pipeline, come those of this process's current device with them.
        On a Jetson `jetson_gpu_load` (of 1), `jetson_power` (W) and `jetson_memory_available` (bytes) come with them.
        """
        device = torch.device(device)
        stats = _accelerator(device).get_device_stats(device)
        if device.type == "cpu" and self._current.type != "cpu":
            stats |= self.get_device_stats(self._current)
        if device.type == "cuda" and jetson_model() is not None:
            memory = unified_memory()
            read = {
                "jetson_gpu_load": gpu_load(),
                "jetson_power": board_power(),
                "jetson_memory_available": memory and memory[0],
            }
            stats |= {name: value for name, value in read.items() if value is not None}
        return stats

    @staticmethod
    def parse_devices(devices: int | str) -> int:
        """Return the number of processes on this host: a positive count, or 1 for `"auto"`; else TypeError."""
        count = devices
        if isinstance(devices, str):
            text = devices.strip()
            count = 1 if text == "auto" else int(text) if text.isdecimal() else 0
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise TypeError(
                f"devices={devices!r} does not say how many processes to run, expected a positive integer or 'auto': "
                "which device a stage computes on belongs in the plan."
            )
        return count

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        """Return one CPU device per process."""
        return [torch.device("cpu")] * devices

    @staticmethod
    def auto_device_count() -> int:
        """Return 1: how many processes a pipeline needs is the plan's business, not the host's."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """Return True: every host has at least a CPU."""
        return True

    @staticmethod
    def name() -> str:
        """Return the name that the Trainer's `accelerator` argument takes."""
        return "hybridop"

    @classmethod
    def register_accelerators(cls, accelerator_registry: _AcceleratorRegistry) -> None:
        """Enter this class into Lightning's registry under its name."""
        accelerator_registry.register(cls.name(), cls, description="whatever this rank has: NPU, GPU or CPU")


def _accelerator(device: torch.device) -> Accelerator:
    """Return the accelerator of a device's type; CPUAccelerator refuses types that it does not know."""
    match device.type:
        case "npu":
            return NPUAccelerator()
        case "cuda":
            return CUDAAccelerator()
        case _:
            return CPUAccelerator()
