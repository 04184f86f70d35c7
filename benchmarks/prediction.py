"""What the simulator predicts beside what the engine measures, on the paper's clusters emulated by local processes.

    python benchmarks/prediction.py [--clusters paper_3b paper_8b] [--steps 3] [--seconds 6] [--output outputs/benchmarks]

Every case is a real run: as many processes as devices, Gloo, and a tiny model of as many blocks whose stages and links
take as long as those of the cluster would, times a time scale. Prints one row per case and the median and the worst
deviation; writes prediction.csv.
"""

import argparse
import dataclasses
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from processes import run_ranks
from rich import box
from rich.console import Console
from rich.table import Table

from lightning_hybridop.devices.library import load_profiles
from lightning_hybridop.planning.cluster import Cluster, cluster_from_dict
from lightning_hybridop.planning.costs import layout_times
from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.planning.planner import PlannedPipeline, plan_pipeline
from lightning_hybridop.planning.workload import Workload, workload_from_dict
from lightning_hybridop.reporting.predictions import write_csv
from lightning_hybridop.simulation.predict import simulate_layout
from lightning_hybridop.simulation.simulator import Simulation

CONF = Path(__file__).resolve().parents[1] / "conf"
WORKLOADS = {"paper_3b": "llama3_2_3b", "paper_8b": "llama3_1_8b"}
# Schedule, M, Q, Q'.
CASES = (
    ("hybridop", 2, 1, 0),
    ("hybridop", 4, 1, 0),
    ("hybridop", 4, 3, 0),
    ("hybridop", 8, 1, 0),
    ("hybridop", 8, 2, 1),
    ("gpipe", 4, 1, 0),
    ("gpipe", 8, 1, 0),
    ("gpipe", 8, 3, 0),
    ("1f1b", 4, 1, 0),
    ("1f1b", 8, 1, 0),
    ("1f1b", 8, 3, 0),
)
LIMIT = 1800.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run: its plan, the times that it keeps to, and what is predicted of it (seconds of the run's own clock)."""

    cluster: str
    plan: Plan
    emulation: Any
    iteration_seconds: float
    comu_ti: float


def main() -> int:
    """Run all cases and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clusters", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--seconds",
        type=float,
        default=6.0,
        help="what a mini-batch is scaled to: long enough for overheads of milliseconds not to matter",
    )
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks"))
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    console = Console()
    rows = []
    for name in options.clusters:
        cases = planned_cases(name, seconds=options.seconds)
        console.print(f"{name}: {len(cases)} runs of {len(cases[0].plan.stages)} processes")
        measured = run(cases, steps=options.steps)
        rows += [row(case, *figures) for case, figures in zip(cases, measured, strict=True)]
    report(console, rows)
    options.output.mkdir(parents=True, exist_ok=True)
    write_csv(options.output / "prediction.csv", rows)
    return 0


def planned_cases(name: str, *, seconds: float) -> list[Case]:
    """Return the cases of one cluster, each with the planner's layout of all of its devices."""
    cluster, workload = configured(name, WORKLOADS[name])
    cases = []
    for schedule, micro_batches, queries, exit_queries in CASES:
        pipeline = plan_pipeline(
            cluster,
            workload,
            micro_batches=micro_batches,
            queries=queries,
            exit_queries=exit_queries,
            use_all=True,
        )
        pipeline = dataclasses.replace(pipeline, plan=dataclasses.replace(pipeline.plan, schedule=schedule))
        simulation = simulate_layout(pipeline.costs, pipeline.layout, pipeline.plan)
        cases.append(emulated_case(name, pipeline, simulation, scale=seconds / simulation.makespan))
    return cases


def emulated_case(cluster: str, pipeline: PlannedPipeline, simulation: Simulation, *, scale: float) -> Case:
    """Return the run of a planned pipeline in which everything takes `scale` times as long as simulated."""
    from lightning_hybridop.pipeline.emulation import Emulation

    stages, links = layout_times(pipeline.costs, pipeline.layout)
    return Case(
        cluster=cluster,
        plan=pipeline.plan,
        emulation=Emulation(stages=stages, links=links, time_scale=scale),
        iteration_seconds=simulation.makespan * scale,
        comu_ti=simulation.comu_ti,
    )


def configured(cluster: str, workload: str) -> tuple[Cluster, Workload]:
    """Return a cluster and a workload of the shipped configuration."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("plan", [f"cluster={cluster}", f"workload={workload}"])
    return (
        cluster_from_dict(OmegaConf.to_container(config.cluster), load_profiles()),
        workload_from_dict(OmegaConf.to_container(config.workload)),
    )


def run(cases: list[Case], *, steps: int) -> list[tuple[float, float]]:
    """Run the cases one after the other in the same processes; return the measured seconds and Comu_ti of each."""
    return list(run_ranks(train_each, len(cases[0].plan.stages), cases, steps, limit=LIMIT))


def train_each(cases: list[Case], steps: int) -> list[tuple[float, float]]:
    """Train each case for a few steps, as one of the processes."""
    return [train(case, steps) for case in cases]


def train(case: Case, steps: int) -> tuple[float, float]:
    """Train a tiny model under a case's plan and times; return the measured seconds and Comu_ti of a mini-batch."""
    import logging
    import warnings

    import lightning
    import torch

    from lightning_hybridop import HybridOPStrategy
    from lightning_hybridop.data.headlines import HeadlinesData
    from lightning_hybridop.modules.label_words import LabelWordClassifier

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    model = f"random-{case.plan.blocks}-blocks"
    strategy = HybridOPStrategy(case.plan, emulation=case.emulation, timeout=300)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(LabelWordClassifier(model), HeadlinesData(tokenizer=model, batch_size=8))
    measured = strategy.plan.measured
    assert measured is not None
    return measured.iteration_seconds, measured.comu_ti


def row(case: Case, seconds: float, comu_ti: float) -> dict[str, Any]:
    """Return one case as a row: predicted, measured, and how far apart."""
    plan = case.plan
    return {
        "cluster": case.cluster,
        "schedule": plan.schedule,
        "M": plan.micro_batches,
        "Q": plan.queries,
        "Q'": plan.exit_queries,
        "predicted_s": round(case.iteration_seconds, 4),
        "measured_s": round(seconds, 4),
        "deviation": round(seconds / case.iteration_seconds - 1, 4),
        "predicted_comu_ti": round(case.comu_ti, 4),
        "measured_comu_ti": round(comu_ti, 4),
        "comu_ti_points": round(100 * (comu_ti - case.comu_ti), 2),
    }


def report(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print the rows, and the median and the worst deviation."""
    table = Table(title="Predicted and measured", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in (
        "cluster",
        "schedule",
        "M",
        "Q",
        "Q'",
        "predicted",
        "measured",
        "off",
        "Comu_ti",
        "points",
    ):
        table.add_column(name, justify="left" if name in ("cluster", "schedule") else "right", no_wrap=True)
    for values in rows:
        table.add_row(
            *(str(values[name]) for name in ("cluster", "schedule", "M", "Q", "Q'")),
            f"{values['predicted_s']:.3f}",
            f"{values['measured_s']:.3f}",
            f"{values['deviation']:+.1%}",
            f"{values['predicted_comu_ti']:.1%}",
            f"{values['comu_ti_points']:+.1f}",
        )
    console.print(table)
    deviations = [abs(values["deviation"]) for values in rows]
    points = [abs(values["comu_ti_points"]) for values in rows]
    console.print(
        f"iteration time: median deviation {statistics.median(deviations):.1%}, worst {max(deviations):.1%}; "
        f"Comu_ti: worst {max(points):.1f} points"
    )


if __name__ == "__main__":
    sys.exit(main())
