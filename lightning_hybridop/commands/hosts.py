"""`hybridop launch`: what to start on each host of a hosts file, printed or started over ssh."""

import os
import re
import shlex
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from lightning_hybridop.commands.configuration import ConfigurationError, compose_runs
from lightning_hybridop.commands.failures import RunError, RunInterruptedError
from lightning_hybridop.commands.fit import check_plan_overrides
from lightning_hybridop.commands.parts import run_plan
from lightning_hybridop.commands.planned import configured_hosts
from lightning_hybridop.pipeline.interface import host_name, leads_here
from lightning_hybridop.planning.fields import check_whole
from lightning_hybridop.planning.hosts import Host, Hosts
from lightning_hybridop.planning.plan import Plan

RESTARTS_WITHOUT_HOST = 3
"""How often a run that may go on with fewer hosts is started again, unless more was asked for."""

OWN = ("command", "start", "min_hosts", "hosts")
"""Options of `hybridop launch` that it does not hand on as they are."""

SSH = ("ssh", "-tt", "-o", "BatchMode=yes")
"""A terminal there makes everything that was started end with the connection."""

SECONDS_TO_END = 15.0
"""How long the hosts have to end by themselves once one of them has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCommand:
    """What to start on one host: the number of processes, and the command line with its environment."""

    host: Host
    processes: int
    environment: Mapping[str, str]
    arguments: tuple[str, ...]

    @property
    def text(self) -> str:
        """The whole line, for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        program, *arguments = self.arguments
        line = " ".join([*variables, _quoted_path(program), *map(shlex.quote, arguments)])
        return f"cd {_quoted_path(self.host.folder)} && {line}" if self.host.folder else line


def _quoted_path(path: str) -> str:
    """Return a path as a shell takes it, which has its home folder in the place of a `~` without quotes."""
    home, slash, rest = path.partition("/")
    return f"~{slash}{shlex.quote(rest) if rest else ''}" if home == "~" else shlex.quote(path)


def launch(overrides: Sequence[str]) -> None:
    """Print the command of each host, or start them all and wait for their end.

    Raises:
        ConfigurationError: there are no hosts, or the plan does not say where its stages are.
        RunError: a host's command failed; all others have been ended by then.
    """
    check_plan_overrides([override for override in overrides if not override.startswith("hosts=")])
    config = compose_runs("launch", overrides)[0].config
    commands = host_commands(config, overrides)
    if config.start:
        start(commands, needed=config.min_hosts or len(commands))
        return
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for command in commands:
        plural = "es" if command.processes > 1 else ""
        console.print(
            f"# {command.host.name} ({command.host.reached_at}), {command.processes} process{plural}:"
        )
        console.print(f"{command.text}\n")
    first = min(commands, key=lambda command: command.host.reached_at).host
    console.print(f"# Rank 0, which writes the run's folder, is on {first.name}.")


