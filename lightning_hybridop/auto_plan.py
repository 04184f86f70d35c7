"""`plan="auto"`: every rank measures itself and its links, rank 0 plans, and all ranks get its plan."""

import dataclasses
import hashlib
import math
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from peft import LoraConfig, PeftModel
from transformers import PretrainedConfig, PreTrainedModel

from lightning_hybridop.devices.cache import load_measured, save_measured
from lightning_hybridop.devices.host import available_memory, device_count
from lightning_hybridop.devices.measure import Measured, measure, measured_profile, measured_setting
from lightning_hybridop.pipeline.anatomy import Anatomy, CutError
from lightning_hybridop.pipeline.exchange import broadcast_json, gather_json
from lightning_hybridop.pipeline.interface import host_name, hosts_to_name
from lightning_hybridop.pipeline.links import MeasuredLink, measure_links
from lightning_hybridop.pipeline.ownership import block_dtype
from lightning_hybridop.planning.cluster import BYTES_PER_GB, Cluster, Device, profile_from_dict
from lightning_hybridop.planning.plan import Plan, plan_from_dict, plan_to_dict
from lightning_hybridop.planning.planner import plan_pipeline
from lightning_hybridop.planning.workload import Adapter, Workload, architecture_from_config
from lightning_hybridop.simulation.predict import simulate_layout, with_prediction

NO_TIME = 1e-9
REPEATS = 3
"""Timed passes of each part: all ranks of a run wait for them."""


