"""`hybridop compare`: one mini-batch of every method on a cluster, simulated."""

from collections.abc import Sequence

from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from lightning_hybridop.commands.configuration import ConfigurationError
from lightning_hybridop.commands.plan import heading
from lightning_hybridop.commands.planned import (
    checked_estimator,
    composed,
    configured_cluster,
    configured_workload,
    drawn,
    write_json,
)
from lightning_hybridop.reporting.panels import draw_panels
from lightning_hybridop.reporting.predictions import (
    comparison_rows,
    comparison_table,
    result_name,
    simulation_panel,
    write_csv,
)
from lightning_hybridop.simulation.compare import compare as compare_methods

LONGEST_SHOWN = 4
"""The picture's time axis, as a multiple of the fastest method's mini-batch."""


def compare(overrides: Sequence[str]) -> None:
    """Compare, print the table, and write comparison.csv, comparison.json and comparison.png."""
    config, folder = composed("compare", overrides)
    cluster, workload = configured_cluster(config), configured_workload(config)
    for name, least in (("micro_batches", 1), ("queries", 0), ("exit_queries", 0)):
        value = config[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigurationError(
                f"{name}: found {value!r}, expected a whole number of at least {least}, because all methods are given "
                "the same."
            )
    estimator = checked_estimator(config.estimator)
    console = Console()
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), console=console, transient=True
    ) as progress:
        progress.add_task("Planning and simulating every method")
        results = compare_methods(
            cluster,
            workload,
            micro_batches=config.micro_batches,
            queries=config.queries,
            exit_queries=config.exit_queries,
            estimator=estimator,
        )
    rows = comparison_rows(results)
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, folder / "config.yaml")
    write_csv(folder / "comparison.csv", rows)
    write_json(
        folder / "comparison.json",
        {"cluster": cluster.name, "workload": workload.architecture.name, "methods": rows},
    )
    panels = [
        simulation_panel(result.simulation, result_name(result))
        for result in results
        if result.simulation is not None
    ]
    # Some methods take ten times as long as others; on their scale nothing could be seen of those.
    until = LONGEST_SHOWN * min((panel.end for panel in panels), default=0.0)
    missing = drawn(lambda: draw_panels(panels, folder / "comparison.png", until=until))
    console.print(
        f"{heading(cluster, workload)}; M = {config.micro_batches}, Q = {config.queries}, Q' = {config.exit_queries}, "
        f"estimator {estimator}",
        highlight=False,
        markup=False,
    )
    console.print(comparison_table(rows))
    console.print(
        "ratio: how many times as long as HybridOP, with NPUs if there are any; paper: the ratio that the paper claims, where it is known.",
        highlight=False,
    )
    for result in results:
        if result.reason is not None:
            console.print(f"{result_name(result)}: {result.reason}", highlight=False)
    if any(row["over_memory"] for row in rows):
        console.print("! needs more memory than a device has; see comparison.csv.", highlight=False)
    if missing:
        console.print(missing, highlight=False)
    console.print(f"All files of this comparison: {folder}", soft_wrap=True, highlight=False)
