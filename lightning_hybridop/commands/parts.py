"""From a configuration to the plan of its run and the objects that carry it out."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from hydra.utils import instantiate
from lightning import LightningModule
from omegaconf import DictConfig, OmegaConf

from lightning_hybridop.accelerators import HybridOPAccelerator, default_role
from lightning_hybridop.commands.configuration import ConfigurationError
from lightning_hybridop.commands.planned import (
    AUTO,
    configured_cluster,
    configured_hosts,
    configured_workload,
    plan_costs,
    predict,
    simulated,
)
from lightning_hybridop.modules.language_models import load_configuration
from lightning_hybridop.pipeline.batches import token_shape
from lightning_hybridop.pipeline.emulation import Emulation
from lightning_hybridop.pipeline.interface import host_name
from lightning_hybridop.planning.costs import layout_times
from lightning_hybridop.planning.fields import check_whole
from lightning_hybridop.planning.hosts import Hosts, on_hosts
from lightning_hybridop.planning.plan import Plan, Role, even_plan, load_plan
from lightning_hybridop.planning.planner import checked_layout
from lightning_hybridop.simulation.predict import with_prediction
from lightning_hybridop.strategy import HybridOPStrategy

PLAN_OPTIONS = (
    "micro_batches",
    "queries",
    "exit_queries",
    "schedule",
    "estimator",
    "queries_per_forward",
    "difference",
    "exit_baseline",
    "wire",
    "replicas",
)
"""The options of `strategy` that are part of a plan."""


TORCH = {"zo_executor": "torch", "zo_dtype": None, "zo_weights": None}
"""A cluster whose forward-only stages run as they are loaded."""


def run_plan(config: DictConfig) -> Plan:
    """Return the plan of a run: a file's, the planner's for a cluster of devices, else an even split.

    With `plan=auto` on a cluster of local processes the plan is made by those processes, once they have measured
    themselves; the even split then says how many of them there are.
    Raises PlanError or ConfigurationError when there is no such plan.
    """
    if config.plan is not None and config.plan != AUTO:
        # What was predicted and measured of it on other data or devices says nothing about this run.
        return dataclasses.replace(load_plan(config.plan), predicted=None, measured=None)
    cluster = config.cluster
    hosts = configured_hosts(config)
    if hosts is not None and config.plan == AUTO:
        return _even_on(hosts, config)
    if "devices" in cluster or hosts is not None:
        return _planned(config)
    if cluster.zo_role not in ("zo", "frozen"):
        raise ConfigurationError(f"cluster.zo_role is {cluster.zo_role!r}, expected zo or frozen.")
    for name in ("zo_stages", "bp_stages"):
        check_whole(f"cluster.{name}", cluster[name], 0, error=ConfigurationError)
    plan = even_plan(
        blocks=config.model.blocks or _count_blocks(config.model.name),
        stages=cluster.zo_stages + cluster.bp_stages,
        zo_stages=cluster.zo_stages,
        **_plan_options(config),
    )
    stages = tuple(
        dataclasses.replace(
            stage,
            role=cast(Role, cluster.zo_role) if stage.role == "zo" else stage.role,
            device=cluster.device,
            **(_arithmetic(cluster) if stage.role == "zo" else {}),
        )
        for stage in plan.stages
    )
    return dataclasses.replace(plan, stages=stages)


def _plan_options(config: DictConfig) -> dict[str, Any]:
    """Return the options of a strategy that are part of its plan."""
    options = {name: config.strategy[name] for name in PLAN_OPTIONS}
    if config.plan == AUTO and options["micro_batches"] is None:
        del options["micro_batches"]
    return options


def _refuse_replicas(config: DictConfig) -> None:
    """Refuse replicas of a pipeline that is planned for hosts: all would be on the same devices."""
    if config.strategy.replicas != 1:
        raise ConfigurationError(
            f"strategy.replicas is {config.strategy.replicas}, but the hosts' devices are planned as one pipeline; leave it out, or "
            "pass a plan with replicas and without hosts to torchrun on each host."
        )


def _even_on(hosts: Hosts, config: DictConfig) -> Plan:
    """Return an even plan of one stage per device of the hosts, forward-only ones first: processes measure the rest."""
    _refuse_replicas(config)
    where = [(host.name, device.device) for host in hosts.hosts for device in host.devices]
    where.sort(key=lambda place: default_role(place[1]) != "zo")
    plan = even_plan(
        blocks=config.model.blocks or _count_blocks(config.model.name),
        stages=len(where),
        zo_stages=sum(default_role(device) == "zo" for _, device in where),
        **_plan_options(config),
    )
    stages = [
        dataclasses.replace(stage, host=host, device=device)
        for stage, (host, device) in zip(plan.stages, where, strict=True)
    ]
    return dataclasses.replace(plan, stages=tuple(stages))


def _arithmetic(cluster: DictConfig) -> dict[str, Any]:
    """Return what computes on the forward-only stages of a cluster of local processes, and how."""
    return {
        "executor": cluster.zo_executor,
        "dtype": cluster.zo_dtype,
        "weights": cluster.zo_weights,
    }


def _planned(config: DictConfig) -> Plan:
    """Return the planner's plan for a cluster of devices, with what is predicted of it if the cluster is emulated."""
    hosts, strategy = configured_hosts(config), config.strategy
    if hosts is not None:
        _refuse_replicas(config)
    cluster, workload = configured_cluster(config), configured_workload(config)
    # A central difference runs every query twice.
    signs = 2 if strategy.difference == "central" else 1
    prediction = predict(
        cluster,
        workload,
        micro_batches=strategy.micro_batches,
        queries=_passes(strategy.queries, signs),
        exit_queries=_passes(strategy.exit_queries, signs),
        objective="makespan",
        # Whoever has come is to work.
        use_all=config.use_all or config.present is not None,
        estimator=strategy.estimator,
    )
    blocks = config.model.blocks or _count_blocks(config.model.name)
    if prediction.plan.blocks != blocks:
        raise ConfigurationError(
            f"{config.model.name} has {blocks} blocks, but the workload {prediction.workload.architecture.name} that the "
            f"cluster was planned for has {prediction.plan.blocks}; choose a workload and a model of as many blocks."
        )
    planned = ("micro_batches", "queries", "exit_queries", "estimator", "wire")
    options = {name: strategy[name] for name in PLAN_OPTIONS if name not in planned}
    plan = dataclasses.replace(
        prediction.plan,
        queries=prediction.plan.queries // signs,
        exit_queries=prediction.plan.exit_queries // signs,
        **options,
        predicted=None,
    )
    if hosts is not None:
        plan = on_hosts(plan, hosts)
    elif config.present is not None:
        stages = tuple(dataclasses.replace(stage, host=stage.name) for stage in plan.stages)
        plan = dataclasses.replace(plan, stages=stages)
    if not cluster.emulate:
        return plan
    if len(plan.stages) == 1:
        raise ConfigurationError(
            f"{plan.stages[0].name} alone is the fastest of this cluster, which leaves no pipeline to emulate; pass "
            "use_all=true."
        )
    simulation = simulated(prediction, plan).simulation
    emulated = with_prediction(plan, simulation, time_scale=cluster.time_scale)
    assert emulated.predicted is not None
    # The memory is that of the devices' own model, and the run's is that of a smaller one.
    return dataclasses.replace(emulated, predicted=dataclasses.replace(emulated.predicted, memory_mib=()))


