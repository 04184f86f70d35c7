"""`hybridop profile`: measures this machine for the planner."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from peft import LoraConfig
from rich.console import Console, RenderableType
from rich.progress import Progress
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch
from transformers import LlamaConfig, PretrainedConfig

from lightning_hybridop.commands.configuration import ConfigurationError, compose_runs, shipped_folder
from lightning_hybridop.commands.failures import RunError
from lightning_hybridop.commands.launch import local_processes
from lightning_hybridop.devices.cache import load_measured, measured_from_dict, measured_path, save_measured
from lightning_hybridop.devices.host import best_device, named_device
from lightning_hybridop.devices.measure import Measured, measure, measured_profile, measured_setting, steps
from lightning_hybridop.modules.language_models import SMOLLM2, load_configuration
from lightning_hybridop.pipeline.exchange import gather_json
from lightning_hybridop.pipeline.links import MeasuredLink, measure_links
from lightning_hybridop.planning.fields import check_whole
from lightning_hybridop.planning.workload import DTYPE_BYTES, workload_from_dict
from lightning_hybridop.reporting.profiles import TimedPart, links_table, profile_table

PROFILE = "profile.yaml"
DTYPES = ("float32", "bfloat16", "float16")


def profile(overrides: Sequence[str]) -> None:
    """Measure this machine, or read the cache, print what was found, and write `profile.yaml` to a given folder.

    With `processes` above 1 the links between as many local processes are measured too; under torchrun every process
    measures its machine, and rank 0 prints all of them and the links.
    """
    run = compose_runs("profile", overrides)[0]
    check(run.config)
    folder = run.folder if any(override.startswith("folder=") for override in overrides) else None
    if "RANK" in os.environ:
        _profile_ranks(run.config, folder)
        return
    measured, cached = measured_here(run.config, Console(stderr=True))
    links = _local_links(run.config.processes) if run.config.processes > 1 else []
    _report([measured], links, folder)
    if cached is not None:
        Console().print(f"Read from {cached}; refresh=true measures again.", soft_wrap=True, highlight=False)


def check(config: DictConfig) -> None:
    """Raise ConfigurationError for an option that cannot be measured with."""
    for name in ("rows", "length", "repeats", "processes"):
        value = config[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigurationError(f"{name}: found {value!r}, expected a whole number of at least 1.")
    if config.dtype not in DTYPES:
        raise ConfigurationError(f"dtype: found {config.dtype!r}, expected one of {', '.join(DTYPES)}.")
    targets = config.model.lora_targets
    if not isinstance(targets, ListConfig) or not targets:
        raise ConfigurationError(
            f"model.lora_targets: found {targets!r}, expected a list of projections, such as [q_proj, v_proj]."
        )
    for name in ("lora_rank", "lora_alpha"):
        check_whole(f"model.{name}", config.model[name], 1, error=ConfigurationError)
    if not isinstance(config.refresh, bool):
        raise ConfigurationError(f"refresh: found {config.refresh!r}, expected true or false.")


def measured_here(config: DictConfig, console: Console) -> tuple[Measured, Path | None]:
    """Return this machine's measurement, and the cached file that it was read from if it was."""
    device = best_device() if config.device is None else named_device(str(config.device))
    dtype = getattr(torch, config.dtype)
    lora = LoraConfig(
        r=config.model.lora_rank,
        lora_alpha=config.model.lora_alpha,
        target_modules=list(config.model.lora_targets),
        task_type="CAUSAL_LM",
    )
    name = str(config.model.name)
    setting = measured_setting(
        model=name, device=device, dtype=dtype, rows=config.rows, length=config.length, lora=lora
    )
    found = None if config.refresh else load_measured(setting)
    if found is not None:
        return found, measured_path(setting)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"Measuring {name} on {device}", total=steps(config.repeats))
        measured = measure(
            model_configuration(name),
            device=device,
            dtype=dtype,
            rows=config.rows,
            length=config.length,
            lora=lora,
            repeats=config.repeats,
            model=name,
            step=lambda: progress.advance(task),
        )
    save_measured(measured)
    return measured, None


def model_configuration(name: str) -> PretrainedConfig:
    """Return a model's configuration; SmolLM2's is built from the shipped workload, which needs no model file."""
    if name != SMOLLM2:
        return load_configuration(name)
    workload = workload_from_dict(
        OmegaConf.to_container(OmegaConf.load(shipped_folder("conf") / "workload" / "smollm2_135m.yaml"))
    )
    sizes = workload.architecture
    return LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.blocks,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.key_value_heads,
        tie_word_embeddings=sizes.tied_embeddings,
    )


def _profile_ranks(config: DictConfig, folder: Path | None) -> None:
    dist.init_process_group("gloo")
    try:
        rank = dist.get_rank()
        measured, _ = measured_here(config, Console(stderr=True, quiet=rank > 0))
        links = measure_links()
        everywhere = [measured_from_dict(values) for values in gather_json(dataclasses.asdict(measured))]
    finally:
        dist.destroy_process_group()
    if rank == 0:
        _report(everywhere, links, folder)


def _local_links(processes: int) -> list[MeasuredLink]:
    """Start processes on this host that measure the links between them."""
    config = local_processes(processes, run_id="profile")
    try:
        answers: dict[int, list[MeasuredLink]] = elastic_launch(config, _links_of_a_rank)()
    except ChildFailedError as error:
        raise RunError(f"The links between {processes} processes of this host cannot be measured.") from error
    return answers[0]


def _links_of_a_rank() -> list[MeasuredLink]:
    dist.init_process_group("gloo")
    try:
        return measure_links()
    finally:
        dist.destroy_process_group()


def _report(measurements: Sequence[Measured], links: Sequence[MeasuredLink], folder: Path | None) -> None:
    console = Console()
    for rank, measured in enumerate(measurements):
        console.print(_table(measured, rank if len(measurements) > 1 else None))
    if links:
        console.print(
            links_table([(f"rank {each.first}", f"rank {each.second}", each.link) for each in links])
        )
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for rank, measured in enumerate(measurements):
        path = folder / (PROFILE if rank == 0 else f"profile_{rank}.yaml")
        values = dataclasses.asdict(measured_profile(measured))
        path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
        console.print(f"Wrote {path}", soft_wrap=True, highlight=False)


def _table(measured: Measured, rank: int | None) -> RenderableType:
    setting = measured.setting
    parts = [
        TimedPart(
            name="one block",
            forward=measured.block_forward,
            backward=measured.block_backward,
            flops=measured.block_flops,
        ),
        TimedPart(name="embedding", forward=measured.embedding_forward, backward=None, flops=0.0),
        TimedPart(
            name="head and loss",
            forward=measured.head_forward,
            backward=measured.head_backward,
            flops=measured.head_flops,
        ),
    ]
    elements = measured.activation_elements
    of_rank = "" if rank is None else f"rank {rank} · "
    return profile_table(
        parts,
        title=f"{of_rank}{setting.model} in {setting.dtype} on {setting.device} ({setting.device_name}), "
        f"{setting.rows} x {setting.length} tokens",
        memory_bytes=measured.memory_bytes,
        activation_bytes=None if elements is None else elements * DTYPE_BYTES[setting.dtype],
    )
