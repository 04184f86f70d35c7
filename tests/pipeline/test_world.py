"""Who failed first, and processes that meet again over the store that outlives their connections."""

import os
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_hybridop.pipeline import world
from lightning_hybridop.pipeline.transport import TransportError
from tests.distributed.harness import run_ranks


def _fail_and_meet() -> list[object]:
    """Rank 1 fails while the others wait for it; all meet again, twice."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    joined = world.enter(rank=rank, size=size, timeout=timedelta(seconds=30))
    seen: list[object] = []
    for attempt in range(2):
        try:
            if rank == 1:
                raise ArithmeticError(f"attempt {attempt}")
            dist.recv(torch.zeros(1), 1)
        except Exception as error:
            joined.meet_after(error, stage=f"Stage {rank}", step=7)
            first = world.first_failure(error)
            assert first is not None
            seen += [first.rank, first.stage, first.sentence, error.__notes__[0]]
        total = torch.tensor([rank])
        dist.all_reduce(total)
        seen.append(int(total))
    world.leave()
    return seen


@pytest.mark.distributed
def test_processes_meet_again_after_one_of_them_failed() -> None:
    for rank, seen in enumerate(run_ranks(_fail_and_meet, 3)):
        for attempt in range(2):
            first, stage, sentence, note, total = seen[5 * attempt : 5 * attempt + 5]
            assert (first, stage, sentence) == (1, "Stage 1", f"ArithmeticError: attempt {attempt}")
            assert ("This was Stage 1, rank 1 on host" in note) == (rank == 1)
            assert total == 0 + 1 + 2


def _meet_at_different_steps() -> str:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    joined = world.enter(rank=rank, size=size, timeout=timedelta(seconds=30))
    try:
        raise ArithmeticError
    except ArithmeticError as error:
        try:
            joined.meet_after(error, stage="A stage", step=3 + rank)
        except world.MeetingError as refused:
            return str(refused)
    return "nothing was refused"


@pytest.mark.distributed
def test_processes_at_different_steps_do_not_put_their_stages_together() -> None:
    for said in run_ranks(_meet_at_different_steps, 2):
        assert said == (
            "The processes had taken 3, 4 steps when one of them failed, so their stages do not fit together; go on from "
            "the last checkpoint."
        )


def test_a_lost_connection_is_told_from_a_cause() -> None:
    assert world.lost_connection(TransportError("stage 1 sent nothing"))
    assert world.lost_connection(
        RuntimeError("[pytorch/third_party/gloo/transport] Connection closed by peer")
    )
    assert not world.lost_connection(ValueError("a bad batch"))


def test_an_error_of_a_run_without_peers_names_no_failure() -> None:
    assert world.first_failure(ValueError("alone")) is None


def test_processes_that_do_not_end_by_themselves_are_killed() -> None:
    ending = subprocess.Popen([sys.executable, "-c", "pass"])
    staying = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started = time.monotonic()

    world.end_processes([staying, ending], patience=1.0)

    assert time.monotonic() - started < 10
    assert (ending.returncode, staying.returncode) == (0, -9)
