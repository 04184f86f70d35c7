"""`hybridop fit`: a run whose process is killed starts again, or is gone on with later, and comes to the same end."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_hybridop.commands.resuming import newest_checkpoint
from tests.distributed.harness import free_port
from tests.distributed.test_launch import processes_of_session, script_environment

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(240)]

OPTIONS = (
    "recipe=quickstart",
    "model=hf",
    "model.name=random-4-blocks",
    "model.blocks=4",
    "data.held_out_rows=4",
    "cluster=local_1zo_1bp",
    "trainer.max_steps=60",
    "checkpoint_every=5",
    "callbacks.trace=null",
    "callbacks.adapter=null",
    "strategy.heartbeat=4",
)
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2")
HYBRIDOP = ("-m", "lightning_hybridop")


def start(folder: Path, *options: str, by: tuple[str, ...] = HYBRIDOP) -> subprocess.Popen[str]:
    with (folder.parent / f"{folder.name}.log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, *by, "fit", *OPTIONS, f"folder={folder}", *options],
            env=script_environment() | {"OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
        )


def kill_a_worker(folder: Path, launcher: subprocess.Popen[str], sign: signal.Signals) -> None:
    """Send a signal to one of the processes of a run, once it has a checkpoint."""
    while newest_checkpoint(folder) is None:
        assert launcher.poll() is None, (folder.parent / f"{folder.name}.log").read_text()[-2000:]
        time.sleep(0.05)
    workers = [
        process
        for process in psutil.Process(launcher.pid).children(recursive=True)
        if any("lightning_hybridop" in word for word in process.cmdline())
    ]
    os.kill(max(workers, key=lambda process: process.pid).pid, sign)


def ended(folder: Path, launcher: subprocess.Popen[str], code: int) -> str:
    try:
        launcher.wait(timeout=150)
    finally:
        for left in processes_of_session(launcher.pid):
            left.kill()
    said = (folder.parent / f"{folder.name}.log").read_text()
    assert launcher.returncode == code, said[-3000:]
    return said


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def losses(folder: Path) -> list[tuple[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [(row["step"], row["train_loss"]) for row in csv.DictReader(file)]


def test_one_process_goes_on_and_an_ended_run_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "alone"
    alone = ("cluster=local_1bp", "trainer.max_steps=12")
    ended(folder, start(folder, *alone), 0)
    logged = losses(folder)
    said = ended(folder, start(folder, *alone, "resume=auto"), 0)
    assert "has come to its end" in said.splitlines()[-1]
    (folder / "summary.json").unlink()

    ended(folder, start(folder, *alone, "resume=auto"), 0)

    assert losses(folder) == logged
    assert summary(folder)["steps"] == 12


def test_an_interrupted_run_comes_to_the_same_end(tmp_path: Path) -> None:
    straight, restarted, continued = (tmp_path / name for name in ("straight", "restarted", "continued"))
    ended(straight, start(straight), 0)
    expected = summary(straight)

    # Started again by itself, under torchrun; the steps between the checkpoint and the failure are taken twice.
    launcher = start(restarted, by=(*TORCHRUN, f"--master-port={free_port()}", "--max-restarts=1", *HYBRIDOP))
    kill_a_worker(restarted, launcher, signal.SIGKILL)
    said = ended(restarted, launcher, 0)
    assert "Time lost" in said
    found = summary(restarted)
    assert found["after"] == expected["after"]
    assert found["train_loss"] == expected["train_loss"]
    assert found["lost_time"]["detection"] < 30
    assert "ended without a word" in found["lost_time"]["reason"]

    # Gone on with by hand, on one process more.
    launcher = start(continued)
    kill_a_worker(continued, launcher, signal.SIGKILL)
    said = ended(continued, launcher, 1)
    assert "was ended by SIGKILL" in said.splitlines()[-1]
    ended(continued, start(continued, "resume=auto", "cluster.bp_stages=2"), 0)
    found = summary(continued)
    assert found["after"]["val_loss"] == pytest.approx(expected["after"]["val_loss"], rel=1e-5)
    assert found["steps"] == 60
    # Killed between its last step and its end: all that is left to do is done.
    (continued / "summary.json").unlink()
    shutil.rmtree(continued / "checkpoints")
    ended(continued, start(continued, "resume=auto"), 0)
    assert summary(continued)["after"] == pytest.approx(found["after"], rel=1e-5)
    steps = [line.split(",") for line in (continued / "metrics.csv").read_text().splitlines()]
    column = steps[0].index("step")
    logged = [int(row[column]) for row in steps[1:]]
    assert logged == sorted(logged)
    assert set(range(60)) <= set(logged)
