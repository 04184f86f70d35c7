"""How long the planner takes for one layout, and how that grows with blocks and devices.

    python benchmarks/planner.py [--runs 10] [--output outputs/benchmarks]

Cases are the paper's two clusters and one of 16 devices, each for several Q and both objectives, on one core. Prints a
table beside the paper's figures (measured by its authors on an Orin NX, for a fixed order of devices); writes
planner.csv, planner_growth.csv and planner_growth.png.
"""

import argparse
import csv
import dataclasses
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

# Before numpy is loaded: one core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import yaml
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from lightning_hybridop.devices.library import load_profiles
from lightning_hybridop.planning.cluster import Cluster, cluster_from_dict
from lightning_hybridop.planning.costs import Objective, PipelineCosts, pipeline_costs
from lightning_hybridop.planning.partition import best_layout
from lightning_hybridop.planning.workload import Workload, workload_from_dict

CONF = Path(__file__).resolve().parents[1] / "conf"
OBJECTIVES: tuple[Objective, ...] = ("makespan", "paper")
QUERIES = (1, 12, 20)
MICRO_BATCHES = 8
# Seconds that the paper gives for its planner, and ours to reach on one core.
PAPER = {"3B": 2.04, "8B": 2.61}
TARGETS = {"3B": 0.05, "8B": 0.05, "16 devices": 2.0}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one call, over several runs."""

    case: str
    blocks: int
    devices: int
    queries: int
    objective: str
    least: float
    median: float


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10, help="calls of which the least and the median count")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    cases = [
        timed(name, costs_of(cluster, workload, queries), objective, options.runs)
        for name, (cluster, workload) in clusters().items()
        for queries in QUERIES
        for objective in OBJECTIVES
    ]
    Console(width=110).print(table(cases))
    write(options.output / "planner.csv", cases)
    growth = [*by_blocks(options.runs), *by_devices(options.runs)]
    write(options.output / "planner_growth.csv", growth)
    figure(growth).savefig(options.output / "planner_growth.png", dpi=150)


def clusters() -> dict[str, tuple[Cluster, Workload]]:
    """Return the clusters and models of the cases."""
    return {
        "3B": (configured("paper_3b"), configured_workload("llama3_2_3b")),
        "8B": (configured("paper_8b"), configured_workload("llama3_1_8b")),
        "16 devices": (large_cluster(4), with_blocks(configured_workload("llama3_1_8b"), 80)),
    }


def read(path: str) -> Any:
    """Return a configuration's content."""
    return yaml.safe_load((CONF / path).read_text(encoding="utf-8"))


def configured(name: str) -> Cluster:
    """Return one of the clusters in the configuration."""
    return cluster_from_dict(read(f"cluster/{name}.yaml"), load_profiles())


def configured_workload(name: str) -> Workload:
    """Return one of the workloads in the configuration."""
    return workload_from_dict(read(f"workload/{name}.yaml"))


def large_cluster(of_each_kind: int) -> Cluster:
    """Return a cluster of four kinds of devices, one of them zo, with memory for any number of blocks here."""
    profiles = ("atlas-200i-dk-a2", "jetson-orin-nano-8gb", "jetson-xavier-nx-16gb", "jetson-agx-orin-64gb")
    devices = [{"profile": name, "count": of_each_kind, "memory_gb": 64} for name in profiles]
    values = {
        "name": "large",
        "devices": devices,
        "link": {"bandwidth_mbit_s": 1000, "latency_ms": 0.5},
        "efficiency": 0.4,
    }
    return cluster_from_dict(values, load_profiles())


def with_blocks(workload: Workload, blocks: int) -> Workload:
    """Return a workload with another number of blocks."""
    architecture = dataclasses.replace(workload.architecture, blocks=blocks)
    return dataclasses.replace(workload, architecture=architecture)


def costs_of(cluster: Cluster, workload: Workload, queries: int) -> PipelineCosts:
    """Return what the planner is given."""
    return pipeline_costs(cluster, workload, micro_batches=MICRO_BATCHES, queries=queries)


def timed(case: str, costs: PipelineCosts, objective: Objective, runs: int) -> Timing:
    """Return how long one layout takes."""
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        best_layout(costs, objective=objective)
        seconds.append(time.perf_counter() - start)
    return Timing(
        case=case,
        blocks=costs.blocks,
        devices=len(costs.devices),
        queries=costs.queries,
        objective=objective,
        least=min(seconds),
        median=statistics.median(seconds),
    )


def by_blocks(runs: int) -> Iterable[Timing]:
    """Yield the times for models of more and more blocks on 8 devices."""
    cluster, workload = large_cluster(2), configured_workload("llama3_1_8b")
    for blocks in (8, 16, 32, 64, 128):
        for queries in (1, 12):
            costs = costs_of(cluster, with_blocks(workload, blocks), queries)
            yield timed("blocks", costs, "makespan", runs)


def by_devices(runs: int) -> Iterable[Timing]:
    """Yield the times for more and more devices of four kinds, for a model of 64 blocks."""
    workload = with_blocks(configured_workload("llama3_1_8b"), 64)
    for of_each_kind in (1, 2, 3, 4, 5):
        for queries in (1, 12):
            costs = costs_of(large_cluster(of_each_kind), workload, queries)
            yield timed("devices", costs, "makespan", runs)


def table(timings: Sequence[Timing]) -> Table:
    """Return the cases' times in milliseconds, beside the paper's."""
    shown = Table(title=f"Planner: one layout, M = {MICRO_BATCHES}, order of devices searched")
    for name in ("case", "blocks", "devices", "Q", "objective"):
        shown.add_column(name)
    for name in ("least ms", "median ms", "target ms", "the paper's ms"):
        shown.add_column(name, justify="right")
    for timing in timings:
        paper = PAPER.get(timing.case)
        shown.add_row(
            timing.case,
            str(timing.blocks),
            str(timing.devices),
            str(timing.queries),
            timing.objective,
            f"{1000 * timing.least:.1f}",
            f"{1000 * timing.median:.1f}",
            f"{1000 * TARGETS[timing.case]:.0f}",
            "–" if paper is None else f"{1000 * paper:.0f}",
        )
    return shown


def write(path: Path, timings: Sequence[Timing]) -> None:
    """Write timings as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Timing)])
        writer.writeheader()
        writer.writerows(dataclasses.asdict(timing) for timing in timings)


def figure(timings: Sequence[Timing]) -> Figure:
    """Return how the time grows, on logarithmic axes."""
    drawn = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (case, fixed) in zip(
        drawn.subplots(1, 2, sharey=True),
        (("blocks", "8 devices of 4 kinds"), ("devices", "64 blocks, 4 kinds")),
        strict=True,
    ):
        for queries in (1, 12):
            rows = [row for row in timings if row.case == case and row.queries == queries]
            sizes = [getattr(row, case) for row in rows]
            axes.loglog(sizes, [1000 * row.median for row in rows], marker="o", label=f"Q = {queries}")
            axes.set_xticks(sizes, labels=[str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel(case)
        axes.set_title(fixed)
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    drawn.axes[0].set_ylabel("median time of one layout (ms)")
    return drawn


if __name__ == "__main__":
    main()
