"""A Gantt picture of one mini-batch: one row per stage, one bar per action."""

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.reporting.labels import KIND_NAMES, drawn_actions, estimator_label, stage_label
from lightning_hybridop.schedules.actions import Kind
from lightning_hybridop.schedules.timeline import TimedAction, Timeline, busy_time, comu_ti, makespan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Four hues of Paul Tol's "bright" scheme, which stay apart under every common colour blindness and in grey.
COLOURS = {Kind.FORWARD: "#4477AA", Kind.BACKWARD: "#EE6677", Kind.PERTURBED: "#DDCC77", Kind.EXIT: "#AA3377"}
TEXT_COLOURS = {
    Kind.FORWARD: "white",
    Kind.BACKWARD: "#3D0A12",
    Kind.PERTURBED: "#3A3413",
    Kind.EXIT: "white",
}

INK, FAINT_INK, IDLE = "#22262B", "#6B737C", "#EEF0F2"
WIDTH, ROW_HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 14.0, 0.56, 2.15, 0.7, 0.85, 0.85  # inches
BAR_HEIGHT = 0.78  # of a row
FONT_SIZE = 8.0  # points, inside the bars


def require_matplotlib() -> None:
    """Raise ModuleNotFoundError with what to install when pictures cannot be drawn here."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Drawing a timeline needs matplotlib, which is not installed here: run "
            "`pip install 'lightning-hybridop[viz]'`, or leave the picture out (remove the PipelineTrace callback)."
        ) from error


def draw_timeline(timeline: Timeline, plan: Plan, path: str | Path) -> None:
    """Draw the actions of one mini-batch as a PNG picture at `path`.

    `timeline` holds start and end in seconds on one common clock; the picture's axis is in milliseconds from the first
    action. The number in a bar is its micro-batch, left out where the bar is too narrow for it; the percentage
    behind a row is the stage's share of busy time. Missing parent folders are created.
    Raises ModuleNotFoundError without matplotlib and ValueError for an empty timeline.
    """
    if not timeline:
        raise ValueError(
            "The timeline is empty, expected the actions of one mini-batch: run a mini-batch of a pipeline first."
        )
    require_matplotlib()
    from matplotlib.figure import Figure

    stages, drawn = len(plan.stages), drawn_actions(timeline)
    origin, total = min(timed.start for timed in timeline), makespan(timeline)
    height = stages * ROW_HEIGHT + TOP + BOTTOM
    figure = Figure(figsize=(WIDTH, height), dpi=150, facecolor="white")
    axes = figure.add_axes(
        (LEFT / WIDTH, BOTTOM / height, 1 - (LEFT + RIGHT) / WIDTH, stages * ROW_HEIGHT / height)
    )
    axes.set_xlim(0, total * 1e3 or 1e-3)
    axes.set_ylim(stages - 0.5, -0.5)  # stage 0 on top

    for stage in range(stages):
        axes.axhspan(stage - BAR_HEIGHT / 2, stage + BAR_HEIGHT / 2, color=IDLE, linewidth=0, zorder=0.4)
        _draw_stage(axes, [timed for timed in drawn if timed.stage == stage], stage, origin)
        share = busy_time(timeline, stage) / total if total else 0.0
        axes.annotate(
            f"{share:.0%}",
            (1, stage),
            xycoords=("axes fraction", "data"),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=FAINT_INK,
            fontsize=9,
        )

    _decorate(axes, plan)
    title = f"makespan {total * 1e3:,.1f} ms · Comu_ti {comu_ti(timeline, stages):.0%}"
    figure.text(
        LEFT / WIDTH, 1 - 0.28 / height, title, fontsize=13, fontweight="bold", color=INK, va="center"
    )
    figure.text(LEFT / WIDTH, 1 - 0.57 / height, _subtitle(plan), fontsize=9.5, color=FAINT_INK, va="center")
    _draw_legend(figure, height, {timed.action.kind for timed in timeline})

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _draw_stage(axes: "Axes", actions: list[TimedAction], stage: int, origin: float) -> None:
    """Draw the bars of one stage, one collection per kind: thousands of single patches would take seconds."""
    points_per_millisecond = (WIDTH - LEFT - RIGHT) * 72 / (axes.get_xlim()[1] - axes.get_xlim()[0])
    for kind in Kind:
        bars = [
            ((timed.start - origin) * 1e3, (timed.end - timed.start) * 1e3, timed.action.micro_batch)
            for timed in actions
            if timed.action.kind is kind
        ]
        if not bars:
            continue
        # A white edge parts neighbours of the same kind; on hair-thin bars it would hide the bar itself.
        typical = points_per_millisecond * median(width for _, width, _ in bars)
        edge = min(0.8, 0.15 * typical)
        axes.broken_barh(
            [(start, width) for start, width, _ in bars],
            (stage - BAR_HEIGHT / 2, BAR_HEIGHT),
            facecolor=COLOURS[kind],
            edgecolor="white",
            linewidth=edge,
            zorder=2,
        )
        for start, width, micro_batch in bars:
            # Where most bars of a kind are too narrow, numbers in the few wider ones would only look like noise.
            if min(width * points_per_millisecond, typical) > FONT_SIZE * (0.6 * len(str(micro_batch)) + 0.3):
                axes.text(
                    start + width / 2,
                    stage,
                    str(micro_batch),
                    ha="center",
                    va="center",
                    fontsize=FONT_SIZE,
                    color=TEXT_COLOURS[kind],
                    clip_on=True,
                    zorder=3,
                )


def _decorate(axes: "Axes", plan: Plan) -> None:
    axes.set_yticks(range(len(plan.stages)), [_row_label(plan, stage) for stage in range(len(plan.stages))])
    axes.tick_params(axis="y", length=0, pad=8, labelcolor=INK, labelsize=9.5)
    axes.tick_params(axis="x", length=3, color=FAINT_INK, labelcolor=FAINT_INK, labelsize=9)
    axes.set_xlabel("milliseconds from the first action", color=FAINT_INK, fontsize=9, loc="right")
    axes.grid(axis="x", color="white", linewidth=0.9)
    axes.set_axisbelow(True)  # below the bars: a line across a bar would look like two actions
    for spine in axes.spines.values():
        spine.set_visible(False)


def _row_label(plan: Plan, stage: int) -> str:
    """Return a stage's name; on two lines where a device's name makes it long."""
    label = stage_label(plan, stage)
    return label.replace(" · ", "\n", 1) if plan.stages[stage].name else label


def _draw_legend(figure: "Figure", height: float, kinds: set[Kind]) -> None:
    from matplotlib.patches import Patch

    shown = [kind for kind in Kind if kind in kinds]
    handles = [Patch(facecolor=COLOURS[kind], label=f"{kind.value}  {KIND_NAMES[kind]}") for kind in shown]
    handles.append(Patch(facecolor=IDLE, label="idle"))
    figure.legend(
        handles=handles,
        loc="center left",
        bbox_to_anchor=(LEFT / WIDTH, 0.30 / height),
        borderaxespad=0,
        ncols=len(handles),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        handlelength=1.1,
        handleheight=1.0,
        columnspacing=1.8,
        borderpad=0,
    )


def _subtitle(plan: Plan) -> str:
    """Return what the plan says of the mini-batch, for example `schedule hybridop · M = 4 · Q = 2`."""
    parts = [f"one mini-batch · schedule {plan.schedule}", f"M = {plan.micro_batches}"]
    if plan.zo_stages:
        parts.append(estimator_label(plan))
    if plan.exit_queries:
        parts.append(f"Q' = {plan.exit_queries}")
    return " · ".join(parts)
