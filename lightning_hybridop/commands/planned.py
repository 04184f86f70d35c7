"""From the configuration of `hybridop plan`, `simulate` and `compare` to a cluster, a workload and a plan for both."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from omegaconf import DictConfig, ListConfig, OmegaConf

from lightning_hybridop.commands.configuration import ConfigurationError, check_folder, compose_runs
from lightning_hybridop.devices.library import load_profiles, read_profile
from lightning_hybridop.planning.cluster import Cluster, DeviceProfile, cluster_from_dict
from lightning_hybridop.planning.costs import Objective, PipelineCosts, pipeline_costs
from lightning_hybridop.planning.hosts import Hosts, cluster_of_hosts, hosts_from_dict
from lightning_hybridop.planning.plan import Estimator, Plan, WireName
from lightning_hybridop.planning.planner import PlannedPipeline, plan_layout
from lightning_hybridop.planning.workload import Workload, workload_from_dict
from lightning_hybridop.simulation.planning import plan_by_simulation, simulate_pipeline
from lightning_hybridop.simulation.predict import (
    most_within_idle_time,
    with_prediction,
)
from lightning_hybridop.simulation.simulator import Simulation

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A planned pipeline and its simulated mini-batch; `plan` carries the predicted figures."""

    cluster: Cluster
    workload: Workload
    pipeline: PlannedPipeline
    plan: Plan
    simulation: Simulation


def composed(command: str, overrides: Sequence[str]) -> tuple[DictConfig, Path]:
    """Return the configuration of a command and the folder that its files go to, which must not hold any yet."""
    run = compose_runs(command, overrides)[0]
    check_folder(run.folder)
    for name in ("use_all", "debug"):
        if name in run.config and not isinstance(run.config[name], bool):
            raise ConfigurationError(f"{name}: found {run.config[name]!r}, expected true or false.")
    if run.folder.is_dir() and any(run.folder.iterdir()):
        raise ConfigurationError(
            f"{run.folder} already holds files; pass another folder=, or remove that one."
        )
    return run.config, run.folder


def configured_cluster(config: DictConfig) -> Cluster:
    """Return the devices and links of `config.cluster`.

    Raises ClusterError, or ConfigurationError for a cluster that only says how many processes this host runs.
    """
    if config.get("cluster") is None:
        raise ConfigurationError("There is no cluster; pass cluster=<name>, such as cluster=paper_3b.")
    hosts = configured_hosts(config)
    if hosts is not None:
        files = [_profile_files(host.devices) for host in config.cluster.hosts]
        return cluster_of_hosts(
            hosts, {**load_profiles(), **{k: v for found in files for k, v in found.items()}}
        )
    if "devices" not in config.cluster:
        raise ConfigurationError(
            "This cluster says how many processes run on this host, not which devices there are; choose a cluster with "
            "devices, or measure this host with `hybridop fit plan=auto`."
        )
    values = OmegaConf.to_container(config.cluster)
    cluster = cluster_from_dict(values, {**load_profiles(), **_profile_files(config.cluster.devices)})
    # Where each process stands for a host with one device.
    return cluster if config.get("present") is None else cluster.only(config.present)


def configured_hosts(config: DictConfig) -> Hosts | None:
    """Return the hosts of `config.cluster`, of a run those that have come; None for a cluster that names none.

    Raises ClusterError.
    """
    if config.get("cluster") is None or "hosts" not in config.cluster:
        return None
    hosts = hosts_from_dict(OmegaConf.to_container(config.cluster))
    return hosts if config.get("present") is None else hosts.only(config.present)


def _profile_files(entries: Any) -> dict[str, DeviceProfile]:
    """Return the profiles that devices take from files, such as `hybridop profile` writes, by the files' names."""
    entries = entries if isinstance(entries, ListConfig) else ()
    named = [entry.get("profile") for entry in entries if isinstance(entry, DictConfig)]
    paths = [name for name in named if isinstance(name, str) and name.endswith((".yaml", ".yml"))]
    return {path: read_profile(Path(path)) for path in paths}


def configured_workload(config: DictConfig) -> Workload:
    """Return the mini-batch of `config.workload`, whose hidden states travel as the run says; raises WorkloadError."""
    if config.get("workload") is None:
        raise ConfigurationError("There is no workload; pass workload=<name>, such as workload=llama3_2_3b.")
    workload = workload_from_dict(OmegaConf.to_container(config.workload))
    wire = config.strategy.wire if "strategy" in config else config.get("wire")
    return workload if wire is None else dataclasses.replace(workload, wire=wire)