def _passes(queries: Any, signs: int) -> Any:
    """Return how often queries run; what is no number is left for the planner to judge."""
    return queries * signs if isinstance(queries, int) else queries


def run_emulation(config: DictConfig, plan: Plan) -> Emulation | None:
    """Return the times that the stages keep to, if the cluster is an emulated one.

    A plan from a file finds its devices by their names. Raises PlanError or ConfigurationError if it is for others.
    """
    if "devices" not in config.cluster or not config.cluster.emulate:
        return None
    cluster = configured_cluster(config)
    costs = plan_costs(cluster, configured_workload(config), plan)
    stages, links = layout_times(costs, checked_layout(plan, costs))
    return Emulation(stages=stages, links=links, time_scale=cluster.time_scale)


def run_strategy(config: DictConfig, plan: Plan) -> HybridOPStrategy:
    """Return the strategy of a run."""
    hosts = configured_hosts(config)
    if config.plan == AUTO and hosts is not None:
        made = factory(config.strategy)(
            plan=AUTO,
            stages=len(plan.stages),
            device=_own_device(hosts),
            mini_batch=(config.data.batch_size, row_length(config)),
        )
    elif config.plan == AUTO and "devices" not in config.cluster and len(plan.stages) > 1:
        if config.cluster.zo_role != "zo":
            raise ConfigurationError(
                f"plan=auto plans for zo stages that learn, but cluster.zo_role is {config.cluster.zo_role}; run it once, "
                "and give the stages that role in the plan.yaml that it leaves."
            )
        if _arithmetic(config.cluster) != _arithmetic(OmegaConf.create(TORCH)):
            raise ConfigurationError(
                "plan=auto measures torch, but the cluster's zo stages are to run on something else; leave cluster.zo_executor, "
                "zo_dtype and zo_weights out, and put them into the plan.yaml that the run leaves."
            )
        made = factory(config.strategy)(
            plan=AUTO,
            stages=len(plan.stages),
            zo_stages=config.cluster.zo_stages,
            mini_batch=(config.data.batch_size, row_length(config)),
        )
    else:
        made = factory(config.strategy, without=PLAN_OPTIONS)(
            plan=plan, emulation=run_emulation(config, plan)
        )
    return cast(HybridOPStrategy, made)


