"""`hybridop doctor`: tries on every host what a run needs, and says what is missing and how to mend it."""

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from lightning_hybridop.commands import launch
from lightning_hybridop.commands.configuration import compose_runs
from lightning_hybridop.commands.failures import sentence
from lightning_hybridop.commands.parts import factory, run_plan
from lightning_hybridop.commands.planned import configured_hosts
from lightning_hybridop.configurations import is_path
from lightning_hybridop.devices.host import available_memory, device_name, named_device
from lightning_hybridop.modules.language_models import load_configuration
from lightning_hybridop.pipeline import world
from lightning_hybridop.pipeline.agreement import check_facts, versions
from lightning_hybridop.pipeline.exchange import gather_json
from lightning_hybridop.pipeline.interface import GLOO_INTERFACE, host_name, lan_address, route_to
from lightning_hybridop.pipeline.links import measure_links
from lightning_hybridop.pipeline.wire import decode, encode, encoded_bytes
from lightning_hybridop.placement import check_process_count, ranks_on_hosts
from lightning_hybridop.planning.plan import MIB, Plan, Stage
from lightning_hybridop.reporting.findings import Finding, findings_table, links_table

SECONDS_TO_MEET = 60
WIDTH = 140
"""Of the tables where there is no terminal."""

PROBE = 64
"""Rows and columns of what is computed and sent as a trial."""

TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}
WIRE_FORMATS = ("float32", "bfloat16", "float16", "int8")
EXECUTOR_PACKAGES = {"torch": (), "openvino": ("openvino", "onnx"), "onnxruntime": ("onnxruntime", "onnx")}
MAY_DIFFER = {"folder", "port", "hosts", "debug", "strategy.interface"}


class DoctorError(RuntimeError):
    """A run would not start; the table above says why."""


class _Notes:
    """What was found so far by this process."""

    def __init__(self, rank: int) -> None:
        self.findings: list[Finding] = []
        self._rank = rank

    def add(self, topic: str, found: str, remedy: str | None = None) -> None:
        self.findings.append(
            Finding(rank=self._rank, host=host_name(), topic=topic, found=found, remedy=remedy)
        )

    def attempt(self, topic: str, action: Callable[[], str | None], remedy: str = "") -> bool:
        """Do something, and note what it says of itself (None: nothing) or why it failed; return whether it went well."""
        try:
            found = action()
        except Exception as error:
            # The sentences of this package end with what to do.
            said, _, advice = sentence(error).rpartition("; ")
            self.add(topic, said or advice, advice if said else remedy or "see the message")
            return False
        if found is not None:
            self.add(topic, found)
        return True


def doctor(overrides: Sequence[str]) -> None:
    """Look at this host, and under torchrun also at what lies between all; rank 0 prints the tables.

    Raises:
        DoctorError: a run would not start.
        SystemExit: likewise, on the ranks that print nothing.
    """
    # Nothing is written; a folder named after the time would be another one on each rank.
    config = compose_runs("doctor", overrides, folder=Path(os.sep))[0].config
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    together = "RANK" in os.environ
    notes = _Notes(rank)
    plans: list[Plan] = []
    notes.add("versions", ", ".join(f"{name} {version}" for name, version in versions().items()))
    met = together and notes.attempt(
        "meeting", lambda: _meet(config, rank, size), "see that all hosts were started"
    )
    if met:
        # As a run plans: for those that have come.
        came = gather_json(host_name())
        config.present = came if "HYBRIDOP_HOST" in os.environ else None
    notes.attempt("plan", lambda: _plan(config, plans))
    notes.attempt("data", lambda: _data(config), "pass other data")
    notes.attempt("model", lambda: _model(config), "pass another model")
    plan = plans[0] if plans else None
    rows: list[tuple[str, str, float, float]] = []
    if together:
        _try_stage(notes, _stage(notes, config, plan) if met else None)
        if met:
            notes.attempt(
                "hidden states over Gloo", _send_hidden_states, "look at the interface and the firewall"
            )
            rows = _links()
            notes.findings = [Finding(**values) for told in gather_json(_plain(notes)) for values in told]
            world.leave()
        prints = rank == 0 or not met
    else:
        _alone(notes, config, plan)
        prints = True
    failed = [finding for finding in notes.findings if finding.remedy is not None]
    if prints:
        console = Console(width=None if sys.stdout.isatty() else WIDTH)
        console.print(findings_table(notes.findings))
        if rows:
            console.print(links_table(rows))
        if not failed:
            alone = "" if together or plan is None or len(plan.stages) == 1 else _what_was_not_tried(plan)
            console.print(f"A run would start.{alone}", highlight=False)
    if failed and prints:
        raise DoctorError(
            f"A run would not start: {len(failed)} of {len(notes.findings)} checks failed; the table says how to mend each."
        )
    if failed:
        raise SystemExit(1)


