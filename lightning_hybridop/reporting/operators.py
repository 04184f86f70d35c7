"""Table of the operators that graphs are made of."""

from collections.abc import Mapping

from rich import box
from rich.table import Table


def operator_table(graphs: Mapping[str, Mapping[str, int]], *, title: str) -> Table:
    """Return how often each type of operator occurs in each of some graphs, given by name."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("operator")
    for name in graphs:
        table.add_column(name, justify="right")
    for kind in sorted({kind for counts in graphs.values() for kind in counts}):
        table.add_row(kind, *(str(counts.get(kind, 0)) for counts in graphs.values()))
    return table
