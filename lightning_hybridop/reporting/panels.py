"""Timelines of several methods in one picture, one panel each, on a shared time axis."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from lightning_hybridop.reporting.gantt import (
    BAR_HEIGHT,
    COLOURS,
    FAINT_INK,
    IDLE,
    INK,
    require_matplotlib,
)
from lightning_hybridop.reporting.labels import KIND_NAMES, drawn_actions
from lightning_hybridop.schedules.actions import Kind
from lightning_hybridop.schedules.timeline import TimedAction, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLLECTIVE = "#66CCEE"
WIDTH, ROW_HEIGHT, TITLE_HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 14.0, 0.16, 0.34, 2.5, 0.4, 0.3, 0.8  # inches


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One method's mini-batch: the devices as rows, `stage` of each action being the row's number, in seconds.

    `collectives` are (row, start, end) of times in which a device takes part in a collective.
    """

    title: str
    devices: tuple[str, ...]
    timeline: Timeline
    collectives: tuple[tuple[int, float, float], ...] = ()

    @property
    def end(self) -> float:
        """When the last action or collective ends."""
        ends = [timed.end for timed in self.timeline] + [end for _, _, end in self.collectives]
        return max(ends, default=0.0)


def draw_panels(panels: Sequence[Panel], path: str | Path, *, until: float | None = None) -> None:
    """Draw the panels under each other as a PNG picture at `path`; missing parent folders are created.

    The time axis ends at `until` seconds, if anything lasts longer: such panels are cut off and say when they end.
    Raises ModuleNotFoundError without matplotlib and ValueError without panels.
    """
    if not panels:
        raise ValueError("There is nothing to draw, expected the timeline of at least one method.")
    require_matplotlib()
    from matplotlib.figure import Figure

    heights = [TITLE_HEIGHT + ROW_HEIGHT * len(panel.devices) for panel in panels]
    height = sum(heights) + TOP + BOTTOM
    figure = Figure(figsize=(WIDTH, height), dpi=110, facecolor="white")
    longest = max(panel.end for panel in panels)
    if until is not None:
        longest = min(longest, until)
    top = height - TOP
    for panel, own in zip(panels, heights, strict=True):
        rows = own - TITLE_HEIGHT
        axes = figure.add_axes(
            (LEFT / WIDTH, (top - own) / height, 1 - (LEFT + RIGHT) / WIDTH, rows / height)
        )
        axes.set_xlim(0, longest or 1e-3)
        axes.set_ylim(len(panel.devices) - 0.5, -0.5)
        _draw_panel(axes, panel, longest)
        figure.text(
            LEFT / WIDTH,
            (top - TITLE_HEIGHT * 0.62) / height,
            f"{panel.title}: {panel.end:.2f} s" + (" (cut off)" if panel.end > longest else ""),
            fontsize=9,
            fontweight="bold",
            color=INK,
            va="center",
        )
        top -= own
        last = panel is panels[-1]
        axes.tick_params(
            axis="x", labelbottom=last, length=3 if last else 0, labelcolor=FAINT_INK, labelsize=9
        )
    axes.set_xlabel("seconds from the first action", color=FAINT_INK, fontsize=9, loc="right")
    _draw_legend(figure, panels, height)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _draw_panel(axes: "Axes", panel: Panel, longest: float) -> None:
    points_per_second = (WIDTH - LEFT - RIGHT) * 72 / (longest or 1.0)
    for row in range(len(panel.devices)):
        axes.broken_barh(
            [(0, panel.end)], (row - BAR_HEIGHT / 2, BAR_HEIGHT), facecolor=IDLE, linewidth=0, zorder=0.5
        )
    for kind in Kind:
        actions = [timed for timed in drawn_actions(panel.timeline) if timed.action.kind is kind]
        if not actions:
            continue
        typical = points_per_second * median(timed.end - timed.start for timed in actions)
        for row in range(len(panel.devices)):
            _draw_row(axes, [timed for timed in actions if timed.stage == row], row, COLOURS[kind], typical)
    for row, start, end in panel.collectives:
        axes.broken_barh(
            [(start, end - start)],
            (row - BAR_HEIGHT / 4, BAR_HEIGHT / 2),
            facecolor=COLLECTIVE,
            linewidth=0,
            zorder=1.5,
        )
    axes.set_yticks(range(len(panel.devices)), panel.devices)
    axes.tick_params(axis="y", length=0, pad=4, labelcolor=FAINT_INK, labelsize=7)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _draw_row(axes: "Axes", actions: list[TimedAction], row: int, colour: str, typical: float) -> None:
    axes.broken_barh(
        [(timed.start, timed.end - timed.start) for timed in actions],
        (row - BAR_HEIGHT / 2, BAR_HEIGHT),
        facecolor=colour,
        edgecolor="white",
        linewidth=min(0.5, 0.15 * typical),  # on hair-thin bars an edge would hide the bar itself
        zorder=2,
    )


def _draw_legend(figure: "Figure", panels: Sequence[Panel], height: float) -> None:
    from matplotlib.patches import Patch

    kinds = {timed.action.kind for panel in panels for timed in panel.timeline}
    handles = [
        Patch(facecolor=COLOURS[kind], label=f"{kind.value}  {KIND_NAMES[kind]}")
        for kind in Kind
        if kind in kinds
    ]
    if any(panel.collectives for panel in panels):
        handles.append(Patch(facecolor=COLLECTIVE, label="collective"))
    handles.append(Patch(facecolor=IDLE, label="idle"))
    figure.legend(
        handles=handles,
        loc="center left",
        bbox_to_anchor=(LEFT / WIDTH, 0.22 / height),
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )
