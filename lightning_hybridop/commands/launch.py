"""Starts the processes of a run on this host and ends all of them when one fails."""

import logging
import os
import signal
import socket
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lightning_hybridop.commands.failures import RunError, RunInterruptedError, first_failure, forget_failures

WORKER = "lightning_hybridop.commands.worker"
LOGS = "logs"
SECONDS_TO_END = 5


class LaunchError(RuntimeError):
    """The processes of a run could not be started."""


def check_port(port: object) -> None:
    """Raise LaunchError when `port` (None: one will be found) cannot be listened on."""
    if port is None:
        return
    if not isinstance(port, int) or not 0 < port < 65536:
        raise LaunchError(f"port={port} is no port number; pass one from 1 to 65535, or leave port= out.")
    with socket.socket() as listener:
        # As the rendezvous sets it: a port that an ended run has just left may be taken again.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            raise LaunchError(
                f"Port {port} cannot be used ({error.strerror}); pass another one as port=<number>, or leave port= "
                "(and MASTER_PORT) out to have a free one found."
            ) from error


def launch(folder: Path, *, processes: int, port: int | None, restarts: int) -> None:
    """Run the worker in `processes` local processes on the configuration in `folder` and wait for them.

    When one fails, all are started again, up to `restarts` times.

    Raises:
        LaunchError: the port is taken.
        RunError: a process failed; all others have been ended by then.
        RunInterruptedError: this process was told to end; all others have been ended by then.
    """
    check_port(port)
    threads = max(1, (os.cpu_count() or 1) // processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # When the process that holds the store ends, torch would show where in its own code the others noticed.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    forget_failures(folder / LOGS)
    config = local_processes(processes, run_id=folder.name, port=port, restarts=restarts)
    try:
        elastic_launch(config, sys.executable)("-m", WORKER, str(folder))
    except ChildFailedError as error:
        raise RunError(_reason(error, folder / LOGS)) from error
    except SignalException as error:
        raise RunInterruptedError(int(error.sigval)) from error


def local_processes(
    processes: int, *, run_id: str, port: int | None = None, restarts: int = 0
) -> LaunchConfig:
    """Return how torch's launcher starts processes on this host alone, and keep its own notes off the terminal."""
    if sys.platform == "linux":
        # All processes are on this host, whose name need not resolve to an address of its own.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Its notes and stack traces would surround the one sentence that matters; each of its loggers has its own level.
    for name in list(logging.Logger.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=run_id,
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port or 0}",
        local_addr="127.0.0.1",
        max_restarts=restarts,
        shutdown_timeout=SECONDS_TO_END,
    )


def _reason(error: ChildFailedError, logs: Path) -> str:
    """Return why the run failed: what a process said of itself, else which one ended without a word."""
    cause = first_failure(logs, consequences=False)
    if cause is not None:
        return cause
    for rank, failure in sorted(error.failures.items()):
        # SIGTERM is how the others are ended.
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            return f"rank {rank} was ended by {signal.Signals(-failure.exitcode).name}; look at {logs}."
    rank, failure = error.get_first_failure()
    return first_failure(logs) or f"rank {rank} ended with exit code {failure.exitcode}; look at {logs}."
