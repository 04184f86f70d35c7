import random
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_hybridop.planning.plan import Estimator, Plan, Role, ScheduleName, Stage, even_plan
from lightning_hybridop.schedules import SCHEDULES, build_schedule
from lightning_hybridop.schedules.actions import Action, Kind
from lightning_hybridop.schedules.forward_only import forward_only
from tests.schedules.executor import StuckError, execute, plans, work_of

ROBUST = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("name", SCHEDULES)
@ROBUST
@given(data=st.data())
def test_does_all_work_once_and_never_gets_stuck(name: ScheduleName, data: st.DataObject) -> None:
    check_all_work_is_done(data.draw(plans(schedule=name)))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("role", ["bp", "zo", "frozen"])
@pytest.mark.parametrize("stages", range(1, 7))
def test_stages_of_one_role(name: ScheduleName, role: Role, stages: int) -> None:
    for micro_batches in range(1, 7):
        check_all_work_is_done(
            Plan(
                blocks=stages,
                stages=tuple(Stage(first=index, last=index + 1, role=role) for index in range(stages)),
                micro_batches=micro_batches,
                queries=2,
                exit_queries=1 if role == "zo" else 0,
                schedule=name,
            )
        )


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("estimator", ["boundary", "adjoint"])
def test_every_mixture_of_zo_and_bp_stages(name: ScheduleName, estimator: Estimator) -> None:
    together = (1, 2, 5) if estimator == "boundary" else (1,)
    for zo, bp, micro_batches, queries, count in product((1, 2, 3), (1, 2), (1, 2, 5), (0, 1, 5), together):
        plan = even_plan(
            blocks=zo + bp,
            stages=zo + bp,
            zo_stages=zo,
            micro_batches=micro_batches,
            queries=queries,
            estimator=estimator,
            queries_per_forward=count,
            schedule=name,
        )
        check_all_work_is_done(plan)


@pytest.mark.parametrize("name", SCHEDULES)
@ROBUST
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_few_perturbed_hidden_states_wait_for_a_gradient_or_a_slower_stage(
    name: ScheduleName, data: st.DataObject, seed: int
) -> None:
    plan = data.draw(plans(schedule=name, estimators=["boundary"]))
    durations = random.Random(seed)

    # The order was made for other durations than the stages turn out to have.
    times = execute(
        plan,
        build_schedule(plan),
        lambda *_: durations.choice([0.1, 1.0, 10.0]) * durations.uniform(0.5, 1.5),
    ).times

    if plan.exit_stage is None:
        return
    signs = 2 if plan.difference == "central" else 1
    last = times[plan.exit_stage]
    gradients = {action.micro_batch: end for action, (_, end) in last.items() if action.kind is Kind.BACKWARD}
    made = {action: end for action, (_, end) in last.items() if action.kind is Kind.PERTURBED}
    for moment in made.values():
        waiting = [a.count for a, end in made.items() if end <= moment < gradients[a.micro_batch]]
        assert sum(waiting) <= signs * plan.queries_per_forward * plan.micro_batches
    for stage in range(plan.exit_stage):
        sent = {a: end for a, (_, end) in times[stage].items() if a.kind is Kind.PERTURBED}
        for moment in sent.values():
            underway = [a for a, end in sent.items() if end <= moment and times[stage + 1][a][0] >= moment]
            assert len(underway) <= 8


def check_all_work_is_done(plan: Plan) -> None:
    """Check that every stage does its work once, and that all of it can be executed."""
    schedule = build_schedule(plan)

    execution = execute(plan, schedule)

    assert len(schedule) == len(plan.stages)
    for stage, actions in enumerate(schedule):
        done = sorted([(str(a.kind), a.micro_batch, a.query, a.sign, a.count) for a in actions], key=str)
        assert done == work_of(plan, stage)
    assert execution.unread == []


@pytest.mark.parametrize("name", ["1f1b", "hybridop"])
@ROBUST
@given(data=st.data())
def test_holds_few_activations(name: ScheduleName, data: st.DataObject) -> None:
    plan = data.draw(plans(schedule=name))

    execution = execute(plan, build_schedule(plan))

    bp_stages = [index for index, stage in enumerate(plan.stages) if stage.role == "bp"]
    for index, stage in enumerate(bp_stages):
        assert execution.most_held[stage] <= len(bp_stages) - index


@given(plan=plans(schedule="gpipe"))
@ROBUST
def test_gpipe_holds_all_activations(plan: Plan) -> None:
    execution = execute(plan, build_schedule(plan))

    goes_back = ("bp", "zo") if plan.estimator == "adjoint" else ("bp",)
    expected = [plan.micro_batches if stage.role in goes_back else 0 for stage in plan.stages]
    assert execution.most_held == expected


@given(plan=plans(schedule="hybridop"))
@ROBUST
def test_forward_only_runs_base_forwards_alone(plan: Plan) -> None:
    schedule = forward_only(plan)

    assert execute(plan, schedule).unread == []
    expected = tuple(Action(kind=Kind.FORWARD, micro_batch=m) for m in range(plan.micro_batches))
    assert schedule == (expected,) * len(plan.stages)


def test_the_executor_notices_what_cannot_run() -> None:
    plan = even_plan(blocks=2, stages=2, micro_batches=2, schedule="gpipe")
    first, second = build_schedule(plan)
    f0, f1, b1, b0 = first

    with pytest.raises(StuckError):
        execute(plan, ((f0, b0, f1, b1), second))
    with pytest.raises(AssertionError, match="without its forward"):
        execute(plan, ((b0, f0, f1, b1), second))
    without_backward = tuple(
        tuple(a for a in actions if a.kind is Kind.FORWARD) for actions in (first, second)
    )
    assert execute(plan, (without_backward[0], without_backward[1][:1])).unread == [(1, ("F", 1, None, 1))]
