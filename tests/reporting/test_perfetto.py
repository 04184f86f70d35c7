import json
from pathlib import Path
from typing import Any

import pytest

from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.reporting.perfetto import write_trace
from lightning_hybridop.schedules.actions import Action, Kind
from lightning_hybridop.schedules.timeline import TimedAction, Timeline


@pytest.fixture
def trace(plan: Plan, timeline: Timeline, tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "new" / "timeline.json"
    write_trace(timeline, plan, path)
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def test_every_action_is_a_complete_event_in_microseconds(trace: dict[str, Any]) -> None:
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    seen = [(event["pid"], event["name"], round(event["ts"]), round(event["dur"])) for event in events]
    assert seen == [
        (1, "F 0", 0, 2000),
        (1, "P 0 q0", 2000, 2000),
        (1, "X 0 q1", 4000, 2000),
        (2, "F 0", 2000, 2000),
        (2, "B 0", 4000, 4000),
        (2, "P 0 q0", 9000, 1000),
    ]
    assert events[1]["args"] == {"kind": "P", "micro_batch": 0, "query": 0, "sign": 1, "count": 1}
    assert events[0]["args"]["query"] is None
    assert events[4]["cat"] == "backward"


def test_processes_and_threads_are_named_and_ordered(trace: dict[str, Any]) -> None:
    names = {
        (event["pid"], event["name"]): event["args"] for event in trace["traceEvents"] if event["ph"] == "M"
    }
    assert names == {
        (1, "process_name"): {"name": "stage 0 · zo · blocks 0-1"},
        (1, "process_sort_index"): {"sort_index": 0},
        (1, "thread_name"): {"name": "actions on npu:0"},
        (2, "process_name"): {"name": "stage 1 · bp · block 2"},
        (2, "process_sort_index"): {"sort_index": 1},
        (2, "thread_name"): {"name": "actions on cpu"},
    }


def test_totals_stand_beside_the_events(trace: dict[str, Any]) -> None:
    assert trace["otherData"]["makespan_ms"] == pytest.approx(10, abs=1e-6)
    assert trace["otherData"]["comu_ti"] == pytest.approx(0.65)


def test_the_minus_direction_of_a_central_difference_shows(plan: Plan, tmp_path: Path) -> None:
    action = Action(kind=Kind.PERTURBED, micro_batch=3, query=2, sign=-1)
    write_trace((TimedAction(stage=0, action=action, start=0, end=1),), plan, tmp_path / "a.json")
    event = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["traceEvents"][-1]
    assert (event["name"], event["args"]["sign"]) == ("P 3 q2 −", -1)


def test_queries_that_ride_together_show_and_what_takes_no_time_does_not(plan: Plan, tmp_path: Path) -> None:
    riding = Action(kind=Kind.PERTURBED, micro_batch=3, query=2, count=3)
    gradient = Action(kind=Kind.BACKWARD, micro_batch=3)
    write_trace(
        (
            TimedAction(stage=0, action=riding, start=0, end=1),
            TimedAction(stage=0, action=gradient, start=1, end=1),
        ),
        plan,
        tmp_path / "a.json",
    )
    events = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["traceEvents"]
    shown = [event for event in events if event["ph"] == "X"]
    assert [(event["name"], event["args"]["count"]) for event in shown] == [("P 3 q2-4", 3)]


def test_empty_timeline_is_refused(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="timeline is empty"):
        write_trace((), plan, tmp_path / "a.json")