def predict(
    cluster: Cluster,
    workload: Workload,
    *,
    micro_batches: int | None,
    queries: int | str,
    exit_queries: int | str,
    objective: str,
    use_all: bool,
    estimator: str = "loss",
) -> Prediction:
    """Plan, raise what is `auto` to what fits into idle time (from Q = 1 and Q' = 0 on), and simulate a mini-batch.

    Raises ConfigurationError for an unknown objective or estimator, and what the planner raises.
    """
    pipeline = plan_by_simulation(
        cluster,
        workload,
        micro_batches=micro_batches,
        queries=_given("queries", queries, 1),
        exit_queries=_given("exit_queries", exit_queries, 0),
        objective=checked_objective(objective),
        use_all=use_all,
        estimator=checked_estimator(estimator),
    ).pipeline
    costs, plan = pipeline.costs, pipeline.plan
    if queries == AUTO:
        most = most_within_idle_time(costs, pipeline.layout, plan, "queries")
        costs, plan = dataclasses.replace(costs, queries=most), dataclasses.replace(plan, queries=most)
    if exit_queries == AUTO:
        most = most_within_idle_time(costs, pipeline.layout, plan, "exit_queries")
        costs = dataclasses.replace(costs, exit_queries=most)
        plan = dataclasses.replace(plan, exit_queries=most)
    pipeline = dataclasses.replace(pipeline, costs=costs, plan=plan)
    return predicted(cluster, workload, pipeline)


def predicted(cluster: Cluster, workload: Workload, pipeline: PlannedPipeline) -> Prediction:
    """Return a planned pipeline with its simulated mini-batch."""
    simulation = simulate_pipeline(cluster, pipeline).simulation
    return Prediction(
        cluster=cluster,
        workload=workload,
        pipeline=pipeline,
        plan=with_prediction(pipeline.plan, simulation),
        simulation=simulation,
    )


def simulated(prediction: Prediction, plan: Plan) -> Prediction:
    """Return a prediction for another plan of the same stages, such as one of another schedule."""
    pipeline = dataclasses.replace(prediction.pipeline, plan=plan)
    return predicted(prediction.cluster, prediction.workload, pipeline)


def plan_costs(cluster: Cluster, workload: Workload, plan: Plan) -> PipelineCosts:
    """Return the costs of a workload on a cluster with the micro-batches and queries of a plan.

    Raises ConfigurationError for a plan of another number of blocks.
    """
    if workload.architecture.blocks != plan.blocks:
        raise ConfigurationError(
            f"The plan is for {plan.blocks} blocks, but the workload {workload.architecture.name} has "
            f"{workload.architecture.blocks}; choose the workload that the plan was made for."
        )

    def costs_with(wire: WireName | None) -> PipelineCosts:
        return pipeline_costs(
            cluster,
            dataclasses.replace(workload, wire=wire),
            micro_batches=plan.micro_batches,
            queries=plan.queries,
            exit_queries=plan.exit_queries,
            exit_baseline=plan.exit_baseline == "exit",
            estimator=plan.estimator,
            queries_per_forward=plan.queries_per_forward,
        )

    # Each stage has a device of its own, whose links to the others take what its wire makes of a hidden state.
    costs = costs_with(plan.wire)
    links = list(costs.links)
    for stage, part in zip(plan.stages, plan_layout(plan, costs), strict=True):
        if stage.wire != plan.wire:
            links[part.device] = costs_with(stage.wire).links[part.device]
    return dataclasses.replace(costs, links=tuple(links))


def configured_prediction(config: DictConfig) -> Prediction:
    """Return what `predict` makes of a configuration of these commands."""
    return predict(
        configured_cluster(config),
        configured_workload(config),
        micro_batches=config.micro_batches,
        queries=config.queries,
        exit_queries=config.exit_queries,
        objective=config.objective,
        use_all=config.use_all,
        estimator=config.estimator,
    )


def checked_objective(name: str) -> Objective:
    """Return the objective of that name; raises ConfigurationError if there is none."""
    if name not in get_args(Objective):
        raise ConfigurationError(f"objective is {name!r}, expected {' or '.join(get_args(Objective))}.")
    return cast(Objective, name)


def checked_estimator(name: str) -> Estimator:
    """Return the estimator of that name; raises ConfigurationError if there is none."""
    if name not in get_args(Estimator):
        raise ConfigurationError(f"estimator is {name!r}, expected one of {', '.join(get_args(Estimator))}.")
    return cast(Estimator, name)


def _given(name: str, value: int | str, start: int) -> int:
    if value == AUTO:
        return start
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigurationError(
            f"{name}: found {value!r}, expected a whole number of at least 0, or {AUTO}."
        )
    return value


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write plain values as indented JSON."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def drawn(draw: Callable[[], None]) -> str | None:
    """Draw a picture; return why there is none, if matplotlib is missing."""
    try:
        draw()
    except ModuleNotFoundError as error:
        return str(error)
    return None
