"""Tables for the terminal: the plan before a run, what came out of it afterwards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_hybridop.planning.plan import Plan, Stage
from lightning_hybridop.reporting.labels import estimator_label

UNKNOWN = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One quantity before and after a run (`first` and `last` step for the loss); None where it was not measured."""

    before: float | None
    after: float | None


def run_summary(
    *,
    plan: Plan,
    loss: Change,
    scores: Mapping[str, Change] | None = None,
    samples_per_second: float | None = None,
    comu_ti: Sequence[float] | None = None,
    peak_memory_mib: Sequence[float] | None = None,
    sent_mib: Sequence[float] | None = None,
) -> RenderableType:
    """Return the closing tables of a run: what was learnt, and what each stage did meanwhile.

    `loss` in nats (first and last step), `scores` what the held-out rows came to by name (before and after), `comu_ti`
    as one fraction of 1 per stage, `peak_memory_mib` one value per stage in MiB, `sent_mib` what it sends to its neighbours
    in a mini-batch. Quantities that are None show as a dash, `sent_mib` not at all.
    Raises ValueError when a per-stage sequence does not have one value per stage.
    """
    for name, values in (
        ("comu_ti", comu_ti),
        ("peak_memory_mib", peak_memory_mib),
        ("sent_mib", sent_mib),
    ):
        if values is not None and len(values) != len(plan.stages):
            raise ValueError(
                f"{name} has {len(values)} values, expected {len(plan.stages)}: pass one value per stage of the plan."
            )

    learnt = Table(title="Result", title_justify="left", box=box.SIMPLE_HEAD)
    learnt.add_column("")
    for column in ("first / before", "last / after", "change"):
        learnt.add_column(column, justify="right")
    _add_change(learnt, "training loss", loss, "{:.4f}", "{:+.4f}")
    for name, change in (scores or {}).items():
        _add_change(learnt, name, change, "{:.3f}", "{:+.3f}")
    learnt.add_row("samples / s", "", _number(samples_per_second, "{:.2f}"), "")

    stages = Table(title="Stages", title_justify="left", box=box.SIMPLE_HEAD, show_footer=comu_ti is not None)
    mean = None if comu_ti is None else sum(comu_ti) / len(comu_ti)
    stages.add_column("stage", justify="right")
    stages.add_column("role")
    stages.add_column("blocks", footer="all stages")
    stages.add_column("Comu_ti", justify="right", footer=_number(mean, "{:.1%}"))
    stages.add_column("peak memory MiB", justify="right")
    if sent_mib is not None:
        total = f"{sum(sent_mib):.2f}"
        stages.add_column("sent MiB per mini-batch", justify="right", footer=total)
    for index, stage in enumerate(plan.stages):
        stages.add_row(
            str(index),
            stage.role,
            stage.block_range,
            _number(None if comu_ti is None else comu_ti[index], "{:.1%}"),
            _number(None if peak_memory_mib is None else peak_memory_mib[index], "{:,.0f}"),
            *([] if sent_mib is None else [f"{sent_mib[index]:.2f}"]),
        )
    return Group(learnt, stages, *prediction_lines(plan))


def prediction_lines(plan: Plan) -> list[str]:
    """Return a line that compares what was predicted of a plan with what was measured; none where either is missing."""
    predicted, measured = plan.predicted, plan.measured
    if predicted is None or measured is None:
        return []
    deviation = measured.iteration_seconds / predicted.iteration_seconds - 1
    return [
        f"iteration: predicted {predicted.iteration_seconds:.3f} s, measured {measured.iteration_seconds:.3f} s "
        f"({deviation:+.1%}) · Comu_ti: predicted {predicted.comu_ti:.1%}, measured {measured.comu_ti:.1%}"
    ]


def plan_table(plan: Plan) -> Table:
    """Return the plan as a table: one row per stage, the settings of the mini-batch below it."""
    caption = f"schedule {plan.schedule} · M = {plan.micro_batches}"
    if plan.zo_stages:
        caption += f" · {estimator_label(plan)}"
    if plan.zo_stages and plan.estimator != "adjoint":
        caption += f" · Q' = {plan.exit_queries} · {plan.difference} difference"
    table = Table(
        title="Plan", title_justify="left", box=box.SIMPLE_HEAD, caption=caption, caption_justify="left"
    )
    table.add_column("stage", justify="right")
    table.add_column("role")
    table.add_column("blocks")
    table.add_column("device")
    table.add_column("dtype")
    table.add_column("speed", justify="right")
    for index, stage in enumerate(plan.stages):
        table.add_row(
            str(index),
            stage.role,
            stage.block_range,
            _runs_on(stage),
            (stage.dtype or "as loaded") + (f" · sends {stage.wire}" if stage.wire else ""),
            f"{stage.speed:g}",
        )
    return table


def _runs_on(stage: Stage) -> str:
    """Return a stage's device, with the inference runtime that runs its blocks there, if one does."""
    if stage.executor == "torch":
        return stage.device
    return f"{stage.device} · {stage.executor}" + (f" {stage.weights}" if stage.weights else "")


def _add_change(table: Table, name: str, change: Change, form: str, change_form: str) -> None:
    known = change.before is not None and change.after is not None
    difference = change.after - change.before if known else None  # type: ignore[operator]
    table.add_row(
        name, _number(change.before, form), _number(change.after, form), _number(difference, change_form)
    )


def _number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else form.format(value)


def lost_time_table(lost: Mapping[str, Any]) -> RenderableType:
    """Return what an interruption cost, line by line; `lost` has the fields of `callbacks.LostTime`."""
    steps = lost["replayed_steps"]
    rows = {
        "detection": "from the last step until the failure was noticed",
        "restart": "until the processes were started again",
        "start_up": "imports, data and model",
        "planning": "the plan",
        "reload": "cutting the model, connecting, reading the checkpoint",
        "replay": f"{steps} step{'' if steps == 1 else 's'} taken again",
    }
    table = Table(title="Time lost", title_justify="left", box=box.SIMPLE_HEAD, show_footer=True)
    table.add_column("", footer="all")
    table.add_column("seconds", justify="right", footer=f"{sum(lost[name] for name in rows):.1f}")
    # As it is: an error's text may have brackets in it.
    table.add_column("", footer=Text(lost["reason"]))
    for name, meaning in rows.items():
        table.add_row(name.replace("_", "-"), f"{lost[name]:.1f}", meaning)
    return table


def rebuilt_table(
    *,
    checkpoint_step: int,
    step: int,
    mini_batches: int,
    directions: int,
    log_bytes: int,
    checked: Sequence[int],
) -> RenderableType:
    """Return what `hybridop rebuild` replayed, what the log of it takes up, and the steps whose checksums fit."""
    steps = step - checkpoint_step
    where = ", ".join(map(str, checked)) if len(checked) <= 6 else f"{checked[0]} to {checked[-1]}"
    rows = {
        "steps replayed": f"{steps} (from {checkpoint_step} to {step})",
        "mini-batches": str(mini_batches),
        "directions": str(directions),
        "bytes of log per step": f"{log_bytes / steps:.0f}" if steps else UNKNOWN,
        "bytes of log per direction": f"{log_bytes / directions:.1f}" if directions else UNKNOWN,
        "checks passed": f"{len(checked)} (step {where})" if checked else "0: none on the way",
    }
    table = Table(title="Rebuilt", title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return table
