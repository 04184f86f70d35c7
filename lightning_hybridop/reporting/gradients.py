"""Table and picture of what `hybridop gradients` measured."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from lightning_hybridop.reporting.gantt import FAINT_INK, INK, require_matplotlib

Row = Mapping[str, Any]
"""`estimator`, `queries`, `cosine`, `norm_ratio`, those of single stages (`cosine_<stage>`, `norm_ratio_<stage>`),
`forwards`, `seconds`, `bytes`."""

# Paul Tol's "bright" scheme.
_COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377")


def gradients_table(rows: Sequence[Row], *, stages: Sequence[int], title: str) -> Table:
    """Return one row per estimator and number of queries; `stages` are the zo stages, shown one by one if several."""
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    shown = list(stages) if len(stages) > 1 else []
    table.add_column("estimator", no_wrap=True)
    for name in ("Q", "cosine", *(f"stage {stage}" for stage in shown), "norm"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("forwards", "s", "MB"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["estimator"],
            str(row["queries"] or "-"),
            f"{row['cosine']:.4f}",
            *(f"{row[f'cosine_{stage}']:.4f}" for stage in shown),
            f"{row['norm_ratio']:.3g}",
            f"{row['forwards']:.1f}",
            f"{row['seconds']:.1f}",
            f"{row['bytes'] / 1e6:.1f}",
        )
    return table


def draw_gradients(rows: Sequence[Row], path: str | Path) -> None:
    """Draw the cosine to the true gradient against forward work, both axes logarithmic, a line per estimator.

    Raises ModuleNotFoundError without matplotlib.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.8), dpi=150, facecolor="white", layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(row["estimator"] for row in rows))
    for name, colour in zip(names, _COLOURS * len(names), strict=False):
        points = [(row["forwards"], row["cosine"]) for row in rows if row["estimator"] == name]
        above = [(x, y) for x, y in points if y > 0.0]
        if above:
            axes.plot(*zip(*above, strict=True), marker="o", color=colour, label=name, linewidth=1.5)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("forwards of the mini-batch through the whole model", color=INK)
    axes.set_ylabel("cosine to the true gradient", color=INK)
    axes.grid(True, color="#EEF0F2")
    axes.tick_params(colors=FAINT_INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
