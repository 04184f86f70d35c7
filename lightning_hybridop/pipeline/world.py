"""The processes of a run as one group: meeting, telling each other who failed first, meeting again, leaving."""

import atexit
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch.distributed as dist

from lightning_hybridop.pipeline.agreement import check_versions
from lightning_hybridop.pipeline.connections import cut_connections, noting_connections
from lightning_hybridop.pipeline.exchange import gather_json
from lightning_hybridop.pipeline.heartbeat import BEATS_PER_PATIENCE, Heartbeat
from lightning_hybridop.pipeline.interface import choose_interface, host_name
from lightning_hybridop.pipeline.meeting import MeetingError, held_by_agent, meeting_store
from lightning_hybridop.pipeline.transport import TransportError

SECONDS_TO_MEET = 8.0
"""How long processes wait for each other after one of them failed."""

SECONDS_TO_REPORT = 1.0
"""How long, and a heartbeat more, one that has failed waits for the others' word before it calls them lost."""

SECONDS_TO_ANSWER = 4.0
"""How long a process that has failed waits for an answer of the store."""

HANGS = "it hangs, its host is down, or its network is cut"
ENDED = "ended without a word: it was killed, or its host is out of reach"

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The failure of one process: its rank and host, which stage it is, and its error in one sentence.

    One that is `silent` has not told of it: the others noticed that it beats no longer. A failure that `follows` is about
    another process that could not be reached.
    """

    rank: int
    host: str
    stage: str
    sentence: str
    silent: bool = False
    follows: bool = False

    def __str__(self) -> str:
        who = f"{self.stage} (rank {self.rank}, host {self.host})"
        return f"{who} {self.sentence}" if self.silent else f"{who} failed: {self.sentence}"


class World:
    """All processes of a run, over one key-value store that outlives the connections between them.

    Args:
        store: the store that the processes first met over.
        rank: this process.
        size: number of processes.
        timeout: how long collectives wait once all have met again.
        patience: seconds without a sign of life after which a process counts as lost.
    """

    def __init__(
        self, store: dist.Store, *, rank: int, size: int, timeout: timedelta, patience: float
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._patience = patience
        self._meetings = 0
        self._connected = 0
        self._has_waited = False
        self._noticed: Failure | None = None
        self._gone: set[int] = set()
        self._heartbeat: Heartbeat | None = None
        self._known: dict[int, tuple[str, str]] = {}

    def introduce(self, stage: str) -> None:
        """Tell all processes what this one is, and get to know the others. Collective."""
        told = gather_json([host_name(), stage])
        self._known = {rank: (host, words) for rank, (host, words) in enumerate(told)}

    def watch(self) -> None:
        """Begin to beat, and to watch the beats of the others."""
        self._noticed = None
        self._heartbeat = Heartbeat(
            self._store,
            prefix=f"beats/{self._meetings}",
            rank=self._rank,
            size=self._size,
            patience=self._patience,
            alarm=f"failed/{self._meetings}/first",
            lost=self._end_without_process,
            store_lost=self._end_without_store,
            alarmed=self._hear_of_failure,
        )
        self._heartbeat.start()

    def say_goodbye(self) -> None:
        """Let the others know that this process ends as it should; the holder of the store stays until all others have.

        After a failure it stays until they know of that.
        """
        if self._heartbeat is not None:
            self._heartbeat.say_goodbye()
            self._heartbeat = None
        if self._rank == 0 and not held_by_agent() and not self._has_waited:
            self._has_waited = True
            awaited = [rank for rank in range(1, self._size) if rank not in self._gone]
            deadline = time.monotonic() + SECONDS_TO_MEET
            while awaited and time.monotonic() < deadline:
                awaited = [rank for rank in awaited if not self._has_ended(rank)]
                time.sleep(0.05 if awaited else 0.0)

    def _has_ended(self, rank: int) -> bool:
        said = (f"beats/{self._connected}/left/{rank}", f"failed/{self._connected}/{rank}")
        return any(self._store.check([key]) for key in said)

    def _rest(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
            self._heartbeat = None

    def _hear_of_failure(self) -> None:
        """Let the others know that this process is there, and end what it waits for. Runs in a thread of the heartbeat's.

        Its own error, which follows as soon as it is done with what it computes, will find out who has failed.
        """
        cut_connections()
        with suppress(RuntimeError):  # the store is gone by now
            self._store.set(f"heard/{self._meetings}/{self._rank}", "")

    def _end_without_process(self, ranks: list[int]) -> None:
        """Say that a process is lost, and end what this one waits for. Runs in a thread of the heartbeat's."""
        lost = self._silence(ranks[0], f"gives no sign of life for {self._patience:g} s: {HANGS}")
        try:
            self._noticed = self._within(SECONDS_TO_REPORT, lambda: self._first(lost))
        except TimeoutError:
            self._noticed = lost
        self._end_waiting()

    def _end_without_store(self, seconds: float) -> None:
        """Say that the store is out of reach, and end what this one waits for. Runs in a thread of the heartbeat's."""
        self._noticed = self._without_store(seconds)
        self._end_waiting()

    def _without_store(self, seconds: float) -> Failure:
        """Return what is wrong with the holder of the store, which has not answered for `seconds`, or is gone if that is 0."""
        silent = f"has not answered for {seconds:g} s: {HANGS}, or this host's own is"
        if not held_by_agent():
            return self._silence(0, silent if seconds else ENDED)
        place = os.environ["MASTER_ADDR"]
        return Failure(
            rank=0,
            host=place,
            stage="torchrun's store",
            sentence=silent if seconds else f"is gone: look at torchrun on {place}",
            silent=True,
        )

    def _silence(self, rank: int, sentence: str) -> Failure:
        host, stage = self._known.get(rank, ("unknown", "A process"))
        return Failure(rank=rank, host=host, stage=stage, sentence=sentence, silent=True)

    def _end_waiting(self) -> None:
        """Say once on each host what was noticed, and cut the connections over which this process may wait."""
        assert self._noticed is not None
        if self._noticed.silent:
            self._gone.add(self._noticed.rank)
        hosts = [self._known.get(rank, ("", ""))[0] for rank in range(self._size)]
        left_here = [
            rank
            for rank in range(self._size)
            if rank != self._noticed.rank and hosts[rank] == hosts[self._rank]
        ]
        if self._noticed.silent and self._rank == min(left_here, default=None):
            print(self._noticed, file=sys.stderr, flush=True)
        cut_connections()

    @staticmethod
    def _within(seconds: float, ask: Callable[[], _Answer]) -> _Answer:
        """Return what `ask` returns, which asks the store; it may never answer where the network is cut.

        Raises:
            TimeoutError: there was no answer within `seconds`.
        """
        answers: SimpleQueue[_Answer] = SimpleQueue()
        threading.Thread(target=lambda: answers.put(ask()), daemon=True).start()
        try:
            return answers.get(timeout=seconds)
        except Empty:
            raise TimeoutError from None

    def tell(self, error: BaseException, *, stage: str) -> None:
        """Tell all processes of an error of this one's, leave them, and note in it which process of the run failed first.

        Of the errors since the processes last met the first one counts. `stage` says what this process is.
        """
        if first_failure(error) is not None:
            return
        self._rest()
        if self._noticed is not None:
            part(error)
            _mark(error, first=self._noticed, rank=self._rank, lost=[])
            return
        text = (str(error).splitlines() or [""])[0]
        kind = type(error).__name__
        own = Failure(
            rank=self._rank,
            host=host_name(),
            stage=stage,
            sentence=f"{kind}: {text}" if text else kind,
            follows=lost_connection(error),
        )
        try:
            first = self._within(SECONDS_TO_ANSWER, lambda: self._first(own))
            # While they are connected Lightning answers a SIGTERM, which torchrun sends when another process has failed, by
            # a broadcast, whose error would take the place of this one.
            part(error)
            patience = SECONDS_TO_ANSWER + self._patience / BEATS_PER_PATIENCE
            silent = self._within(patience, self._silent) if own.follows and first.follows else []
        except TimeoutError:
            part(error)
            self._noticed = self._without_store(SECONDS_TO_ANSWER)
            # A lost connection is then due to the same network.
            first, silent = self._noticed if own.follows else own, []
        self._gone.update(silent)
        _mark(error, first=first, rank=self._rank, lost=[f"{self._silence(rank, ENDED)}." for rank in silent])

    def meet_after(self, error: BaseException, *, stage: str, step: int) -> None:
        """Connect all processes anew after `error`, which may be another one on each. Collective.

        Raises:
            MeetingError: a process is gone, or the processes are not all at this step.
        """
        self.tell(error, stage=stage)
        part(error)
        try:
            if self._noticed is not None:
                raise MeetingError(
                    f"{self._noticed}; what it held cannot be put together with the rest, go on from the last checkpoint."
                )
            self.meet_again(SECONDS_TO_MEET)
            steps = gather_json(step)
            if any(other != steps[0] for other in steps):
                raise MeetingError(
                    f"The processes had taken {', '.join(map(str, steps))} steps when one of them failed, so their stages "
                    "do not fit together; go on from the last checkpoint."
                )
        except MeetingError as failed:
            first = first_failure(error)
            assert first is not None
            _mark(failed, first=first, rank=self._rank, lost=[])
            raise

    def meet_again(self, patience: float) -> None:
        """Connect all processes anew, having cut what is left of the earlier connections. Collective.

        `patience` is how many seconds to wait for the others.

        Raises:
            MeetingError: another process did not come.
        """
        self._rest()
        _disconnect()
        self._meetings += 1
        key = f"present/{self._meetings}"
        try:
            self._store.set(f"{key}/{self._rank}", "")
            everyone = [f"{key}/{rank}" for rank in range(self._size)]
            self._store.wait(everyone, timedelta(seconds=patience))
            self.connect()
        except RuntimeError as error:
            raise MeetingError(
                f"Not all {self._size} processes met again within {patience:g} s of a failure, so what they hold cannot "
                "be put together; go on from the last checkpoint."
            ) from error

    def connect(self) -> None:
        """Make the connections to all processes, and begin to watch for lost ones. Collective."""
        connections = dist.PrefixStore(f"connections/{self._meetings}", self._store)
        with noting_connections():
            dist.init_process_group(
                "gloo", store=connections, rank=self._rank, world_size=self._size, timeout=self._timeout
            )
        self._connected = self._meetings
        self.watch()

    def _first(self, own: Failure) -> Failure:
        """Report this process's failure and return the one that came first, which may be this one."""
        prefix = f"failed/{self._meetings}"
        try:
            self._store.set(f"{prefix}/{self._rank}", "")
            first = self._store.compare_set(f"{prefix}/first", "", json.dumps(asdict(own)))
        except RuntimeError:
            # The store dies with the process that holds it: rank 0, unless torchrun keeps it. The next one speaks.
            return own if self._rank == 1 else self._without_store(0.0)
        return Failure(**json.loads(first))

    def _silent(self) -> list[int]:
        """Return the ranks that neither fail nor hear of another's failure in time: they were killed or are unreachable."""
        waiting = [rank for rank in range(self._size) if rank != self._rank]
        deadline = time.monotonic() + SECONDS_TO_REPORT + self._patience / BEATS_PER_PATIENCE
        try:
            while waiting and time.monotonic() < deadline:
                waiting = [
                    rank
                    for rank in waiting
                    if not self._store.check([f"failed/{self._meetings}/{rank}"])
                    and not self._store.check([f"heard/{self._meetings}/{rank}"])
                ]
                time.sleep(0.05)
        except RuntimeError:
            return [0]
        return waiting


