"""From a configuration to the plan of its run and the objects that carry it out."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from hydra.utils import instantiate
from omegaconf import DictConfig

from lightning_hybridop.commands.configuration import ConfigurationError
from lightning_hybridop.planning.plan import Plan, Role, even_plan, load_plan

PLAN_OPTIONS = ("micro_batches", "queries", "exit_queries", "schedule", "difference", "exit_baseline")
"""The options of `strategy` that are part of a plan."""


def run_plan(config: DictConfig) -> Plan:
    """Return the plan of `config.plan`, else an even split of the model over the cluster's stages.

    Raises PlanError or ConfigurationError when there is no such plan.
    """
    if config.plan is not None:
        return load_plan(config.plan)
    cluster = config.cluster
    if cluster.zo_role not in ("zo", "frozen"):
        raise ConfigurationError(f"cluster.zo_role is {cluster.zo_role!r}, expected zo or frozen.")
    plan = even_plan(
        blocks=config.model.blocks or _count_blocks(config.model.name),
        stages=cluster.zo_stages + cluster.bp_stages,
        zo_stages=cluster.zo_stages,
        **{name: config.strategy[name] for name in PLAN_OPTIONS},
    )
    stages = tuple(
        dataclasses.replace(
            stage,
            role=cast(Role, cluster.zo_role) if stage.role == "zo" else stage.role,
            device=cluster.device,
        )
        for stage in plan.stages
    )
    return dataclasses.replace(plan, stages=stages)


def _count_blocks(name: str) -> int:
    from transformers import AutoConfig  # slow to import, and not every model needs it

    try:
        configuration = AutoConfig.from_pretrained(Path(name).expanduser() if Path(name).is_dir() else name)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigurationError(
            f"model.name={name} is neither a model's folder nor one that the Hugging Face hub delivers ({reason})."
        ) from error
    return int(configuration.get_text_config().num_hidden_layers)


def factory(config: DictConfig, *, without: Sequence[str] = ()) -> Callable[..., Any]:
    """Return what the configuration's `_target_` makes of its other options, less those in `without`.

    Further arguments are passed to it as they are, and lists and mappings of the configuration as plain ones: OmegaConf's own
    would stop a checkpoint from being loaded under `weights_only`.
    """
    options = {name: value for name, value in config.items() if name not in without}
    made: Callable[..., Any] = instantiate(options, _convert_="all", _partial_=True)
    return made