def _own_device(hosts: Hosts) -> str | None:
    """Return the device that a hosts file has for this process; None before the processes are started."""
    if "RANK" not in os.environ:
        return None
    return hosts.device_of(host_name(), int(os.environ.get("LOCAL_RANK", "0")))


def trainer_options(config: DictConfig, plan: Plan) -> dict[str, Any]:
    """Return what hosts change in the options of the Trainer: where they name devices, its accelerator is for any."""
    named = configured_hosts(config) is not None or any(stage.host is not None for stage in plan.stages)
    return {"accelerator": HybridOPAccelerator.name()} if named else {}


def run_module(config: DictConfig, plan: Plan) -> LightningModule:
    """Return the module of a run, whose adapters may have another rank on zo stages.

    Raises ConfigurationError where it is not known beforehand which blocks those hold.
    """
    made = factory(config.model, without=("name", "blocks"))
    if config.model.get("zo_rank") is None:
        return cast(LightningModule, made(config.model.name))
    if config.plan == AUTO:
        raise ConfigurationError(
            "model.zo_rank is set, but with plan=auto the blocks of zo stages are known only once the processes have measured "
            "themselves; run it once and pass the plan.yaml that it leaves."
        )
    zo_blocks = 0 if plan.exit_stage is None else plan.stages[plan.exit_stage].last
    return cast(LightningModule, made(config.model.name, zo_blocks=zo_blocks))


def row_length(config: DictConfig) -> int:
    """Return how many tokens the rows of a training mini-batch have, as far as the first one tells."""
    with torch.random.fork_rng(devices=[]):
        data = factory(config.data)()
        data.setup("fit")
        return token_shape(next(iter(data.train_dataloader())))[1]


def _count_blocks(name: str) -> int:
    return int(load_configuration(name).get_text_config().num_hidden_layers)


def factory(config: DictConfig, *, without: Sequence[str] = ()) -> Callable[..., Any]:
    """Return what the configuration's `_target_` makes of its other options, less those in `without`.

    Further arguments are passed to it as they are, and lists and mappings of the configuration as plain ones: OmegaConf's own
    would stop a checkpoint from being loaded under `weights_only`.
    """
    options = {name: value for name, value in config.items() if name not in without}
    made: Callable[..., Any] = instantiate(options, _convert_="all", _partial_=True)
    return made
