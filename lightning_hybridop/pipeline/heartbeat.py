"""Heartbeats: every process says over the store that it lives, and notices when another one no longer does."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch.distributed as dist

SECONDS_TO_STOP = 1.0
"""How long a process that leaves waits for the store, which may be out of reach, to take note of it."""

BEATS_PER_PATIENCE = 6
"""A process that was late for one beat, because its host is busy, has time for a few more."""


class Heartbeat:
    """Beats for one process and watches the beats of the others, in threads of its own.

    A stopped process beats no longer while its connections stay open; one whose cable was pulled cannot reach the store.

    Args:
        store: over which the beats are told; it gets a connection of its own.
        prefix: of the keys of the store that this uses.
        rank: this process.
        size: number of processes.
        patience: seconds without a beat after which a process counts as lost.
        alarm: the key of the store under which the first process to fail says so.
        lost: called, in a thread, with the ranks that are lost.
        store_lost: called, in a thread, with the seconds in which the store has not answered; 0 when it is gone.
        alarmed: called, in a thread, when a process has failed.

    One of the three is called, once.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        prefix: str,
        rank: int,
        size: int,
        patience: float,
        alarm: str,
        lost: Callable[[list[int]], None],
        store_lost: Callable[[float], None],
        alarmed: Callable[[], None],
    ) -> None:
        own = store.clone()  # type: ignore[attr-defined]  # torch's stubs do not know it
        self._store: dist.Store = own
        self._prefix = prefix
        self._store.set_timeout(timedelta(seconds=patience))
        self._others = [other for other in range(size) if other != rank]
        self._rank = rank
        self._patience = patience
        self._alarm = alarm
        self._lost = lost
        self._store_lost = store_lost
        self._alarmed = alarmed
        self._ended = threading.Event()
        self._leaves = False
        self._answered = time.monotonic()
        self._beats = threading.Thread(target=self._beat, name="hybridop beats", daemon=True)

    def start(self) -> None:
        """Begin to beat and to watch."""
        self._beats.start()
        threading.Thread(target=self._watch, name="hybridop watch", daemon=True).start()

    def stop(self) -> None:
        """Beat no longer; nobody is reported lost from here on."""
        self._ended.set()

    def say_goodbye(self) -> None:
        """Beat no longer, and let the others know that this is on purpose."""
        self._leaves = True
        self._ended.set()
        self._beats.join(timeout=SECONDS_TO_STOP)

    def _beat(self) -> None:
        """Tell a beat and look at the others', again and again; report those that have stopped."""
        seen: dict[int, tuple[bytes, float]] = {}
        staying = [0]
        beats = 0
        try:
            while not self._ended.is_set():
                beats += 1
                self._store.set(f"{self._prefix}/beat/{self._rank}", str(beats))
                values = self._beats_of_others()
                staying = [self._rank, *values]
                failed = self._store.check([self._alarm])
                now = self._answered = time.monotonic()
                for other, value in values.items():
                    if other not in seen or seen[other][0] != value:
                        seen[other] = (value, now)
                silent = [other for other in values if now - seen[other][1] > self._patience]
                if failed:
                    self._report(self._alarmed)
                elif silent:
                    self._report(partial(self._lost, silent))
                self._ended.wait(self._patience / BEATS_PER_PATIENCE)
            if self._leaves:
                self._store.set(f"{self._prefix}/left/{self._rank}", "")
        except RuntimeError as error:
            # Unanswered calls are for `_watch`; else whoever held the store is gone.
            if "time" not in str(error).lower() and 0 in staying:
                self._report(lambda: self._store_lost(0.0))

    def _beats_of_others(self) -> dict[int, bytes]:
        """Return what each other process that has not left has told last, nothing if it has not begun."""
        staying = [other for other in self._others if not self._store.check([f"{self._prefix}/left/{other}"])]
        begun = [other for other in staying if self._store.check([f"{self._prefix}/beat/{other}"])]
        told = self._store.multi_get([f"{self._prefix}/beat/{other}" for other in begun]) if begun else []
        return dict.fromkeys(staying, b"") | dict(zip(begun, told, strict=True))

    def _watch(self) -> None:
        """Report the store when it has not answered for too long: a call to it may wait for ever."""
        while not self._ended.wait(self._patience / BEATS_PER_PATIENCE):
            waited = time.monotonic() - self._answered
            if waited > self._patience + self._patience / BEATS_PER_PATIENCE:
                self._report(lambda: self._store_lost(self._patience))

    def _report(self, what: Callable[[], None]) -> None:
        if not self._ended.is_set():
            self._ended.set()
            what()
