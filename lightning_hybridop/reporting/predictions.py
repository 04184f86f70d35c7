"""Tables of what was planned and simulated: for the terminal and, row by row, for files."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from lightning_hybridop.planning.cluster import BYTES_PER_GB
from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.reporting.panels import Panel
from lightning_hybridop.reporting.tables import UNKNOWN
from lightning_hybridop.simulation.compare import MethodResult
from lightning_hybridop.simulation.simulator import Simulation

HYBRIDOP = "HybridOP"

# How many times faster than a method, with or without NPUs, the paper says that HybridOP is. Only a summary of the paper
# is public, and it gives none of these figures.
CLAIMED_SPEEDUPS: Mapping[tuple[str, bool], float] = {}

STAGE_COLUMNS = ("stage", "device", "role", "blocks", "busy s", "busy", "GB", "of GB", "J")
"""Headings of the texts of `stage_cells`."""

Row = Mapping[str, Any]
"""One row of a table: plain values by column name, None where unknown."""


def stage_rows(plan: Plan, simulation: Simulation, *, memory: Sequence[float]) -> list[Row]:
    """Return one row per stage of a simulated plan; `memory` is what the stages' devices have, in bytes."""
    return [
        {
            "stage": index,
            "device": figures.name,
            "role": plan.stages[index].role,
            "blocks": plan.stages[index].block_range,
            "busy_seconds": figures.busy,
            "busy_share": figures.busy / simulation.makespan if simulation.makespan else 0.0,
            "memory_gb": figures.memory / BYTES_PER_GB,
            "memory_available_gb": available / BYTES_PER_GB,
            "energy_j": figures.energy,
        }
        for index, (figures, available) in enumerate(zip(simulation.devices, memory, strict=True))
    ]


def stage_table(rows: Sequence[Row]) -> Table:
    """Return the rows of `stage_rows` as a table for the terminal."""
    table = Table(title="Stages", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in STAGE_COLUMNS:
        text = column in ("device", "role", "blocks")
        table.add_column(column, justify="left" if text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*stage_cells(row))
    return table


def stage_cells(row: Row) -> tuple[str, ...]:
    """Return one row of `stage_rows` as texts."""
    return (
        str(row["stage"]),
        escape(row["device"]),
        row["role"],
        row["blocks"],
        f"{row['busy_seconds']:.3f}",
        f"{row['busy_share']:.0%}",
        f"{row['memory_gb']:.2f}",
        f"{row['memory_available_gb']:.2f}",
        UNKNOWN if row["energy_j"] is None else f"{row['energy_j']:.0f}",
    )


def comparison_rows(results: Sequence[MethodResult]) -> list[Row]:
    """Return one row per method; HybridOP's speedup is how many times as long as HybridOP the method takes.

    That is HybridOP with NPUs, or, where there are none, without.

    What the paper claims of its own measurements stands beside it where it is known (`CLAIMED_SPEEDUPS`).
    """
    # With NPUs before without.
    own = sorted((r for r in results if r.method == HYBRIDOP), key=lambda r: not r.with_npus)
    reference = next((r.simulation for r in own if r.simulation is not None), None)
    rows: list[Row] = []
    for result in results:
        simulation = result.simulation
        speedup = (
            None if simulation is None or reference is None else simulation.makespan / reference.makespan
        )
        rows.append(
            {
                "method": result.method,
                "with_npus": result.with_npus,
                "iteration_seconds": None if simulation is None else simulation.makespan,
                "samples_per_second": result.samples_per_second,
                "comu_ti": None if simulation is None else simulation.comu_ti,
                "peak_memory_gb": (
                    None
                    if simulation is None
                    else max(device.memory for device in simulation.devices) / BYTES_PER_GB
                ),
                "memory_gb": (
                    None
                    if simulation is None
                    else {
                        device.name: round(device.memory / BYTES_PER_GB, 3) for device in simulation.devices
                    }
                ),
                "over_memory": ", ".join(result.over_memory),
                "energy_per_sample_j": result.energy_per_sample,
                "ratio": speedup,
                "paper_ratio": CLAIMED_SPEEDUPS.get((result.method, result.with_npus)),
                "layout": result.description,
                "reason": result.reason,
            }
        )
    return rows


def result_name(result: MethodResult) -> str:
    """Return a method's name as pictures show it."""
    return f"{result.method}, {'with' if result.with_npus else 'without'} NPUs"


COMPARISON_COLUMNS = ("method", "s", "samples/s", "Comu_ti", "max GB", "J/sample", "ratio", "paper")
"""Headings of the texts of `comparison_cells`."""


def comparison_table(rows: Sequence[Row]) -> Table:
    """Return a table with one row per method, the rows of `comparison_rows`: first with NPUs, then without."""
    table = Table(title="One mini-batch", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in COMPARISON_COLUMNS:
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for with_npus, heading in ((True, "with NPUs"), (False, "without NPUs")):
        part = [row for row in rows if row["with_npus"] is with_npus]
        if part:
            table.add_row(f"[bold]{heading}[/bold]")
        for row in part:
            table.add_row(*comparison_cells(row))
        table.add_section()
    return table


def comparison_cells(row: Row) -> tuple[str, ...]:
    """Return one row of a comparison as texts; figures of a method that cannot run are dashes."""

    def number(name: str, form: str) -> str:
        return UNKNOWN if row[name] is None else form.format(row[name])

    memory = number("peak_memory_gb", "{:.2f}") + (" !" if row["over_memory"] else "")
    return (
        row["method"],
        number("iteration_seconds", "{:.2f}"),
        number("samples_per_second", "{:.3f}"),
        number("comu_ti", "{:.0%}"),
        memory,
        number("energy_per_sample_j", "{:.0f}"),
        number("ratio", "{:.2f}"),
        number("paper_ratio", "{:.2f}"),
    )


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as CSV, the first row's names as header, unknown values empty, mappings as `name: value; ...`."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows({name: _csv_value(value) for name, value in row.items()} for row in rows)


def _csv_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return "; ".join(f"{name}: {part}" for name, part in value.items())
    return value


def simulation_panel(simulation: Simulation, title: str) -> Panel:
    """Return a simulation as something to draw."""
    return Panel(
        title=title,
        devices=tuple(device.name for device in simulation.devices),
        timeline=simulation.timeline,
        collectives=tuple(
            (device, collective.start, collective.end)
            for collective in simulation.collectives
            for device in collective.devices
        ),
    )
