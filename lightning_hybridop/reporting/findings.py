"""Tables of what `hybridop doctor` found."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.markup import escape
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one rank found about one thing; `remedy` says what to do, None where nothing has to be done."""

    rank: int
    host: str
    topic: str
    found: str
    remedy: str | None = None


def findings_table(findings: Sequence[Finding]) -> Table:
    """Return one row per finding; what has to be mended is marked and says how."""
    table = Table(title="Hosts", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("rank", justify="right")
    table.add_column("host")
    table.add_column("")
    table.add_column("what")
    table.add_column("found", overflow="fold")
    table.add_column("what to do", overflow="fold")
    for finding in findings:
        table.add_row(
            str(finding.rank),
            escape(finding.host),
            "ok" if finding.remedy is None else "[bold red]no[/]",
            escape(finding.topic),
            escape(finding.found),
            escape(finding.remedy or ""),
        )
    return table


def links_table(rows: Sequence[tuple[str, str, float, float]]) -> Table:
    """Return one row per link: between whom, Mbit/s in one direction, and latency in ms."""
    table = Table(title="Links", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("between rank")
    table.add_column("and rank")
    table.add_column("Mbit/s", justify="right")
    table.add_column("latency ms", justify="right")
    for first, second, bandwidth, latency in rows:
        table.add_row(escape(first), escape(second), f"{bandwidth:,.0f}", f"{latency:.2f}")
    return table
