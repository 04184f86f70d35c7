"""Runs a function in several real processes with Gloo, a free port and a time limit."""

import multiprocessing
import os
import pickle
import queue
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["lightning_hybridop", "transformers.models.llama.modeling_llama", "peft"])


class RankError(RuntimeError):
    """A rank raised; carries the traceback texts of all ranks that did."""


def free_port() -> int:
    """Return a TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(function: Callable[..., Any], ranks: int, *arguments: Any, timeout: float = 180.0) -> list[Any]:
    """Call `function(*arguments)` on every rank as torchrun would, and return what each rank returned.

    Raises:
        RankError: a rank raised.
        TimeoutError: a rank did not answer in time. All processes are ended either way.
    """
    answers = _CONTEXT.Queue()
    port = free_port()
    processes = [
        _CONTEXT.Process(
            # Not daemons: the loaders of some tests have workers, which daemons may not start.
            target=_run_rank,
            args=(answers, rank, ranks, port, function, arguments),
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(results) + len(failures) < ranks:
            patience = 5.0 if failures else deadline - time.monotonic()
            try:
                rank, failure, result = answers.get(timeout=max(0.01, patience))
            except queue.Empty:
                if failures:
                    break
                silent = sorted(set(range(ranks)) - set(results))
                raise TimeoutError(f"Ranks {silent} did not answer within {timeout:g} s.") from None
            if failure is None:
                results[rank] = pickle.loads(result)
            else:
                failures[rank] = failure
    finally:
        for process in processes:
            process.join(timeout=0.0 if failures else 5.0)
            if process.is_alive():
                process.kill()
                process.join()
    if failures:
        raise RankError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())))
    return [results[rank] for rank in range(ranks)]


def _run_rank(
    answers: Any, rank: int, ranks: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="tests",
        OMP_NUM_THREADS="1",
    )
    import torch

    torch.set_num_threads(1)
    try:
        # As bytes: a queue would hand tensors over in shared memory, which is gone when this process ends.
        answers.put((rank, None, pickle.dumps(function(*arguments))))
    except BaseException:
        answers.put((rank, traceback.format_exc(), None))
        sys.stdout.flush()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
