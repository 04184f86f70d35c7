"""Tables of what `hybridop profile` measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_hybridop.planning.cluster import Link
from lightning_hybridop.reporting.tables import UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPart:
    """One part of a model: seconds forward and backward (None: not measured), and the FLOPs of a forward."""

    name: str
    forward: float
    backward: float | None
    flops: float


def profile_table(
    parts: Sequence[TimedPart], *, title: str, memory_bytes: float, activation_bytes: float | None
) -> RenderableType:
    """Return what a device takes for each part, with the rates that follow; a backward has twice the FLOPs.

    `activation_bytes` are those per token that a block keeps for its backward, None where it has none.
    """
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for column in ("forward ms", "TFLOP/s", "backward ms", "TFLOP/s"):
        table.add_column(column, justify="right")
    for part in parts:
        table.add_row(
            part.name,
            *_cells(part.forward, part.flops),
            *_cells(part.backward, 2 * part.flops),
        )
    kept = UNKNOWN if activation_bytes is None else f"{activation_bytes / 1e3:.1f} kB"
    memory = (
        f"Memory for a process {memory_bytes / 1e9:.1f} GB; activations that a block keeps {kept} per token."
    )
    return Group(Text(title), table, Text(memory))


def links_table(links: Sequence[tuple[str, str, Link]]) -> Table:
    """Return the links between pairs of processes, given by name."""
    table = Table(title="Links", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("between")
    table.add_column("Mbit/s", justify="right")
    table.add_column("latency ms", justify="right")
    for first, second, link in links:
        table.add_row(f"{first} and {second}", f"{link.bandwidth_mbit_s:,.0f}", f"{link.latency_ms:.2f}")
    return table


def _cells(seconds: float | None, flops: float) -> tuple[str, str]:
    if seconds is None:
        return UNKNOWN, UNKNOWN
    return f"{seconds * 1e3:.3f}", f"{flops / seconds / 1e12:.4f}" if flops else UNKNOWN
