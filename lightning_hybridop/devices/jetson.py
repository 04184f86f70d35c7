"""NVIDIA Jetson boards, read through Linux's own files: they have no NVML.

Every function takes the folder that stands for `/`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")

_GPU_LOAD = (
    "sys/devices/gpu.0/load",
    "sys/devices/platform/gpu.0/load",
    "sys/devices/platform/17000000.gpu/load",
    "sys/devices/platform/bus@0/17000000.gpu/load",
    "sys/devices/platform/17000000.ga10b/load",
    "sys/devices/platform/host1x/17000000.gv11b/load",
    "sys/devices/57000000.gpu/load",
)

# Names of the rail that feeds the whole module. Boards without one (AGX) have rails that add up to it.
_WHOLE = ("VDD_IN", "POM_5V_IN", "VIN")

# Not connected, or fed from another rail that is measured as well.
_NOT_ADDED = ("NC", "VDDQ_VDD2_1V8AO")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rail:
    """A supply rail that an INA3221 measures; power in watts."""

    name: str
    power: float


def jetson_model(root: Path = ROOT) -> str | None:
    """Return what the board calls itself, such as `NVIDIA Jetson Orin Nano Developer Kit`; None elsewhere."""
    model = _text(root / "proc/device-tree/model")
    if model is not None and "jetson" in model.lower():
        return model
    return "NVIDIA Jetson" if (root / "etc/nv_tegra_release").is_file() else None


def rails(root: Path = ROOT) -> tuple[Rail, ...]:
    """Return the rails of all INA3221 monitors; empty where there is none that may be read."""
    chips = {path.resolve() for path in (root / "sys/bus/i2c/drivers").glob("ina3221*/*/") if path.is_dir()}
    return tuple(rail for chip in sorted(chips) for rail in (*_hwmon_rails(chip), *_iio_rails(chip)))


def board_power(root: Path = ROOT) -> float | None:
    """Return the watts of the whole module: of the rail that feeds it, else the sum of its rails.

    None without any, and for 0 W, which no board that runs takes.
    """
    found = rails(root)
    for rail in found:
        if rail.name in _WHOLE:
            return rail.power or None
    added = [rail.power for rail in found if rail.name not in _NOT_ADDED]
    return sum(added) or None


def gpu_load(root: Path = ROOT) -> float | None:
    """Return the share of time that the GPU is busy, as a fraction of 1; None where no file tells."""
    for place in _GPU_LOAD:
        load = _number(root / place)
        if load is not None:
            return min(1.0, load / 1000.0)
    return None


def unified_memory(root: Path = ROOT) -> tuple[float, float] | None:
    """Return the bytes that are available, and all: CPU and GPU share them. None where they cannot be read."""
    text = _text(root / "proc/meminfo") or ""
    sizes = {
        name: 1024.0 * int(kib) for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, flags=re.MULTILINE)
    }
    if "MemAvailable" not in sizes or "MemTotal" not in sizes:
        return None
    return sizes["MemAvailable"], sizes["MemTotal"]


def _hwmon_rails(chip: Path) -> Iterator[Rail]:
    """The driver of Linux itself: millivolts and milliamperes of each labelled channel."""
    for folder in sorted(chip.glob("hwmon/hwmon*")):
        for channel in (1, 2, 3):  # the further ones are sums and shunts
            name = _text(folder / f"in{channel}_label")
            voltage = _number(folder / f"in{channel}_input")
            current = _number(folder / f"curr{channel}_input")
            if name is not None and voltage is not None and current is not None:
                yield Rail(name=name, power=voltage * current / 1e6)


def _iio_rails(chip: Path) -> Iterator[Rail]:
    """NVIDIA's driver of JetPack 4: milliwatts."""
    folders = {
        folder.resolve() for pattern in ("iio_device*", "iio:device*") for folder in chip.glob(pattern)
    }
    for folder in sorted(folders):
        for channel in (0, 1, 2):
            name = _text(folder / f"rail_name_{channel}")
            power = _number(folder / f"in_power{channel}_input")
            if power is None:
                power = _number(folder / f"power{channel}_input")
            if name is not None and power is not None:
                yield Rail(name=name, power=power / 1e3)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip("\x00 \n\t") or None
    except OSError:
        return None


def _number(path: Path) -> float | None:
    text = _text(path)
    return float(text) if text is not None and re.fullmatch(r"-?\d+(\.\d+)?", text) else None