def _plain(notes: _Notes) -> list[dict[str, Any]]:
    return [asdict(finding) for finding in notes.findings]


def _plan(config: DictConfig, plans: list[Plan]) -> str:
    plan = run_plan(config)
    plans.append(plan)
    stages = ", ".join(f"{stage.role} {stage.block_range}" for stage in plan.stages)
    return f"{len(plan.stages)} stages: {stages}"


def _data(config: DictConfig) -> str:
    data = factory(config.data)()
    data.setup("fit")
    return f"{type(data).__name__} found"


def _model(config: DictConfig) -> str:
    found = load_configuration(config.model.name)
    return f"{config.model.name} found: {found.model_type}"


def _meet(config: DictConfig, rank: int, size: int) -> str:
    world.enter(
        rank=rank,
        size=size,
        timeout=timedelta(seconds=SECONDS_TO_MEET),
        patience=config.strategy.heartbeat,
        interface=config.strategy.interface,
    )
    interface = os.environ.get(GLOO_INTERFACE, "")
    address = lan_address(interface.partition(",")[0])
    return (
        f"{size} processes at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}, over {interface} ({address}); their "
        "versions agree"
    )


def _stage(notes: _Notes, config: DictConfig, plan: Plan | None) -> Stage | None:
    """Compare the configurations, and return this rank's stage, having noted what does not fit. Collective."""

    def compare() -> None:
        values = OmegaConf.to_container(config)
        assert isinstance(values, dict)
        facts = {
            name: text for name, text in _flat(values) if not {name, name.partition(".")[0]} & MAY_DIFFER
        }
        check_facts(facts, "configuration")

    same = notes.attempt("configuration", compare)
    if not all(gather_json(plan is not None and same)):
        return None
    hosts = gather_json(host_name())
    found: list[Stage] = []

    def place() -> str:
        assert plan is not None
        check_process_count(plan, ranks=len(hosts))
        wanted = [stage.host for stage in plan.stages]
        index = ranks_on_hosts(wanted, hosts, replicas=plan.replicas).index(dist.get_rank()) % len(wanted)
        found.append(plan.stages[index])
        return f"stage {index}: {found[0].role}, blocks {found[0].block_range}"

    notes.attempt("stage", place)
    return found[0] if found else None


