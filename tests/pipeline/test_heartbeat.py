"""Processes that hang, leave, fail, or cannot reach the store are told apart."""

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_hybridop.pipeline.heartbeat import Heartbeat
from tests.distributed.harness import free_port

pytestmark = pytest.mark.timeout(60)

PATIENCE = 0.6


class Seen:
    """What a heartbeat reported, and when."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.happened = threading.Event()

    def note(self, event: Any) -> None:
        self.events.append(event)
        self.happened.set()


@pytest.fixture
def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", free_port(), is_master=True, timeout=timedelta(seconds=5))


def heart(store: dist.Store, rank: int, seen: Seen, *, size: int = 3) -> Heartbeat:
    made = Heartbeat(
        store,
        prefix="beats",
        rank=rank,
        size=size,
        patience=PATIENCE,
        alarm="alarm",
        lost=lambda ranks: seen.note(ranks),
        store_lost=lambda seconds: seen.note(("store", seconds)),
        alarmed=lambda: seen.note("alarm"),
    )
    made.start()
    return made


def test_nothing_is_reported_while_all_beat_and_after_they_have_left(store: dist.Store) -> None:
    seen = Seen()
    hearts = [heart(store, rank, seen) for rank in range(3)]
    assert not seen.happened.wait(3 * PATIENCE)
    hearts[1].say_goodbye()
    hearts[2].say_goodbye()
    assert not seen.happened.wait(3 * PATIENCE)
    hearts[0].say_goodbye()


def test_a_process_that_no_longer_beats_is_reported_once_within_the_patience(store: dist.Store) -> None:
    seen, others = Seen(), Seen()
    hearts = [heart(store, rank, seen if rank == 0 else others) for rank in range(3)]
    time.sleep(PATIENCE)
    hearts[2].stop()
    began = time.monotonic()
    assert seen.happened.wait(10 * PATIENCE)
    assert time.monotonic() - began < 3 * PATIENCE
    time.sleep(PATIENCE)
    assert seen.events == [[2]]
    hearts[0].stop()
    hearts[1].stop()


def test_one_that_never_begins_is_reported(store: dist.Store) -> None:
    seen = Seen()
    made = heart(store, 0, seen, size=2)
    assert seen.happened.wait(10 * PATIENCE)
    assert seen.events == [[1]]
    made.stop()


def test_a_failure_that_another_process_tells_of_is_reported_at_once(store: dist.Store) -> None:
    seen = Seen()
    hearts = [heart(store, rank, seen, size=2) for rank in range(2)]
    store.set("alarm", "something")
    assert seen.happened.wait(PATIENCE)
    assert set(seen.events) == {"alarm"}
    for each in hearts:
        each.stop()
