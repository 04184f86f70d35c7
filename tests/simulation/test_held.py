from typing import get_args

import pytest

from lightning_hybridop.planning.plan import Plan, ScheduleName, even_plan
from lightning_hybridop.schedules import build_schedule
from lightning_hybridop.schedules.actions import Action, Kind
from lightning_hybridop.simulation.held import held_and_released


def boundary(**options: int) -> Plan:
    return even_plan(blocks=3, stages=3, zo_stages=2, estimator="boundary", **options)


@pytest.mark.parametrize("schedule", get_args(ScheduleName))
@pytest.mark.parametrize("estimator", ["loss", "boundary", "adjoint"])
def test_whatever_is_taken_is_given_back(schedule: ScheduleName, estimator: str) -> None:
    plan = even_plan(
        blocks=4,
        stages=4,
        zo_stages=2,
        micro_batches=3,
        queries=7,
        estimator=estimator,
        queries_per_forward=2 if estimator == "boundary" else 1,
        schedule=schedule,
    )
    for stage, actions in enumerate(build_schedule(plan)):
        memory = held_and_released(plan, stage, actions, kept=2.0, multiplied=4.0)
        held = 0.0
        for action in actions:
            taken, given_back = memory.get(action, (0.0, 0.0))
            held += taken
            assert given_back <= held
            held -= given_back
        assert held == 0.0
        goes_back = stage > 1 or estimator == "adjoint" or (estimator == "boundary" and stage == 1)
        assert bool(memory) == goes_back


def test_what_waits_for_a_gradient_is_given_back_with_it() -> None:
    plan = boundary(micro_batches=1, queries=3)
    forward, back = (Action(kind=kind, micro_batch=0) for kind in (Kind.FORWARD, Kind.BACKWARD))
    first, second, third = (Action(kind=Kind.PERTURBED, micro_batch=0, query=query) for query in (2, 0, 1))

    memory = held_and_released(plan, 1, (forward, first, back, second, third), kept=2.0, multiplied=4.0)

    assert memory == {
        forward: (2, 0),
        first: (4, 0),  # waits
        back: (4, 4),  # the gradient comes, what waited goes
        second: (4, 4),
        third: (4, 4 + 2 + 4),  # and with the last one the gradient and the unperturbed hidden state
    }
    assert held_and_released(boundary(queries=0), 1, (forward, back), kept=2.0, multiplied=4.0) == {}
