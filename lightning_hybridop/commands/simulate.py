"""`hybridop simulate`: one mini-batch of a plan in simulated time."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from lightning_hybridop.commands.configuration import ConfigurationError
from lightning_hybridop.commands.plan import prediction_rows, print_prediction
from lightning_hybridop.commands.planned import (
    Prediction,
    checked_objective,
    composed,
    configured_cluster,
    configured_prediction,
    configured_workload,
    drawn,
    plan_costs,
    predicted,
    simulated,
    write_json,
)
from lightning_hybridop.planning.costs import layout_value
from lightning_hybridop.planning.plan import Plan, load_plan, plan_to_dict
from lightning_hybridop.planning.planner import PlannedPipeline, checked_layout
from lightning_hybridop.reporting.gantt import draw_timeline
from lightning_hybridop.reporting.page import write_page
from lightning_hybridop.reporting.perfetto import write_trace
from lightning_hybridop.reporting.predictions import (
    STAGE_COLUMNS,
    simulation_panel,
    stage_cells,
    write_csv,
)
from lightning_hybridop.schedules import SCHEDULES


def simulate(overrides: Sequence[str], *, html: bool) -> None:
    """Simulate, print the tables, and write devices.csv, simulation.json, timeline.png, timeline.json (and the page)."""
    _check_overrides(overrides)
    config, folder = composed("simulate", overrides)
    prediction = _prediction(config)
    rows = prediction_rows(prediction)
    simulation, plan = prediction.simulation, prediction.plan
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, folder / "config.yaml")
    write_csv(folder / "devices.csv", rows)
    write_json(
        folder / "simulation.json",
        {
            "plan": plan_to_dict(plan),
            "iteration_seconds": simulation.makespan,
            "comu_ti": simulation.comu_ti,
            "energy_j": simulation.energy,
            "devices": rows,
            "actions": [
                {
                    "device": simulation.devices[timed.stage].name,
                    "kind": timed.action.kind.value,
                    "micro_batch": timed.action.micro_batch,
                    "query": timed.action.query,
                    "count": timed.action.count,
                    "start": timed.start,
                    "end": timed.end,
                }
                for timed in simulation.timeline
            ],
        },
    )
    write_trace(simulation.timeline, plan, folder / "timeline.json")
    console = Console()
    print_prediction(console, prediction)
    missing = drawn(lambda: draw_timeline(simulation.timeline, plan, folder / "timeline.png"))
    if missing:
        console.print(missing, highlight=False)
    if html:
        _write_page(prediction, folder / "simulation.html", rows)
    console.print(f"All files of this simulation: {folder}", soft_wrap=True, highlight=False)


def _check_overrides(overrides: Sequence[str]) -> None:
    """Raise ConfigurationError when a plan file and options that it holds are given together."""
    keys = {override.partition("=")[0].lstrip("+") for override in overrides}
    held = sorted(keys & {"micro_batches", "queries", "exit_queries", "estimator", "use_all", "wire"})
    if "plan" in keys and held:
        raise ConfigurationError(
            f"{held[0]} and plan= contradict each other; change it in the plan file instead."
        )


def _prediction(config: DictConfig) -> Prediction:
    if config.plan is None:
        prediction = configured_prediction(config)
        if config.schedule is None:
            return prediction
        return simulated(prediction, _scheduled(prediction.plan, config.schedule))
    plan = load_plan(config.plan)
    plan = plan if config.schedule is None else _scheduled(plan, config.schedule)
    cluster, workload = configured_cluster(config), configured_workload(config)
    costs = plan_costs(cluster, workload, plan)
    layout = checked_layout(plan, costs)
    pipeline = PlannedPipeline(
        costs=costs,
        layout=layout,
        value=layout_value(costs, layout, checked_objective(config.objective)),
        plan=plan,
        left_out=(),
        notes=(),
    )
    return predicted(cluster, workload, pipeline)


def _scheduled(plan: Plan, schedule: str) -> Plan:
    if schedule not in SCHEDULES:
        raise ConfigurationError(f"There is no schedule {schedule}; choose from: {', '.join(SCHEDULES)}.")
    return dataclasses.replace(plan, schedule=schedule)  # type: ignore[arg-type]  # checked above


def _write_page(prediction: Prediction, path: Path, rows: Sequence[dict[str, object]]) -> None:
    simulation, plan = prediction.simulation, prediction.plan
    workload = prediction.workload
    write_page(
        simulation_panel(
            simulation,
            f"{workload.architecture.name} on {prediction.cluster.name}: one mini-batch, simulated",
        ),
        path,
        notes=(
            f"{workload.rows} rows of {workload.length} tokens · schedule {plan.schedule} · M = {plan.micro_batches} · "
            f"Q = {plan.queries} · Q' = {plan.exit_queries} · estimator {plan.estimator}",
            f"iteration {simulation.makespan:.3f} s · {workload.rows / simulation.makespan:.3f} samples/s · "
            f"Comu_ti {simulation.comu_ti:.0%}",
        ),
        columns=STAGE_COLUMNS,
        rows=[stage_cells(row) for row in rows],
    )
