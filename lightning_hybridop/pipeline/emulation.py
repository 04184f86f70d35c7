"""Emulated devices: actions and transfers last as long as a profile says, whatever machine they run on."""

import time
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_hybridop.pipeline.transport import Channel
from lightning_hybridop.planning.costs import LinkTimes, StageTimes
from lightning_hybridop.schedules.actions import Action, Kind
from lightning_hybridop.simulation.program import action_seconds


class EmulationError(RuntimeError):
    """This machine is too slow to stand for the emulated one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """The times that a run keeps to: one micro-batch on each stage and on each link, in seconds, times `time_scale`.

    Validation, test and prediction run at the machine's own speed.
    """

    stages: tuple[StageTimes, ...]
    links: tuple[LinkTimes, ...]
    time_scale: float = 1.0


class Pace:
    """Makes the actions of one stage last as long as an emulation says.

    Args:
        emulation: the times of the whole pipeline.
        stage: which of its stages this is.
    """

    def __init__(self, emulation: Emulation, stage: int) -> None:
        self._emulation = emulation
        self._stage = stage
        self._mini_batches = 0
        self._real: dict[Kind, float] = defaultdict(float)
        self._allowed: dict[Kind, float] = defaultdict(float)

    def hold(self, action: Action, started: float) -> None:
        """Sleep until the action that started at `started` (of `time.perf_counter()`) has taken its time."""
        allowed = action_seconds(self._emulation.stages[self._stage], action) * self._emulation.time_scale
        real = time.perf_counter() - started
        self._real[action.kind] += real
        self._allowed[action.kind] += allowed
        if real < allowed:
            time.sleep(allowed - real)

    def end_mini_batch(self) -> None:
        """Check that the machine kept up; the first mini-batch, which allocates and compiles, is let through.

        Raises:
            EmulationError: the actions of one kind took longer than they should have, taken together.
        """
        real, allowed = dict(self._real), dict(self._allowed)
        self._real.clear()
        self._allowed.clear()
        self._mini_batches += 1
        if self._mini_batches == 1:
            return
        for kind, seconds in real.items():
            # What takes a device no time to speak of, such as inner products, has no time to keep to here either.
            if 0 < allowed[kind] < seconds:
                scale = self._emulation.time_scale * seconds / allowed[kind]
                raise EmulationError(
                    f"Stage {self._stage} took {seconds:.3g} s for its {kind.value} actions of one mini-batch, but the "
                    f"device that it stands for takes {allowed[kind]:.3g} s at time_scale "
                    f"{self._emulation.time_scale:g}; set time_scale to more than {scale:.3g}, or use a smaller model."
                )


class PacedChannel:
    """A channel whose messages arrive as late as a link would deliver them: one after the other, then the latency.

    Sending returns at once; a thread delivers.
    """

    def __init__(self, channel: Channel, link: LinkTimes, time_scale: float) -> None:
        self._channel = channel
        self._transfer = link.transfer * time_scale
        self._back = link.back * time_scale
        self._latency = link.latency * time_scale
        self._free_at = 0.0
        # Its thread ends when the channel is no longer referred to.
        self._courier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hybridop-link")
        self._underway: list[tuple[Action, Future[None]]] = []

    @property
    def sent_bytes(self) -> int:
        """All that was ever sent."""
        return self._channel.sent_bytes

    def send(self, tensor: Tensor, action: Action, form: torch.dtype) -> None:
        """Let `tensor` travel over the link in the format `form`."""
        seconds = self._back if action.kind is Kind.BACKWARD else action.count * self._transfer
        self._free_at = max(self._free_at, time.perf_counter()) + seconds
        arrival = self._free_at + self._latency
        self._underway.append((action, self._courier.submit(self._deliver, arrival, tensor, action, form)))

    def post(self, action: Action, shape: tuple[int, ...], form: torch.dtype) -> None:
        """Announce a receive, as `Channel.post` does."""
        self._channel.post(action, shape, form)

    def is_posted(self, action: Action) -> bool:
        """Tell whether a receive has been posted and not yet taken."""
        return self._channel.is_posted(action)

    def receive(self, action: Action) -> Tensor:
        """Wait for a posted tensor, as `Channel.receive` does."""
        return self._channel.receive(action)

    @property
    def held(self) -> int:
        """How many messages wait here or are on the way, as far as is known."""
        return len(self._underway) + self._channel.held

    def make_room(self, window: int) -> None:
        """Wait until fewer than `window` messages are on the way, and fewer than `window` delivered ones are not taken."""
        while len(self._underway) >= window:
            self._underway.pop(0)[1].result()
        self._channel.make_room(window)

    def wait_until_taken(self, action: Action) -> None:
        """Wait until what was sent for `action` has been delivered and taken."""
        while any(sent == action for sent, _ in self._underway):
            self._underway.pop(0)[1].result()
        self._channel.wait_until_taken(action)

    def flush(self) -> None:
        """Wait until every message has been delivered and taken; raises what went wrong with one."""
        while self._underway:
            self._underway.pop(0)[1].result()
        self._channel.flush()

    def abandon(self) -> None:
        """Forget all messages, after a failure."""
        self._underway.clear()
        self._channel.abandon()

    def _deliver(self, arrival: float, tensor: Tensor, action: Action, form: torch.dtype) -> None:
        remaining = arrival - time.perf_counter()
        if remaining > 0:
            time.sleep(remaining)
        self._channel.send(tensor, action, form)
