"""Pictures, traces and tables of runs and plans: pure functions of a timeline and a plan."""

from lightning_hybridop.reporting.gantt import draw_timeline
from lightning_hybridop.reporting.perfetto import write_trace
from lightning_hybridop.reporting.tables import Change, lost_time_table, plan_table, run_summary

__all__ = ["Change", "draw_timeline", "lost_time_table", "plan_table", "run_summary", "write_trace"]