def host_commands(config: DictConfig, overrides: Sequence[str]) -> list[HostCommand]:
    """Return what to start on each host that has a stage of the plan."""
    hosts = configured_hosts(config)
    if hosts is None:
        raise ConfigurationError(
            "This cluster names no hosts; pass hosts=<file>, or cluster=lan with 'cluster.hosts=[...]'."
        )
    if config.command not in ("fit", "doctor"):
        raise ConfigurationError(f"command is {config.command!r}, expected fit or doctor.")
    if not isinstance(config.start, bool):
        raise ConfigurationError(f"start: found {config.start!r}, expected true or false.")
    check_whole("restarts", config.restarts, 0, error=ConfigurationError)
    used = [host for host in hosts.hosts if processes_on_hosts(hosts, run_plan(config))[host.name]]
    # As the run will plan, once these have come.
    config.present = [host.name for host in used]
    counts = processes_on_hosts(hosts, run_plan(config))
    if config.min_hosts is not None:
        check_whole("min_hosts", config.min_hosts, 1, len(used), error=ConfigurationError)
    # Whoever is left when a host is lost fails once with it.
    restarts = (config.restarts or RESTARTS_WITHOUT_HOST) if config.min_hosts is not None else config.restarts
    port = hosts.port if config.port is None else config.port
    nodes = f"{config.min_hosts}:{len(used)}" if config.min_hosts is not None else str(len(used))
    handed_on = _handed_on(config, overrides)
    found = []
    for host in used:
        meets_here = host.name == hosts.meeting_place.name
        environment = {"HYBRIDOP_HOST": host.name, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        if config.min_hosts is not None:
            # torchrun would else go on looking for the processes' store on the host that was the first one.
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        if host.interface is not None:
            environment["GLOO_SOCKET_IFNAME"] = host.interface
        arguments = (
            host.python,
            *("-m", "torch.distributed.run"),
            *("--nnodes", nodes),
            *("--nproc-per-node", str(counts[host.name])),
            *("--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"{_bracketed(hosts.meeting_place.reached_at)}:{port}"),
            *("--rdzv-conf", f"is_host={int(meets_here)}"),
            *("--rdzv-id", f"hybridop-{config.name}"),
            *("--local-addr", host.reached_at),
            *("--max-restarts", str(restarts)),
            *("-m", "lightning_hybridop", config.command),
            *(_going_on(config, overrides) if restarts > 0 and config.command == "fit" else ()),
            *handed_on,
        )
        found.append(
            HostCommand(host=host, processes=counts[host.name], environment=environment, arguments=arguments)
        )
    if all(command.host.name != hosts.meeting_place.name for command in found):
        raise ConfigurationError(
            f"The plan has no stage on {hosts.meeting_place.name}, where the hosts are to meet; pass another one as master, or "
            "use_all=true."
        )
    return found


def processes_on_hosts(hosts: Hosts, plan: Plan) -> Counter[str]:
    """Return how many processes each host runs: one for each of the plan's stages there and replica.

    Raises ConfigurationError for a stage without a host, or on one that is not in the hosts file.
    """
    known = [host.name for host in hosts.hosts]
    for index, stage in enumerate(plan.stages):
        if stage.host not in known:
            raise ConfigurationError(
                f"stages[{index}].host: found {stage.host}, expected one of the hosts file's ({', '.join(known)})."
            )
    return Counter(str(stage.host) for stage in plan.stages * plan.replicas)


def _handed_on(config: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Return the overrides for every host, with the hosts file's content in the place of its path."""
    kept = [override for override in overrides if override.partition("=")[0].lstrip("+") not in OWN]
    if config.get("hosts") is None:
        return kept
    return [*kept, f"hosts={override_value(OmegaConf.to_container(config.cluster))}"]


def _going_on(config: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Return the overrides by which a run goes on from its latest checkpoint, whichever host is left, where none says otherwise."""
    given = {override.partition("=")[0].lstrip("+") for override in overrides}
    chosen = {"resume": "auto", "strategy.checkpoint_copies": "true"}
    return [f"{name}={value}" for name, value in chosen.items() if name not in given]


def override_value(value: Any) -> str:
    """Return a value of plain containers as Hydra's overrides are written."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{override_value(part)}" for name, part in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(override_value(part) for part in value) + "]"
    if isinstance(value, (int, float)):
        return repr(value)
    # Backslashes stand for themselves unless a quote follows.
    escaped = re.sub(r'(\\*)("|$)', lambda found: 2 * found[1] + (found[2] and '\\"'), str(value))
    return f'"{escaped}"'


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def start(commands: Sequence[HostCommand], *, needed: int) -> None:
    """Start all commands, over ssh unless the host is this one, and end them when fewer than `needed` are left.

    What they say appears behind the name of its host.

    Raises:
        RunError: naming the first host that failed.
        RunInterruptedError: this process was told to end.
    """
    width = max(len(command.host.name) for command in commands)
    lock = threading.Lock()
    processes: list[subprocess.Popen[bytes]] = []
    readers: list[threading.Thread] = []
    before = {number: signal.signal(number, _interrupted) for number in (signal.SIGTERM, signal.SIGHUP)}
    first: tuple[HostCommand, int] | None = None
    try:
        for command in commands:
            process = subprocess.Popen(
                _started_as(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=Path.home() if _is_this_host(command.host) else None,  # as ssh does
                start_new_session=True,  # a Ctrl-C is for this process, which ends the others in order
            )
            processes.append(process)
            assert process.stdout is not None
            reader = threading.Thread(
                target=_repeat, args=(process.stdout, f"{command.host.name:<{width}} | ", lock), daemon=True
            )
            reader.start()
            readers.append(reader)
        while any(process.poll() is None for process in processes):
            failed = [i for i, process in enumerate(processes) if process.poll()]
            if failed and first is None:
                first = (commands[failed[0]], int(processes[failed[0]].returncode))
            if len(processes) - len(failed) < needed:
                break
            time.sleep(0.1)
        failed = [i for i, process in enumerate(processes) if process.poll()]
        if failed and first is None:
            first = (commands[failed[0]], int(processes[failed[0]].returncode))
        lost = len(processes) - len(failed) < needed
        if lost:
            _wait(processes, SECONDS_TO_END)
    finally:
        _end(processes)
        for reader in readers:
            reader.join(timeout=5)
        for number, handler in before.items():
            signal.signal(number, handler)
    if first is not None and lost:
        raise RunError(_reason(*first))


def _started_as(command: HostCommand) -> list[str]:
    if _is_this_host(command.host):
        return ["bash", "-c", command.text]
    return [*SSH, command.host.ssh or command.host.reached_at, command.text]


def _is_this_host(host: Host) -> bool:
    return host.ssh is None and (host.name == host_name() or leads_here(host.reached_at))


def _repeat(stream: IO[bytes], prefix: str, lock: threading.Lock) -> None:
    with stream:
        for line in stream:
            # Of a progress bar only what it came to.
            text = line.decode("utf-8", errors="replace").rstrip("\r\n").rpartition("\r")[2]
            with lock:
                print(f"{prefix}{text}", flush=True)


def _interrupted(number: int, _frame: FrameType | None) -> None:
    raise RunInterruptedError(number)


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what still runs: politely, so that torchrun ends its own processes, then for good."""
    for number, patience in ((signal.SIGTERM, SECONDS_TO_END), (signal.SIGKILL, 5.0)):
        for process in processes:
            if process.poll() is None:
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:
                    continue
        _wait(processes, patience)


def _reason(command: HostCommand, code: int) -> str:
    host = command.host
    if code == 255 and not _is_this_host(host):
        return (
            f"{host.name}: ssh could not reach {host.ssh or host.reached_at}; look at what it says above, and see that "
            f"`ssh {host.ssh or host.reached_at}` works without a password."
        )
    if code < 0:
        return f"{host.name}: its command was ended by {signal.Signals(-code).name}."
    return f"{host.name}: its command ended with exit code {code}; look at what it says above."
