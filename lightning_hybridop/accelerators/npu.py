"""Lightning's accelerator interface for Ascend NPUs, over torch_npu, which is imported only when it is used."""

import importlib
import importlib.util
from types import ModuleType
from typing import Any

import torch
from lightning.fabric.accelerators.registry import _AcceleratorRegistry
from lightning.fabric.utilities.types import _DEVICE
from lightning.pytorch.accelerators import Accelerator

from lightning_hybridop.devices.npu_smi import npu_readings, reading_of


def npu_problem() -> str | None:
    """Return one sentence on why no NPU can be used here and what to do, or None when one can."""
    try:
        npu = load_npu()
    except (ModuleNotFoundError, RuntimeError) as error:
        return str(error)
    if not npu.is_available():
        return (
            "torch_npu is importable but found no Ascend NPU: check that `npu-smi info` lists one and that "
            "ASCEND_RT_VISIBLE_DEVICES does not hide it."
        )
    return None


def load_npu() -> ModuleType:
    """Import torch_npu and return its `npu` namespace, the counterpart of `torch.cuda`.

    Raises ModuleNotFoundError when torch_npu is not installed and RuntimeError when its import fails.
    """
    if importlib.util.find_spec("torch_npu") is None:
        raise ModuleNotFoundError(
            "torch_npu is not installed, expected it on a host with an Ascend NPU: run "
            "`pip install 'lightning-hybridop[npu]'` there, or choose accelerator='hybridop' or 'cpu'."
        )
    try:
        torch_npu = importlib.import_module("torch_npu")
    except Exception as error:
        # Without CANN, versions of torch_npu differ in what they raise: ImportError, OSError or RuntimeError.
        raise RuntimeError(
            f"torch_npu is installed but cannot be imported ({type(error).__name__}: {error}), expected Ascend's CANN "
            "libraries to be loadable: install the CANN toolkit that matches torch_npu and `source` its set_env.sh "
            "in this shell before you start Python."
        ) from error
    namespace: ModuleType = torch_npu.npu
    return namespace


class NPUAccelerator(Accelerator):
    """An Ascend NPU: registered with Lightning as `accelerator="npu"`.

    A pipeline's NPU stages get their role (`zo`) from `default_role`; the strategy passes the compute device to
    `setup_device` and keeps its own root device on the CPU.
    """

    def __init__(self) -> None:
        self._current: torch.device | None = None

    def setup_device(self, device: torch.device) -> None:
        """Make `device` this process's current NPU; ValueError when it is not an NPU."""
        if device.type != "npu":
            raise ValueError(
                f"NPUAccelerator got the device {device}, expected an NPU: pass strategy=HybridOPStrategy(...), or "
                "strategy=SingleDeviceStrategy(device='npu:0') outside a pipeline."
            )
        load_npu().set_device(device)
        self._current = device

    def teardown(self) -> None:
        """Give cached NPU memory back."""
        load_npu().empty_cache()

    def get_device_stats(self, device: _DEVICE) -> dict[str, Any]:
        """Return torch_npu's memory statistics of `device`, in bytes and counts, and what else can be read of it.

        That is `npu_memory_free` and `npu_memory_total` in bytes, `npu_utilization` in percent and, from `npu-smi info`,
        `npu_power` in watts, `npu_temperature` in degrees Celsius and `npu_cores` in percent; what cannot be read is left
        out. Asked for the CPU, Lightning's root device in a pipeline, it tells of the NPU that this process computes on.
        """
        npu = load_npu()
        if self._current is not None and torch.device(device).type != "npu":
            device = self._current
        stats: dict[str, Any] = _asked(npu, "memory_stats", device) or {}
        memory = _asked(npu, "mem_get_info", device)
        if memory is not None:
            stats |= {"npu_memory_free": memory[0], "npu_memory_total": memory[1]}
        reading = reading_of(torch.device(device).index, npu_readings())
        read = {
            "npu_utilization": _asked(npu, "utilization", device),
            "npu_power": reading and reading.power,
            "npu_temperature": reading and reading.temperature,
            "npu_cores": reading and reading.core_percent,
        }
        return {**stats, **{name: value for name, value in read.items() if value is not None}}

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """Return NPU indices: from a count (`2`, `"2"`), all (`-1`, `"auto"`), or a list (`[0, 1]`, `"0,1"`).

        Raises ValueError when the text is not understood, an NPU is named twice, or there are fewer NPUs than asked.
        """
        present = NPUAccelerator.auto_device_count()
        indices = _parse(devices, present)
        if not indices or len(set(indices)) < len(indices) or not set(indices) <= set(range(present)):
            raise ValueError(
                f"devices={devices!r} does not fit the {present} NPU(s) found here: pass a count from 1 to "
                f"{present}, a list of distinct indices below {present}, or 'auto'."
            )
        return indices

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        """Return one `npu` device per index."""
        load_npu()  # torch knows the device type "npu" only once torch_npu is imported
        return [torch.device("npu", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        """Return the number of NPUs that this process can see, 0 without torch_npu."""
        return 0 if npu_problem() else int(load_npu().device_count())

    @staticmethod
    def is_available() -> bool:
        """Return whether an NPU can be used; `npu_problem()` says why not."""
        return npu_problem() is None

    @staticmethod
    def name() -> str:
        """Return the name that the Trainer's `accelerator` argument takes."""
        return "npu"

    @classmethod
    def register_accelerators(cls, accelerator_registry: _AcceleratorRegistry) -> None:
        """Enter this class into Lightning's registry under its name."""
        accelerator_registry.register(cls.name(), cls, description="Ascend NPU through torch_npu")


def _asked(npu: ModuleType, name: str, device: _DEVICE) -> Any:
    """Return what a function of torch_npu says of a device; None where a version lacks it or the driver refuses."""
    try:
        return getattr(npu, name)(device)
    except Exception:  # statistics must not end a run
        return None


def _parse(devices: int | str | list[int], present: int) -> list[int]:
    """Return the indices that `devices` names, unchecked; an empty list when it is not understood."""
    if isinstance(devices, str):
        text = devices.strip()
        if text == "auto":
            devices = -1
        elif "," in text:
            parts = [part.strip() for part in text.split(",") if part.strip()]
            return [int(part) for part in parts] if all(part.isdecimal() for part in parts) else []
        else:
            devices = int(text) if text.removeprefix("-").isdecimal() else 0
    if isinstance(devices, int):
        return list(range(present if devices == -1 else devices))
    return list(devices)
