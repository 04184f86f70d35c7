"""Heartbeats: every process says over the store that it lives, and notices when another one no longer does."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta

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
        rank: this process.
        size: number of processes.
        patience: seconds without a beat after which a process counts as lost.
        lost: called once, in a thread, with the ranks that are lost; None when the store itself is out of reach.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        size: int,
        patience: float,
        lost: Callable[[list[int] | None], None],
    ) -> None:
        self._store = store.clone()  # type: ignore[attr-defined]  # torch's stubs do not know it
        self._store.set_timeout(timedelta(seconds=patience))
        self._others = [other for other in range(size) if other != rank]
        self._rank = rank
        self._patience = patience
        self._lost = lost
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

    def wait_for_goodbyes(self, seconds: float) -> None:
        """Wait until all others have said goodbye, `seconds` at most."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._store.check(
            [f"left/{other}" for other in self._others]
        ):
            time.sleep(0.05)

    def _beat(self) -> None:
        """Tell a beat and look at the others', again and again; report those that have stopped."""
        seen: dict[int, tuple[bytes, float]] = {}
        beats = 0
        try:
            while not self._ended.is_set():
                beats += 1
                self._store.set(f"beat/{self._rank}", str(beats))
                values = self._beats_of_others()
                now = self._answered = time.monotonic()
                for other, value in values.items():
                    if other not in seen or seen[other][0] != value:
                        seen[other] = (value, now)
                silent = [other for other in values if now - seen[other][1] > self._patience]
                if silent:
                    self._report(silent)
                self._ended.wait(self._patience / BEATS_PER_PATIENCE)
            if self._leaves:
                self._store.set(f"left/{self._rank}", "")
        except RuntimeError as error:
            if "time" not in str(error).lower():
                # Whoever held the store is gone, and so are its connections: nobody waits for it.
                self._ended.set()

    def _beats_of_others(self) -> dict[int, bytes]:
        """Return what each other process that has not left has told last, nothing if it has not begun."""
        staying = [other for other in self._others if not self._store.check([f"left/{other}"])]
        begun = [other for other in staying if self._store.check([f"beat/{other}"])]
        told = self._store.multi_get([f"beat/{other}" for other in begun]) if begun else []
        return dict.fromkeys(staying, b"") | dict(zip(begun, told, strict=True))

    def _watch(self) -> None:
        """Report the store when it has not answered for too long: a call to it may wait for ever."""
        while not self._ended.wait(self._patience / BEATS_PER_PATIENCE):
            if time.monotonic() - self._answered > self._patience + self._patience / BEATS_PER_PATIENCE:
                self._report(None)
                return

    def _report(self, silent: list[int] | None) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._lost(silent)
