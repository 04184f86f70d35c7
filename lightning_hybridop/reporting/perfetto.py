"""One mini-batch as a trace that Perfetto (ui.perfetto.dev) and Chrome's tracing page open."""

import json
from pathlib import Path
from typing import Any

from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.reporting.labels import KIND_NAMES, action_label, drawn_actions, stage_label
from lightning_hybridop.schedules.timeline import TimedAction, Timeline, comu_ti, makespan

THREAD = 1  # every stage runs its actions on one thread


def write_trace(timeline: Timeline, plan: Plan, path: str | Path) -> None:
    """Write the actions of one mini-batch as Chrome trace JSON to `path`.

    `timeline` holds start and end in seconds on one common clock, the trace microseconds from the first action. Each
    stage is a process with one thread; each action a complete event with `kind`, `micro_batch`, `query`, `sign` and `count`.
    `otherData` carries makespan_ms, comu_ti and the schedule. Missing parent folders are created.
    Raises ValueError for an empty timeline.
    """
    if not timeline:
        raise ValueError(
            "The timeline is empty, expected the actions of one mini-batch: run a mini-batch of a pipeline first."
        )
    origin = min(timed.start for timed in timeline)
    events = [event for stage in range(len(plan.stages)) for event in _names(plan, stage)]
    ordered = sorted(drawn_actions(timeline), key=lambda timed: (timed.stage, timed.start))
    events += [_event(timed, origin) for timed in ordered]
    trace = {
        "displayTimeUnit": "ms",
        "otherData": {
            "makespan_ms": makespan(timeline) * 1e3,
            "comu_ti": comu_ti(timeline, len(plan.stages)),
            "schedule": plan.schedule,
        },
        "traceEvents": events,
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(trace, indent=1, ensure_ascii=False), encoding="utf-8")


def _process(stage: int) -> int:
    return stage + 1  # viewers keep process 0 for the idle task


def _names(plan: Plan, stage: int) -> list[dict[str, Any]]:
    """Return the metadata events that name a stage's process and thread and keep the stages in order."""

    def metadata(field: str, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": field, "pid": _process(stage), "tid": THREAD, "args": args}

    return [
        metadata("process_name", name=stage_label(plan, stage)),
        metadata("process_sort_index", sort_index=stage),
        metadata("thread_name", name=f"actions on {plan.stages[stage].name or plan.stages[stage].device}"),
    ]


def _event(timed: TimedAction, origin: float) -> dict[str, Any]:
    action = timed.action
    return {
        "ph": "X",
        "name": action_label(action),
        "cat": KIND_NAMES[action.kind],
        "pid": _process(timed.stage),
        "tid": THREAD,
        "ts": (timed.start - origin) * 1e6,
        "dur": (timed.end - timed.start) * 1e6,
        "args": {
            "kind": action.kind.value,
            "micro_batch": action.micro_batch,
            "query": action.query,
            "sign": action.sign,
            "count": action.count,
        },
    }
