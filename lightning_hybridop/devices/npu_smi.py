"""What Ascend's driver tool says of NPUs: `npu-smi info`, read as text; nothing here ever fails a run."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

_PLACES = ("/usr/local/sbin", "/usr/local/bin", "/usr/local/Ascend/driver/tools")

_HEALTH = ("OK", "Warning", "Alarm", "Critical", "UNKNOWN")


@dataclass(frozen=True, slots=True, kw_only=True)
class NpuReading:
    """One chip's line of `npu-smi info`: watts, degrees Celsius, percent of its cores, MB; None where it says NA.

    `power` is None for 0 W too, which boards without a sensor show. `chip` counts the chips from 0 in the order of the
    table.
    """

    chip: int
    name: str
    health: str
    power: float | None
    temperature: float | None
    core_percent: float | None
    memory_used: float | None
    memory_total: float | None


def npu_readings(*, patience: float = 5.0) -> tuple[NpuReading, ...]:
    """Ask `npu-smi info`, for at most `patience` seconds; empty without the tool, or where it fails or hangs."""
    tool = shutil.which("npu-smi") or shutil.which("npu-smi", path=os.pathsep.join(_PLACES))
    if tool is None:
        return ()
    try:
        answer = subprocess.run(
            [tool, "info"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=patience,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_npu_smi(answer.stdout.decode("utf-8", errors="replace"))


def reading_of(index: int | None, readings: tuple[NpuReading, ...]) -> NpuReading | None:
    """Return the reading of torch's device `npu:index`; ASCEND_RT_VISIBLE_DEVICES says which chips torch counts."""
    place = index or 0
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "").strip()
    if visible:
        chips = [part.strip() for part in visible.split(",")]
        if place >= len(chips) or not chips[place].isdecimal():
            return None
        place = int(chips[place])
    return readings[place] if place < len(readings) else None


def parse_npu_smi(text: str) -> tuple[NpuReading, ...]:
    """Return the chips in what `npu-smi info` prints: two lines each, of three cells, the first with its health.

    Cards differ in what the cells hold: behind the load of the cores stand one or two pairs of used and total MB, of
    which the last is the memory that tensors lie in.
    """
    return tuple(_chips(text))


def _chips(text: str) -> Iterator[NpuReading]:
    upper: list[str] | None = None
    chip = 0
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 3:
            continue
        if cells[1] in _HEALTH:
            upper = cells
            continue
        if upper is None:
            continue
        words, values = upper[0].split(maxsplit=1), upper[2].split()
        pairs = re.findall(r"([\d.]+)\s*/\s*([\d.]+)", cells[2])
        yield NpuReading(
            chip=chip,
            name=words[-1] if words else "",
            health=upper[1],
            power=_number(values, 0) or None,
            temperature=_number(values, 1),
            core_percent=_number(cells[2].split(), 0),
            memory_used=_number(pairs[-1], 0) if pairs else None,
            memory_total=_number(pairs[-1], 1) if pairs else None,
        )
        chip += 1
        upper = None


def _number(words: list[str] | tuple[str, ...], place: int) -> float | None:
    text = words[place] if place < len(words) else ""
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None