def place_by_measuring(
    module: LightningModule,
    anatomy: Anatomy,
    *,
    device: torch.device,
    forward_only: bool,
    local_rank: int,
    processes_here: int,
    mini_batch: tuple[int, int],
    options: Mapping[str, Any],
) -> tuple[Plan, list[int]]:
    """Return the planner's plan with one stage per rank, and the rank of each stage. Collective.

    `device` is what this rank computes on, `forward_only` whether its stage is zo, `local_rank` which of the
    `processes_here` of its host it is. `mini_batch` is the number of rows and of tokens per row to plan for; `options`
    are further fields of the plan, of which `micro_batches` may be None: the planner then chooses. Times are read from
    the cache where it has them; memory is that of now.

    Raises:
        CutError: the module has no Hugging Face model to measure.
        InfeasibleError: the model does not fit into the memory of these devices.
    """
    config, lora = _language_model(module)
    rows, length = mini_batch
    dtype = block_dtype(module.get_submodule(f"{anatomy.blocks_name}.0"))
    micro_batches = options["micro_batches"]
    # Processes of one host share its devices and their memory.
    memory = available_memory(device) / math.ceil(processes_here / max(1, device_count(device)))
    # As many at a time as the host can run beside each other: more would only wait for a core, which in a pipeline,
    # where most stages are idle at any time, they do not.
    beside = processes_here
    if device.type == "cpu":
        beside = min(processes_here, max(1, (os.cpu_count() or 1) // torch.get_num_threads()))
    measured = _measured(
        config,
        lora,
        beside=beside,
        turn=local_rank // beside,
        device=device,
        dtype=dtype,
        rows=max(1, rows // (micro_batches or 4)),
        length=length,
    )
    if not any("CausalLM" in type(child).__name__ for child in module.modules()):
        # What was measured has a language model's head; that of a classifier costs next to nothing.
        measured = dataclasses.replace(measured, head_forward=NO_TIME, head_backward=NO_TIME)
    architecture = architecture_from_config(config.to_dict(), name=measured.setting.model)
    profile = measured_profile(measured, name=f"rank {dist.get_rank()}")
    mine = {
        **dataclasses.asdict(profile),
        "forward_only": forward_only,
        "memory_gb": memory / BYTES_PER_GB,
    }
    profiles = gather_json([mine, measured.activation_elements])
    links = measure_links()
    workload = Workload(
        architecture=dataclasses.replace(architecture, blocks=anatomy.blocks),
        adapter=Adapter(rank=measured.setting.lora_rank, targets=measured.setting.lora_targets),
        rows=rows,
        length=length,
        dtype=measured.setting.dtype,
        activation_elements=max((kept for _, kept in profiles if kept), default=None),
        wire=options["wire"],
    )
    planned = None
    if dist.get_rank() == 0:
        plan = _planned(_cluster([values for values, _ in profiles], links), workload, options)
        planned = {**plan_to_dict(plan), "devices": [stage.name for stage in plan.stages]}
    values = broadcast_json(planned, source=0)
    ranks = [int(name.split()[-1]) for name in values.pop("devices")]
    devices = gather_json(str(device))
    hosts = hosts_to_name(gather_json(host_name()))
    plan = plan_from_dict(values)
    stages = tuple(
        dataclasses.replace(stage, device=devices[rank], host=hosts[rank])
        for stage, rank in zip(plan.stages, ranks, strict=True)
    )
    return dataclasses.replace(plan, stages=stages), ranks


def _planned(cluster: Cluster, workload: Workload, options: Mapping[str, Any]) -> Plan:
    """Return the best plan that uses every device, with what is predicted of it."""
    # A central difference runs every query twice.
    signs = 2 if options["difference"] == "central" else 1
    pipeline = plan_pipeline(
        cluster,
        workload,
        micro_batches=options["micro_batches"],
        queries=signs * options["queries"],
        exit_queries=signs * options["exit_queries"],
        exit_baseline=options["exit_baseline"],
        estimator=options["estimator"],
        queries_per_forward=(signs if options["estimator"] == "boundary" else 1)
        * options["queries_per_forward"],
        use_all=True,
    )
    others = {name: value for name, value in options.items() if name not in ("micro_batches", "wire")}
    plan = dataclasses.replace(pipeline.plan, **others)
    return with_prediction(plan, simulate_layout(pipeline.costs, pipeline.layout, plan))


def _cluster(profiles: list[Mapping[str, Any]], links: list[MeasuredLink]) -> Cluster:
    devices = tuple(Device(name=values["name"], profile=profile_from_dict(values)) for values in profiles)
    return Cluster(
        name="ranks",
        devices=devices,
        links={
            _pair(devices[measured.first].name, devices[measured.second].name): measured.link
            for measured in links
        },
    )


def _pair(first: str, second: str) -> tuple[str, str]:
    return (min(first, second), max(first, second))


def _measured(
    config: PretrainedConfig,
    lora: LoraConfig | None,
    *,
    beside: int,
    turn: int,
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    length: int,
) -> Measured:
    """Return what the cache has of this rank's device, or what is measured now, `beside` ranks of a host at a time."""
    model = _measured_name(config, beside)
    asked: dict[str, Any] = {"device": device, "dtype": dtype, "rows": rows, "length": length, "lora": lora}
    known = load_measured(measured_setting(model=model, **asked))
    # One rank that measures alone would find an idle host.
    if all(gather_json(known is not None)):
        assert known is not None
        return known
    found = None
    for number in range(max(gather_json(turn)) + 1):
        if number == turn:
            found = measure(config, model=model, repeats=REPEATS, **asked)
            save_measured(found)
        dist.barrier()
    assert found is not None
    return found


def _measured_name(config: PretrainedConfig, beside: int) -> str:
    """Return what the cache calls a model measured by `beside` processes at a time: another for any other block."""
    sizes = architecture_from_config(config.to_dict())
    block = hashlib.sha256(repr(dataclasses.replace(sizes, blocks=1)).encode()).hexdigest()[:8]
    return f"{config.model_type}-{sizes.hidden}-{block}-{beside}-beside"


def _language_model(module: LightningModule) -> tuple[PretrainedConfig, LoraConfig | None]:
    """Return the configurations of the Hugging Face model in a module and of its LoRA adapter, if it has one."""
    models = [child for child in module.modules() if isinstance(child, PreTrainedModel)]
    if not models:
        raise CutError(
            "plan='auto' measures the blocks of a Hugging Face model, but the module has none; pass a plan, or stages and "
            "zo_stages."
        )
    adapted = [child for child in module.modules() if isinstance(child, PeftModel)]
    adapters = [
        value for child in adapted for value in child.peft_config.values() if isinstance(value, LoraConfig)
    ]
    return models[0].config, adapters[0] if adapters else None
