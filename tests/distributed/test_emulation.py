"""Stages that stand for other devices take their time, and learn what they would have learnt without."""

import warnings
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_hybridop import HybridOPStrategy, Plan, even_plan
from lightning_hybridop.pipeline.emulation import Emulation
from lightning_hybridop.planning.costs import LinkTimes, StageTimes
from lightning_hybridop.planning.plan import Figures
from lightning_hybridop.schedules import build_schedule
from lightning_hybridop.simulation.program import schedule_program
from lightning_hybridop.simulation.simulator import simulate
from tests.distributed.harness import RankError, run_ranks
from tests.distributed.runs import quiet_trainer
from tests.tiny import TinyModule, TokenRows

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

PLAN = even_plan(blocks=6, stages=3, zo_stages=1, micro_batches=2, exit_queries=1)


def emulation(seconds: float) -> Emulation:
    stages = (
        StageTimes(role="zo", forward=seconds, exit_forward=seconds, baseline_forward=2 * seconds),
        StageTimes(role="bp", forward=seconds, backward=2 * seconds),
        StageTimes(role="bp", forward=2 * seconds, backward=3 * seconds),
    )
    return Emulation(stages=stages, links=(LinkTimes(transfer=seconds), LinkTimes(latency=seconds)))


def train(plan: Plan, emulated: Emulation | None) -> tuple[list[float], Figures | None]:
    """Return the losses of three mini-batches and what was measured."""
    losses: list[float] = []

    class Module(TinyModule):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            losses.append(float(outputs["loss"]))

    strategy = HybridOPStrategy(plan, emulation=emulated)
    trainer = quiet_trainer(strategy, max_steps=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Module(), DataLoader(TokenRows(16), batch_size=4))
    return losses, strategy.plan.measured


def both(plan: Plan, emulated: Emulation) -> Any:
    return train(plan, None), train(plan, emulated)


def test_emulated_stages_take_at_least_their_time_and_learn_the_same() -> None:
    emulated = emulation(0.03)
    program = schedule_program(
        build_schedule(PLAN), PLAN, emulated.stages, emulated.links, resident=(0, 0, 0), kept=(0, 0, 0)
    )
    predicted = simulate(program)

    for (losses, _), (emulated_losses, measured) in run_ranks(both, 3, PLAN, emulated):
        assert emulated_losses == losses
        assert measured is not None
        # Sleeping can only take longer, and clocks of processes differ by microseconds.
        assert measured.iteration_seconds > 0.99 * predicted.makespan


def test_a_host_slower_than_the_devices_it_plays_is_refused() -> None:
    with pytest.raises(RankError, match=r"EmulationError: Stage \d took .* set time_scale to more than"):
        run_ranks(train, 3, PLAN, emulation(1e-6))