_entered: dict[tuple[str | None, ...], World] = {}


def enter(
    *, rank: int, size: int, timeout: timedelta, patience: float = 15.0, interface: str | None = None
) -> World:
    """Return the world that MASTER_ADDR and MASTER_PORT name, connected. Collective.

    After a failure the processes meet over the same store as before; what the first call in a process was given holds
    for all. Connections go through `interface`; None takes the
    one from which the other hosts are reached.

    Raises:
        MeetingError: not all processes came.
        AgreementError: the processes run other versions.
        InterfaceError: there is no such interface, or none that leads to the other hosts.
    """
    address = (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    world = _entered.get(address)
    if world is not None:
        if not dist.is_initialized():
            world.meet_again(timeout.total_seconds())
        return world
    if dist.is_initialized():
        # Somebody else has connected them. A private name of torch, for want of a public one.
        store: dist.Store = dist.PrefixStore("hybridop", dist.distributed_c10d._get_default_store())
        world = World(store, rank=rank, size=size, timeout=timeout, patience=patience)
        world.watch()
    else:
        store = meeting_store(rank=rank, size=size, timeout=timeout)
        check_versions(store, rank=rank, size=size)
        os.environ["GLOO_SOCKET_IFNAME"] = choose_interface(store, rank=rank, size=size, wanted=interface)
        world = World(store, rank=rank, size=size, timeout=timeout, patience=patience)
        world.connect()
    world.introduce("A process")
    if not _entered:
        # Before the interpreter takes itself apart: Gloo's threads end the process with an abort if they outlive it.
        atexit.register(leave)
    _entered[address] = world
    return world


def leave() -> None:
    """Leave the process group; processes that wait for this one see their connections close at once."""
    for world in _entered.values():
        world.say_goodbye()
    _disconnect()


def _disconnect() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def part(error: BaseException) -> None:
    """Leave the process group because of `error`.

    The pending messages that its traceback holds on to would keep connections open, so frames of torch.distributed
    are emptied; a debugger still sees the user's.
    """
    for link in _chain(error):
        for frame, _ in traceback.walk_tb(link.__traceback__):
            if frame.f_globals.get("__name__", "").startswith("torch.distributed"):
                try:
                    frame.clear()
                except RuntimeError:  # still running, further up
                    continue
    _disconnect()


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def lost_connection(error: BaseException) -> bool:
    """Tell whether an error is about a process that could not be reached, whose own error is then the one to look at."""
    return isinstance(error, (TransportError, dist.DistError)) or "gloo" in str(error)


def first_failure(error: BaseException) -> Failure | None:
    """Return the failure that led to `error`, as `World.tell` noted it; None for errors of runs without peers."""
    found = getattr(error, "_hybridop_first_failure", None)
    return found if isinstance(found, Failure) else None


def told_of_lost(error: BaseException) -> list[str]:
    """Return a sentence for each process that ended without a word and so led to `error`."""
    found = getattr(error, "_hybridop_lost", [])
    return found if isinstance(found, list) else []


def _mark(error: BaseException, *, first: Failure, rank: int, lost: list[str]) -> None:
    """Note in `error`, for whoever prints or catches it, which process of the run failed first, and which are lost."""
    error.__dict__["_hybridop_first_failure"] = first
    error.__dict__["_hybridop_lost"] = lost
    if first.rank == rank:
        error.add_note(f"This was {first.stage}, rank {first.rank} on host {first.host}.")
    else:
        error.add_note(f"{first}")
    for sentence in lost:
        error.add_note(sentence)


def speak_once(rank: int, host: str, *, speaks_for_host: bool) -> None:
    """Let the interpreter print an uncaught error only in the process where the run failed first.

    On other hosts the process that `speaks_for_host` prints one line about it.
    """
    previous = sys.excepthook
    if getattr(previous, "speaks_once", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: object) -> None:
        first = first_failure(error)
        if first is None or first.rank == rank:
            previous(kind, error, trace)  # type: ignore[arg-type]  # a traceback, whose type typeshed calls otherwise
        elif first.host != host and speaks_for_host and not first.silent:  # else it has been said
            print(*(told_of_lost(error) or [str(first)]), sep="\n", file=sys.stderr)

    hook.speaks_once = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def end_processes(processes: Sequence[subprocess.Popen[bytes]], *, patience: float) -> None:
    """Wait for processes to end by themselves, `patience` seconds for all together, then kill those that have not."""
    deadline = time.monotonic() + patience
    for process in processes:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