def _flat(values: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{name}.")
        elif not is_path(value):  # those may differ
            found.append((f"{prefix}{name}", str(value)))
    return found


def _try_stage(notes: _Notes, stage: Stage | None) -> None:
    """Try the device of a stage; the CPU where there is no stage."""
    stage = stage or Stage(first=0, last=1)
    packages = EXECUTOR_PACKAGES[stage.executor]
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        extra = "onnx" if stage.executor == "onnxruntime" else stage.executor
        notes.add(
            "executor",
            f"{stage.executor} needs {' and '.join(missing)}, which is not installed here",
            f"pip install 'lightning-hybridop[{extra}]'",
        )
    elif packages:
        notes.add("executor", f"{stage.executor} is installed")
    remedy = "change the stage's device in the plan or the hosts file, or install what torch needs for it"
    if notes.attempt("device", lambda: _device(stage), remedy):
        name = stage.dtype or "float32"
        notes.attempt("forward", lambda: _forward(stage, name), remedy)
        if stage.role == "bp":
            notes.attempt("backward", lambda: _backward(stage, name), "give the stage the role zo or frozen")


def _device(stage: Stage) -> str:
    device = named_device(stage.device)
    return f"{device}: {device_name(device)}, {available_memory(device) / MIB:,.0f} MiB free"


def _weights(stage: Stage, dtype: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return an input, weights and their product as the CPU has it, the first two on the stage's device."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(PROBE, PROBE, generator=generator)
    weights = torch.randn(PROBE, PROBE, generator=generator) / PROBE**0.5
    target: dict[str, Any] = {"device": named_device(stage.device), "dtype": getattr(torch, dtype)}
    return rows.to(**target), weights.to(**target), rows @ weights


def _forward(stage: Stage, dtype: str) -> str:
    rows, weights, expected = _weights(stage, dtype)
    with torch.no_grad():
        found = (rows @ weights).float().cpu()
    _compare(found, expected, dtype)
    return f"a product in {dtype} agrees with the CPU's"


def _backward(stage: Stage, dtype: str) -> str:
    rows, weights, _ = _weights(stage, dtype)
    weights.requires_grad_()
    (rows @ weights).sum().backward()  # type: ignore[no-untyped-call]
    assert weights.grad is not None
    expected = rows.float().cpu().sum(0, keepdim=True).T.expand(PROBE, PROBE)
    _compare(weights.grad.float().cpu(), expected, dtype)
    return f"its gradient in {dtype} agrees with the formula"


def _compare(found: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
    worst = float((found - expected).abs().max() / expected.abs().max())
    if not worst <= TOLERANCE[dtype]:
        raise DoctorError(
            f"The device computes something else than expected in {dtype} (off by {worst:.1%} of the largest value); choose "
            "another dtype, or update its driver."
        )


def _send_hidden_states() -> str | None:
    """Send each rank's neighbour what a stage sends the next one, in each format that hidden states travel in."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return None
    for name in WIRE_FORMATS:
        form = getattr(torch, name)
        received = torch.empty(encoded_bytes((PROBE, PROBE), form), dtype=torch.uint8)
        sending = dist.isend(encode(_hidden_states_of(rank), form), (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
        assert sending is not None
        sending.wait()
        # Rows of whole numbers, which every format has exactly.
        found = decode(received, (PROBE, PROBE), form).float()
        if not torch.equal(found, _hidden_states_of((rank - 1) % size)):
            raise DoctorError(
                f"Other values arrived in {name} than were sent; look at the interface, its driver and its cable."
            )
    return f"arrive as they were sent ({', '.join(WIRE_FORMATS)})"


def _hidden_states_of(rank: int) -> torch.Tensor:
    values = torch.arange(PROBE * PROBE, dtype=torch.float32).reshape(PROBE, PROBE)
    values = (values + rank) % 127 + 1
    values[:, 0] = 127  # so that the steps of int8 are whole numbers
    return values


def _links() -> list[tuple[str, str, float, float]]:
    """Return the link between each two ranks: who they are, its Mbit/s and its latency in ms. Collective."""
    names = [f"{rank} ({host})" for rank, host in enumerate(gather_json(host_name()))]
    return [
        (
            names[measured.first],
            names[measured.second],
            measured.link.bandwidth_mbit_s,
            measured.link.latency_ms,
        )
        for measured in measure_links()
    ]


def _alone(notes: _Notes, config: DictConfig, plan: Plan | None) -> None:
    """Try what one process can: the port, the way to the other hosts, and the devices of the stages here."""
    hosts = configured_hosts(config)
    if hosts is None:
        notes.attempt("port", lambda: _port(config))
    else:
        for host in hosts.hosts:
            if host.name != host_name():
                address = route_to(host.reached_at)
                notes.add(
                    "route",
                    f"to {host.name} at {host.reached_at}: {'none' if address is None else f'from {address}'}",
                    "give its address in the hosts file, or connect this host to its network"
                    if address is None
                    else None,
                )
    if plan is None:
        _try_stage(notes, None)
        return
    here = [stage for stage in plan.stages if stage.host in (None, host_name())]
    kinds: dict[tuple[str, str, str | None, str], Stage] = {}
    for stage in here:
        kinds.setdefault((stage.device, stage.role, stage.dtype, stage.executor), stage)
    for stage in kinds.values():
        _try_stage(notes, stage)


def _port(config: DictConfig) -> str:
    launch.check_port(config.port)
    return "one is found when the run starts" if config.port is None else f"{config.port} can be used"


def _what_was_not_tried(plan: Plan) -> str:
    away = [stage for stage in plan.stages if stage.host not in (None, host_name())]
    if not away:
        return ""
    return (
        f" Only {host_name()} was looked at; `hybridop launch command=doctor start=true` with the same options tries all hosts "
        "and what lies between them."
    )
