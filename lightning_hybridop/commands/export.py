"""`hybridop export`: writes a stage's graphs as ONNX, for the compilers of other devices."""

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch
from omegaconf import DictConfig, ListConfig
from peft import TaskType
from rich.console import Console

from lightning_hybridop.commands.configuration import ConfigurationError, check_folder, compose_runs
from lightning_hybridop.modules.fine_tuning import with_adapters
from lightning_hybridop.modules.language_models import load_language_model
from lightning_hybridop.pipeline.anatomy import read_anatomy
from lightning_hybridop.pipeline.executors.export import export_stage
from lightning_hybridop.pipeline.stage import StageModel
from lightning_hybridop.planning.fields import check_whole
from lightning_hybridop.planning.plan import DTypeName, Stage, WeightsName, load_plan
from lightning_hybridop.reporting.operators import operator_table


def export(overrides: Sequence[str]) -> None:
    """Write forward.onnx, adjoint.onnx, weights.bin and stage.json to a folder, and print the operators' types."""
    run = compose_runs("export", overrides)[0]
    _check(run.config)
    check_folder(run.folder)
    model, _ = load_language_model(str(run.config.model.name), dtype=torch.float32)
    adapted = with_adapters(model, TaskType.CAUSAL_LM, run.config.model)
    anatomy = read_anatomy(adapted)
    stage = _stage(run.config, anatomy.blocks)
    part = StageModel(adapted, anatomy, first=stage.first, last=stage.last)
    run.folder.mkdir(parents=True, exist_ok=True)
    graphs = export_stage(
        part,
        run.folder,
        rows=run.config.rows,
        length=run.config.length,
        dtype=run.config.dtype or stage.dtype or "float32",
        weights=run.config.weights or stage.weights,
    )
    console = Console()
    title = (
        f"{run.config.model.name}, blocks {stage.block_range}, {run.config.rows} x {run.config.length} tokens"
    )
    console.print(operator_table({graph.path.name: graph.operators for graph in graphs}, title=title))
    _print_files(console, run.folder)


def _print_files(console: Console, folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        console.print(f"{path} ({path.stat().st_size / 1e3:,.0f} kB)", soft_wrap=True, highlight=False)


def _check(config: DictConfig) -> None:
    for name in ("rows", "length"):
        check_whole(name, config[name], 1, error=ConfigurationError)
    for name, choices in (("dtype", get_args(DTypeName)), ("weights", get_args(WeightsName))):
        if config[name] not in (None, *choices):
            raise ConfigurationError(f"{name}: found {config[name]!r}, expected one of {', '.join(choices)}.")
    targets = config.model.lora_targets
    if not isinstance(targets, ListConfig) or not targets:
        raise ConfigurationError(
            f"model.lora_targets: found {targets!r}, expected a list of projections, such as [q_proj, v_proj]."
        )


def _stage(config: DictConfig, blocks: int) -> Stage:
    """Return the stage asked for: one of a plan, or of the blocks named."""
    if config.plan is None:
        last = blocks if config.last is None else config.last
        check_whole("first", config.first, 0, blocks - 1, error=ConfigurationError)
        check_whole("last", last, config.first + 1, blocks, error=ConfigurationError)
        return Stage(first=config.first, last=last)
    stages = load_plan(config.plan).stages
    check_whole("stage", config.stage, 0, len(stages) - 1, error=ConfigurationError)
    stage: Stage = stages[config.stage]
    if stage.last > blocks:
        raise ConfigurationError(
            f"plan: stage {config.stage} ends with block {stage.last - 1}, but {config.model.name} has {blocks} blocks; pass the "
            "model that it was made for."
        )
    return stage
