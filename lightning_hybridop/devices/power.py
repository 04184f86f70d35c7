"""What a host uses, in joules, from the counters that it has: RAPL, the rails of a Jetson, the chips of npu-smi."""

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lightning_hybridop.devices.jetson import ROOT, board_power, jetson_model
from lightning_hybridop.devices.npu_smi import npu_readings

RAIL_SECONDS = 0.1
"""How often the rails of a Jetson are read."""

NPU_SECONDS = 1.0
"""How often `npu-smi` is started."""


class Meter(Protocol):
    """Counts the joules that something uses."""

    def joules(self) -> float:
        """Return the joules since the meter was made."""

    def stop(self) -> None:
        """End what runs beside the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMeter:
    """A host's meters and what they read.

    `covers` are the types of devices, as torch calls them, whose own consumption the meters include. `problem` says in one
    sentence why counters that the host may have are not read; None where all are that it has.
    """

    meters: tuple[Meter, ...]
    source: str
    covers: frozenset[str]
    problem: str | None = None

    def joules(self) -> float:
        """Return the joules that the host used since its meters were made."""
        return sum(meter.joules() for meter in self.meters)

    def stop(self) -> None:
        """End what runs beside the program."""
        for meter in self.meters:
            meter.stop()


def machine_identity(root: Path = ROOT) -> str:
    """Return what all processes on one machine have in common and no two machines: its boot, else its name."""
    try:
        return (root / "proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def host_meter(root: Path = ROOT) -> HostMeter:
    """Return meters for all that this host's counters tell.

    They count the whole host, or chip: what else runs there counts as well. A Jetson's rails feed all of its module, RAPL
    counts processors and their memory, and npu-smi the NPUs, if it has a power for each of them.
    """
    meters: list[Meter] = []
    sources: list[str] = []
    covers: set[str] = set()
    problem = None
    if jetson_model(root) is not None and board_power(root) is not None:
        meters.append(SampledMeter(lambda: board_power(root), period=RAIL_SECONDS))
        sources.append("INA3221 rails")
        covers |= {"cpu", "cuda"}
    if _npu_power() is not None:
        meters.append(SampledMeter(_npu_power, period=NPU_SECONDS))
        sources.append("npu-smi")
        covers.add("npu")
    zones = _rapl_zones(root)
    try:
        counters = [RaplCounter(zone) for zone in zones]
    except PermissionError:
        problem = (
            "This host's energy counters (RAPL) may be read by root only; make "
            "/sys/class/powercap/intel-rapl:*/energy_uj readable, or name the device's profile."
        )
    except (OSError, ValueError):
        problem = "This host's energy counters (RAPL) cannot be read."
    else:
        meters.extend(counters)
        if counters:
            sources.append("RAPL")
            covers.add("cpu")
    if not meters and problem is None:
        problem = (
            "This host has no counter of energy: no RAPL, no rails of a Jetson, no power in npu-smi's table."
        )
    return HostMeter(
        meters=tuple(meters), source=" + ".join(sources), covers=frozenset(covers), problem=problem
    )


class RaplCounter:
    """A zone of Linux's powercap: a counter in microjoules that starts again at `max_energy_range_uj`.

    It must be read at least once per turn, which takes minutes or more.
    """

    def __init__(self, zone: Path) -> None:
        self._energy = zone / "energy_uj"
        self._range = int((zone / "max_energy_range_uj").read_text())
        self._last = self._read()
        self._sum = 0

    def joules(self) -> float:
        """Return the joules since the counter was made."""
        now = self._read()
        self._sum += now - self._last if now >= self._last else now - self._last + self._range
        self._last = now
        return self._sum / 1e6

    def stop(self) -> None:
        """There is nothing to end."""

    def _read(self) -> int:
        return int(self._energy.read_text())


class SampledMeter:
    """Integrates a power that a thread reads every `period` seconds, by the trapezoidal rule.

    What cannot be read is taken to be what was read last.
    """

    def __init__(
        self, power: Callable[[], float | None], *, period: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._power = power
        self._clock = clock
        self._lock = threading.Lock()
        self._joules = 0.0
        self._watts = power() or 0.0
        self._since = clock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(period,), daemon=True, name="hybridop-power")
        self._thread.start()

    def sample(self) -> None:
        """Read the power once more."""
        read = self._power()
        with self._lock:
            watts = self._watts if read is None else read
            now = self._clock()
            self._joules += (now - self._since) * (watts + self._watts) / 2
            self._watts, self._since = watts, now

    def joules(self) -> float:
        """Return the joules since the meter was made, at the power read last since that reading."""
        with self._lock:
            return self._joules + (self._clock() - self._since) * self._watts

    def stop(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join(timeout=10.0)

    def _run(self, period: float) -> None:
        while not self._over.wait(period):
            self.sample()


def _npu_power() -> float | None:
    """Return the watts of all NPUs; None where that of one is unknown."""
    powers = [reading.power for reading in npu_readings()]
    known = [power for power in powers if power is not None]
    return sum(known) if known and len(known) == len(powers) else None


def _rapl_zones(root: Path) -> list[Path]:
    """Return the zones that add up to a machine's processors and memory: packages, and DRAM inside them."""
    zones = []
    for zone in sorted((root / "sys/class/powercap").glob("intel-rapl:*")):
        try:
            name = (zone / "name").read_text().strip()
        except OSError:
            continue
        if name.startswith("package") or name == "dram":
            zones.append(zone)
    return zones
