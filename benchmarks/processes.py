"""Runs a function in as many processes as a pipeline has stages, as torchrun would."""

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any


def run_ranks(function: Callable[..., Any], ranks: int, *arguments: Any, limit: float) -> Any:
    """Return what rank 0's `function(*arguments)` returns; end the script with the traceback of a rank that failed.

    No process outlives the call, which takes at most `limit` seconds.
    """
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        context.Process(target=_run_rank, args=(answers, rank, ranks, port, function, arguments))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        failure, result = answers.get(timeout=limit)
    finally:
        for process in processes:
            process.join(timeout=10.0)
            if process.is_alive():
                process.kill()
                process.join()
    if failure is not None:
        sys.exit(failure)
    return result


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
        TORCHELASTIC_RUN_ID="benchmark",
        GLOO_SOCKET_IFNAME="lo",
    )
    try:
        result = function(*arguments)
        if rank == 0:
            answers.put((None, result))
    except BaseException:
        answers.put((f"rank {rank}:\n{traceback.format_exc()}", None))
