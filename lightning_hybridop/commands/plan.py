"""`hybridop plan`: lays a model over the devices of a cluster and says what a mini-batch will take."""

from collections.abc import Sequence

from omegaconf import OmegaConf
from rich.console import Console

from lightning_hybridop.commands.planned import (
    Prediction,
    composed,
    configured_prediction,
    drawn,
    write_json,
)
from lightning_hybridop.planning.cluster import Cluster
from lightning_hybridop.planning.plan import plan_to_dict, save_plan
from lightning_hybridop.planning.workload import Workload
from lightning_hybridop.reporting.gantt import draw_timeline
from lightning_hybridop.reporting.predictions import stage_rows, stage_table, write_csv
from lightning_hybridop.simulation.predict import most_within_idle_time


def plan(overrides: Sequence[str]) -> None:
    """Plan, print the tables, and write plan.yaml, stages.csv, plan.json and timeline.png."""
    config, folder = composed("plan", overrides)
    prediction = configured_prediction(config)
    rows = prediction_rows(prediction)
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, folder / "config.yaml")
    save_plan(prediction.plan, folder / "plan.yaml")
    write_csv(folder / "stages.csv", rows)
    write_json(
        folder / "plan.json",
        {
            "plan": plan_to_dict(prediction.plan),
            "objective": config.objective,
            "objective_seconds": prediction.pipeline.value,
            "energy_j": prediction.simulation.energy,
            "stages": rows,
            "left_out": list(prediction.pipeline.left_out),
            "notes": list(prediction.pipeline.notes),
        },
    )
    picture = folder / "timeline.png"
    missing = drawn(lambda: draw_timeline(prediction.simulation.timeline, prediction.plan, picture))
    console = Console()
    print_prediction(console, prediction)
    for sentence in (*_idle_time(prediction), *([missing] if missing else [])):
        console.print(sentence, highlight=False)
    console.print(f"All files of this plan: {folder}", soft_wrap=True, highlight=False)


def prediction_rows(prediction: Prediction) -> list[dict[str, object]]:
    """Return one row per stage of what was planned."""
    costs, layout = prediction.pipeline.costs, prediction.pipeline.layout
    memory = [costs.devices[part.device].memory for part in layout]
    return [dict(row) for row in stage_rows(prediction.plan, prediction.simulation, memory=memory)]


def print_prediction(console: Console, prediction: Prediction) -> None:
    """Print the stages, what a mini-batch takes, and what the planner had to say."""
    plan, simulation, workload = prediction.plan, prediction.simulation, prediction.workload
    console.print(heading(prediction.cluster, workload), highlight=False, markup=False)
    console.print(stage_table(prediction_rows(prediction)))
    # The planner's objectives are made for its own schedule.
    estimated = plan.schedule == "hybridop"
    estimate = f" (the planner's estimate: {prediction.pipeline.value:.3f} s)" if estimated else ""
    lines = [
        f"M = {plan.micro_batches} · Q = {plan.queries} · Q' = {plan.exit_queries} · estimator {plan.estimator} · "
        f"schedule {plan.schedule}",
        f"iteration {simulation.makespan:.3f} s{estimate}",
        f"{workload.rows / simulation.makespan:.3f} samples/s · Comu_ti {simulation.comu_ti:.0%}",
    ]
    if simulation.energy is not None:
        bound = "at most " if simulation.energy_is_bound else ""
        lines.append(f"{bound}{simulation.energy / workload.rows:.0f} J per sample")
    for sentence in (*lines, *prediction.pipeline.left_out, *prediction.pipeline.notes):
        console.print(sentence, highlight=False, markup=False)


def heading(cluster: Cluster, workload: Workload) -> str:
    """Return what is planned for, in one line."""
    return (
        f"{workload.architecture.name} on {cluster.name}: {workload.rows} rows of {workload.length} tokens, {workload.dtype}, "
        f"links of {cluster.link.bandwidth_mbit_s:g} Mbit/s"
    )


def _idle_time(prediction: Prediction) -> list[str]:
    """Say how many more perturbations would cost no time, if any."""
    costs, layout, plan = prediction.pipeline.costs, prediction.pipeline.layout, prediction.plan
    queries = most_within_idle_time(costs, layout, plan, "queries")
    exit_queries = most_within_idle_time(costs, layout, plan, "exit_queries")
    found = []
    if queries > plan.queries:
        found.append(f"queries={queries}")
    if exit_queries > plan.exit_queries:
        found.append(f"exit_queries={exit_queries}")
    return [f"Idle time has room for {' or '.join(found)} at the same iteration time."] if found else []
