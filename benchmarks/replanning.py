"""Loses a device in the middle of a run and says what that costs: `python benchmarks/replanning.py`.

Each device of an emulated cluster is a host of its own here: a torchrun with one process. One of them is killed, with
its process; the others notice, meet again, plan for the devices that are left, go on from the latest checkpoint, and
finish. The closing table of the run has the times; this script adds both plans.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_hybridop.commands.configuration import compose_runs
from lightning_hybridop.commands.planned import configured_cluster
from lightning_hybridop.planning.plan import Plan, load_plan

SECONDS = 1500
"""For the whole of it, on a slow machine."""

PAPER_8B = (
    "recipe=emulated_3b",
    "name=emulated_8b",
    "cluster=paper_8b",
    "cluster.emulate=true",
    "workload=llama3_1_8b",
    "model.name=random-32-blocks",
    "model.blocks=32",
)
COMMON = ("checkpoint_every=2", "data.held_out_rows=4", "callbacks.trace=null", "resume=auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What came of a run that lost a device: its summary, and its plan afterwards."""

    summary: dict[str, Any]
    plan: Plan


def devices(overrides: Sequence[str]) -> list[str]:
    """Return the names of the devices of a configuration's cluster."""
    config = compose_runs("fit", [*overrides, *COMMON])[0].config
    return [device.name for device in configured_cluster(config).devices]


def lose(overrides: Sequence[str], *, lost: str, after_step: int, folder: Path) -> Loss:
    """Run `hybridop fit` on one torchrun per device, kill that of `lost` once a checkpoint of `after_step` is there.

    Raises:
        TimeoutError: the run did not come that far, or to its end, in time; its processes are ended.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    names = devices(overrides)
    folder.mkdir(parents=True, exist_ok=True)
    agents: dict[str, subprocess.Popen[bytes]] = {}
    deadline = time.monotonic() + SECONDS
    try:
        for name in names:
            agents[name] = _agent(
                name, names, endpoint, [*overrides, *COMMON, f"folder={folder / 'run'}"], folder
            )
        while not any(_step(path) >= after_step for path in (folder / "run").glob("recovery/*.ckpt")):
            _check(agents, deadline)
        _kill(agents.pop(lost))
        while not (folder / "run" / "summary.json").exists():
            _check(agents, deadline)
        for agent in agents.values():
            agent.wait(timeout=max(1.0, deadline - time.monotonic()))
    finally:
        for agent in agents.values():
            _kill(agent)
    summary = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
    return Loss(summary=summary, plan=load_plan(folder / "run" / "plan.yaml"))


def _agent(
    name: str, names: Sequence[str], endpoint: str, options: Sequence[str], folder: Path
) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "HYBRIDOP_HOST": name,
        "OMP_NUM_THREADS": "1",
        # The store of a run would else be torchrun's of the first host, also when that is no longer there.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(f"--nnodes={len(names) - 1}:{len(names)}", "--nproc-per-node=1", "--max-restarts=3"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=replanning"),
        *("--local-addr=127.0.0.1", "--rdzv-conf=last_call_timeout=10,join_timeout=300"),
        *("-m", "lightning_hybridop", "fit", *options),
    ]
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


def _check(agents: dict[str, subprocess.Popen[bytes]], deadline: float) -> None:
    time.sleep(0.1)
    ended = [name for name, agent in agents.items() if agent.poll() not in (None, 0)]
    if ended or time.monotonic() > deadline:
        raise TimeoutError(
            f"{', '.join(ended) or 'The run'} came to no good end; look at the logs of its hosts."
        )


def _step(path: Path) -> int:
    """Return the optimizer step in the name of a checkpoint, such as step-4.ckpt."""
    return int(path.stem.partition("-")[2])


def _kill(agent: subprocess.Popen[bytes]) -> None:
    """Kill a host: torchrun, and with its session the process that it started."""
    children = subprocess.run(["pgrep", "-P", str(agent.pid)], capture_output=True, text=True).stdout.split()
    for child in [int(child) for child in children]:
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            continue
    if agent.poll() is None:
        agent.kill()
    agent.wait()


def _show(loss: Loss) -> None:
    lost = loss.summary["lost_time"]
    table = Table(title=f"After the loss: {lost['reason']}")
    table.add_column("stage", justify="right")
    table.add_column("device")
    table.add_column("role")
    table.add_column("blocks")
    for index, stage in enumerate(loss.plan.stages):
        table.add_row(str(index), stage.name, stage.role, stage.block_range)
    console = Console()
    console.print(table)
    names = ("detection", "restart", "start_up", "planning", "reload", "replay")
    console.print(
        "  ".join(f"{name} {lost[name]:.1f} s" for name in names),
        f" ({lost['replayed_steps']} steps replayed), in all {sum(lost[name] for name in names):.1f} s",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lost", default="jetson-orin-nx-16gb-1", help="the device that is lost")
    parser.add_argument("--time-scale", type=float, default=1.0, help="how much slower than the devices")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps of the run")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        options = [*PAPER_8B, f"cluster.time_scale={chosen.time_scale}", f"trainer.max_steps={chosen.steps}"]
        _show(lose(options, lost=chosen.lost, after_step=4, folder=Path(temporary)))
