"""The machine that this runs on: its devices, their names, and the memory that a process can have."""

import importlib
import importlib.util
import platform
from pathlib import Path
from typing import Any

import psutil
import torch

from lightning_hybridop.devices.jetson import jetson_model, unified_memory


class NoDeviceError(RuntimeError):
    """A device that this machine does not have; the message names it."""


def named_device(name: str) -> torch.device:
    """Return the device of a name such as `cpu`, `cuda:0` or `npu:0`.

    Raises:
        NoDeviceError: there is no such device here.
    """
    missing = NoDeviceError(
        f"device: there is no {name} on this machine; choose another, such as {best_device()}."
    )
    if name.partition(":")[0] not in ("cpu", "cuda", "npu"):
        raise missing
    if name.startswith("npu"):
        npu = torch_npu()  # torch does not know the type before
        if npu is None or not npu.is_available():
            raise missing
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise missing from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise missing
    return device


def best_device() -> torch.device:
    """Return the device that this machine computes with: an Ascend NPU, else a CUDA device, else the CPU."""
    npu = torch_npu()
    if npu is not None and npu.is_available():
        return torch.device("npu", 0)
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def is_forward_only(device: torch.device) -> bool:
    """Return whether a device runs only forward in HybridOP: Ascend NPUs do."""
    return device.type == "npu"


def device_name(device: torch.device) -> str:
    """Return what the machine calls a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "npu" and (npu := torch_npu()) is not None:
        return str(npu.get_device_name(device))
    cpus = Path("/proc/cpuinfo")
    if cpus.exists():
        for line in cpus.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def available_memory(device: torch.device) -> float:
    """Return the bytes that a process can have on a device; asks the driver's runtime, never NVML."""
    if device.type == "cuda":
        # A Jetson's GPU shares the memory that Linux gives away, page cache included, of which CUDA counts less as free.
        shared = unified_memory() if jetson_model() is not None else None
        return float(torch.cuda.mem_get_info(device)[0]) if shared is None else shared[0]
    if device.type == "npu" and (npu := torch_npu()) is not None:
        try:
            return float(npu.mem_get_info(device)[0])
        except (AttributeError, RuntimeError):  # older versions of torch_npu
            return float(npu.get_device_properties(device).total_memory)
    return float(psutil.virtual_memory().available)


def has_bfloat16(device: torch.device) -> bool:
    """Return whether a device computes in bfloat16: NPUs of the 310 series do not."""
    return device.type != "npu" or not device_name(device).startswith("Ascend310")


def device_count(device: torch.device) -> int:
    """Return how many devices of a type this machine has; of the CPU there is one."""
    if device.type == "cuda":
        return torch.cuda.device_count()
    if device.type == "npu" and (npu := torch_npu()) is not None:
        return int(npu.device_count())
    return 1


def torch_npu() -> Any | None:
    """Return torch_npu's counterpart of `torch.cuda`, None where it cannot be imported."""
    if importlib.util.find_spec("torch_npu") is None:
        return None
    try:
        return importlib.import_module("torch_npu").npu
    except Exception:  # without Ascend's libraries versions differ in what they raise
        return None


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "npu" and (npu := torch_npu()) is not None:
        npu.synchronize(device)
