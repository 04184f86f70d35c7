"""Iteration time of the estimators side by side, on the paper's smaller cluster: loss, boundary, adjoint, bp alone.

    python benchmarks/boundary.py [--measure] [--queries 1 2 3 6 12] [--seconds 6] [--steps 3] [--output outputs/benchmarks]

For each Q the best plan that uses every device is simulated for each estimator, the best one that may leave devices out,
and that of the back-propagating devices alone; M is the same for all. With `--measure` those that use every device, and the
back-propagating devices alone, are also real runs: processes with Gloo and a tiny model whose stages and links take as long
as those of the cluster would, all by the same scale (of `--seconds` for a mini-batch without NPUs). Writes boundary.csv.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from prediction import WORKLOADS, configured, emulated_case, run
from rich import box
from rich.console import Console
from rich.table import Table

from lightning_hybridop.planning.cluster import Cluster
from lightning_hybridop.planning.plan import Estimator
from lightning_hybridop.planning.workload import Workload
from lightning_hybridop.reporting.predictions import write_csv
from lightning_hybridop.simulation.planning import SimulatedPipeline, plan_by_simulation

CLUSTER = "paper_3b"
MICRO_BATCHES = 8
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)
Row = dict[str, Any]


def main() -> int:
    """Plan, simulate, run if asked to, and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--queries", nargs="+", type=int, default=[1, 2, 3, 6, 12])
    parser.add_argument("--measure", action="store_true", help="run the plans as well")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="a measured mini-batch without NPUs")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks"))
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    console = Console()
    cluster, workload = configured(CLUSTER, WORKLOADS[CLUSTER])

    alone = planned(back_propagating(cluster), workload, queries=0, estimator="loss", use_all=False)
    every = {
        (queries, estimator): planned(cluster, workload, queries=queries, estimator=estimator, use_all=True)
        for queries in options.queries
        for estimator in ESTIMATORS
    }
    rows = [
        simulated_row(cluster, workload, queries, every, alone.simulation.makespan)
        for queries in options.queries
    ]
    report(console, "Simulated seconds of a mini-batch", rows)
    if options.measure:
        scale = options.seconds / alone.simulation.makespan
        (alone_seconds,), seconds = (
            measured([alone], scale=scale, steps=options.steps),
            measured(list(every.values()), scale=scale, steps=options.steps),
        )
        for (queries, estimator), value in zip(every, seconds, strict=True):
            row = next(row for row in rows if row["Q"] == queries)
            row[f"measured_{estimator}"] = value / scale
            row["measured_bp_alone"] = alone_seconds / scale
        report(console, "Measured, in seconds of the cluster", rows, prefix="measured_")
    options.output.mkdir(parents=True, exist_ok=True)
    write_csv(options.output / "boundary.csv", rows)
    return 0


def back_propagating(cluster: Cluster) -> Cluster:
    """Return the cluster without its forward-only devices."""
    return cluster.only(tuple(device.name for device in cluster.devices if not device.profile.forward_only))


def planned(
    cluster: Cluster, workload: Workload, *, queries: int, estimator: Estimator, use_all: bool
) -> SimulatedPipeline:
    """Return the fastest plan in simulation."""
    return plan_by_simulation(
        cluster,
        workload,
        micro_batches=MICRO_BATCHES,
        queries=queries,
        estimator=estimator,
        use_all=use_all,
    )


def simulated_row(
    cluster: Cluster,
    workload: Workload,
    queries: int,
    every: dict[tuple[int, Estimator], SimulatedPipeline],
    alone: float,
) -> Row:
    """Return the seconds of one Q: with every device, free to leave devices out, and without NPUs."""
    row: Row = {"Q": queries, "bp_alone": alone}
    for estimator in ESTIMATORS:
        row[estimator] = every[queries, estimator].simulation.makespan
    for estimator in ESTIMATORS:
        free = planned(cluster, workload, queries=queries, estimator=estimator, use_all=False)
        row[f"free_{estimator}"] = free.simulation.makespan
        row[f"devices_{estimator}"] = len(free.pipeline.layout)
    return row


def measured(pipelines: Sequence[SimulatedPipeline], *, scale: float, steps: int) -> list[float]:
    """Return the seconds that a mini-batch of each pipeline takes as a real run on emulated devices."""
    cases = [emulated_case(CLUSTER, each.pipeline, each.simulation, scale=scale) for each in pipelines]
    return [seconds for seconds, _ in run(cases, steps=steps)]


def report(console: Console, title: str, rows: Sequence[Row], *, prefix: str = "") -> None:
    """Print the rows with the ratios that matter."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    free = [] if prefix else ["boundary, free"]
    ratios = ["loss / boundary", "bp alone / boundary", *(f"bp alone / {name}" for name in free)]
    for name in ("Q", "bp alone", *ESTIMATORS, *free, *ratios):
        table.add_column(name, justify="right")
    for row in rows:
        alone, loss, boundary, adjoint = (
            row[f"{prefix}{name}"] for name in ("bp_alone", "loss", "boundary", "adjoint")
        )
        cells = [f"{seconds:.2f}" for seconds in (alone, loss, boundary, adjoint)]
        shown = [f"{loss / boundary:.2f}", f"{alone / boundary:.2f}"]
        if not prefix:
            cells.append(f"{row['free_boundary']:.2f}")
            shown.append(f"{alone / row['free_boundary']:.2f}")
        table.add_row(str(row["Q"]), *cells, *shown)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
