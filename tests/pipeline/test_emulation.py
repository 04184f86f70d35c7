import dataclasses
import time
from typing import Any, cast

import pytest
import torch

from lightning_hybridop.pipeline.emulation import (
    Emulation,
    EmulationError,
    Pace,
    PacedChannel,
)
from lightning_hybridop.pipeline.transport import Channel
from lightning_hybridop.planning.costs import LinkTimes, StageTimes
from lightning_hybridop.schedules.actions import Action, Kind
from lightning_hybridop.simulation.program import action_seconds

TIMES = StageTimes(role="zo", forward=0.02, backward=0.05, exit_forward=0.03, baseline_forward=0.04)
F, B = Action(kind=Kind.FORWARD, micro_batch=0), Action(kind=Kind.BACKWARD, micro_batch=0)


def emulation(scale: float = 1.0) -> Emulation:
    return Emulation(stages=(TIMES, TIMES), links=(LinkTimes(),), time_scale=scale)


@pytest.mark.parametrize(
    ("action", "seconds"),
    [
        (F, 0.02),
        (Action(kind=Kind.PERTURBED, micro_batch=1, query=2), 0.02),
        (B, 0.05),
        (Action(kind=Kind.EXIT, micro_batch=0, query=0), 0.03),
        (Action(kind=Kind.EXIT, micro_batch=0), 0.04),
    ],
)
def test_each_kind_of_action_has_its_own_time(action: Action, seconds: float) -> None:
    assert action_seconds(TIMES, action) == seconds


def test_queries_that_ride_together_take_their_time_one_after_the_other() -> None:
    riding = Action(kind=Kind.PERTURBED, micro_batch=1, query=2, count=3)

    assert action_seconds(TIMES, riding) == pytest.approx(0.06)


def test_what_takes_a_device_no_time_is_never_too_slow() -> None:
    instant = dataclasses.replace(TIMES, backward=0.0)
    pace = Pace(Emulation(stages=(instant,), links=()), 0)
    for _ in range(3):
        pace.hold(B, time.perf_counter() - 1.0)
        pace.end_mini_batch()


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_an_action_lasts_as_long_as_its_profile_says(scale: float) -> None:
    pace = Pace(emulation(scale), 0)
    started = time.perf_counter()
    pace.hold(B, started)

    # Sleeping can only take longer, and a busy machine makes it so.
    assert time.perf_counter() - started >= 0.05 * scale


def test_what_the_action_has_taken_already_is_not_slept_again() -> None:
    slept: list[float] = []
    pace = Pace(emulation(), 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", slept.append)
        pace.hold(B, time.perf_counter() - 0.03)
        pace.hold(B, time.perf_counter() - 1.0)

    assert len(slept) == 1
    assert 0.0 < slept[0] <= 0.02


def test_a_machine_slower_than_the_profile_is_refused_after_the_first_mini_batch() -> None:
    pace = Pace(emulation(), 1)
    pace.hold(F, time.perf_counter() - 1.0)
    pace.end_mini_batch()  # allocating and compiling is let through
    pace.hold(B, time.perf_counter())
    pace.end_mini_batch()
    pace.hold(F, time.perf_counter() - 1.0)

    with pytest.raises(EmulationError) as raised:
        pace.end_mini_batch()
    assert "Stage 1 took 1 s for its F actions of one mini-batch" in str(raised.value)
    assert "takes 0.02 s at time_scale 1; set time_scale to more than 50" in str(raised.value)


class Recorder:
    """Stands for a real channel and notes when messages reach it."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.arrivals: list[tuple[int, float]] = []
        self.failure = failure
        self.flushed = 0

    def send(self, tensor: torch.Tensor, action: Action, dtype: torch.dtype) -> None:
        if self.failure is not None:
            raise self.failure
        self.arrivals.append((action.micro_batch, time.perf_counter()))

    def flush(self) -> None:
        self.flushed += 1


def paced(recorder: Recorder, **link: Any) -> PacedChannel:
    return PacedChannel(cast(Channel, recorder), LinkTimes(**link), 2.0)


def test_messages_queue_on_the_link_and_then_wait_for_its_latency() -> None:
    recorder = Recorder()
    channel = paced(recorder, transfer=0.02, latency=0.03)
    started = time.perf_counter()
    for micro_batch in range(3):
        channel.send(torch.zeros(1), Action(kind=Kind.FORWARD, micro_batch=micro_batch), torch.float32)
    sent = time.perf_counter() - started
    channel.flush()

    assert sent < 0.04  # sending waits for nothing
    assert [micro_batch for micro_batch, _ in recorder.arrivals] == [0, 1, 2]
    for number, (_, arrival) in enumerate(recorder.arrivals, start=1):
        assert arrival - started >= 2.0 * (number * 0.02 + 0.03) - 1e-3
    assert recorder.flushed == 1


def test_what_goes_wrong_on_the_way_is_told_when_the_channel_is_flushed() -> None:
    channel = paced(Recorder(RuntimeError("the line is cut")), transfer=0.0)
    channel.send(torch.zeros(1), F, torch.float32)

    with pytest.raises(RuntimeError, match="the line is cut"):
        channel.flush()
