"""Slow links and slow neighbours: transfers run beside the computation, and what waits with a sender is bounded."""

import time
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hybridop import HybridOPStrategy, Plan, even_plan
from lightning_hybridop.pipeline import learning
from lightning_hybridop.pipeline.emulation import Emulation
from lightning_hybridop.pipeline.transport import Channel
from lightning_hybridop.planning.costs import LinkTimes, StageTimes
from lightning_hybridop.schedules.actions import Action
from lightning_hybridop.schedules.flow import SENDS_AHEAD, sends_ahead
from tests.distributed.harness import run_ranks
from tests.distributed.runs import quiet_trainer
from tests.tiny import TinyModule, loader

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(240)]

# Eight perturbed forwards of each of four micro-batches, which the second stage takes its time for.
AHEAD = even_plan(blocks=6, stages=2, zo_stages=1, micro_batches=4, queries=8)
# Links that are busy as long as the stages.
BALANCED = even_plan(blocks=6, stages=2, micro_batches=8, schedule="gpipe", wire="bfloat16")
SECONDS = 0.03


class SlowSecondStage(TinyModule):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if torch.distributed.get_rank() == 1:
            time.sleep(0.01)
        return super().training_step(batch, batch_idx)


def train(
    module: TinyModule, plan: Plan, emulation: Emulation | None = None, steps: int = 1
) -> HybridOPStrategy:
    strategy = HybridOPStrategy(plan, emulation=emulation)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet_trainer(strategy, max_steps=steps).fit(module, loader(8 * steps))
    return strategy


def most_held_and_iteration_time() -> dict[str, Any]:
    held: list[tuple[int, int]] = []
    send = Channel.send

    def noted(channel: Channel, tensor: Tensor, action: Action, form: torch.dtype) -> None:
        send(channel, tensor, action, form)
        held.append((channel.held, channel.held_bytes))

    Channel.send = noted  # type: ignore[method-assign]
    first = train(SlowSecondStage(), AHEAD).last_result
    bounded = max(held, default=(0, 0))
    held.clear()
    learning.sends_ahead = lambda plan: 10**6  # type: ignore[assignment]
    second = train(SlowSecondStage(), AHEAD).last_result
    learning.sends_ahead = sends_ahead
    assert first is not None
    assert second is not None

    stages = (StageTimes(role="bp", forward=SECONDS, backward=2 * SECONDS),) * 2
    emulation = Emulation(stages=stages, links=(LinkTimes(transfer=SECONDS, gradient=2 * SECONDS),))
    measured = train(TinyModule(), BALANCED, emulation, steps=3).plan.measured
    assert measured is not None
    return {
        "bounded": bounded,
        "unbounded": max(held, default=(0, 0)),
        "losses": (first.loss, second.loss),
        "seconds": measured.iteration_seconds,
    }


def test_a_sender_waits_for_a_slow_neighbour_and_transfers_run_beside_the_computation() -> None:
    first, second = run_ranks(most_held_and_iteration_time, 2)

    message = 2 * 7 * 16 * 4  # two rows of seven tokens
    assert first["bounded"] == (SENDS_AHEAD, SENDS_AHEAD * message)
    assert first["unbounded"][0] > 3 * SENDS_AHEAD
    assert len(set(first["losses"] + second["losses"])) == 1

    compute, transfers = 8 * 3 * SECONDS, 8 * 3 * SECONDS
    # One after the other, they would take the sum, and the other stage's first and last action besides.
    assert compute <= first["seconds"] < 0.8 * (compute + transfers)
