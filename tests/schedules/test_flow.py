"""Back-pressure: with the window of its schedule no stage waits for ever, in whatever order the stages go on."""

import random
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_hybridop.planning.plan import Plan, ScheduleName, Stage, even_plan
from lightning_hybridop.schedules import SCHEDULES, build_schedule
from lightning_hybridop.schedules.actions import Kind, Schedule
from lightning_hybridop.schedules.flow import SENDS_AHEAD, runs_to_its_end, sends_ahead
from tests.schedules.executor import plans

ROBUST = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Links:
    """Stages that run their actions one small step at a time, in an order drawn at random.

    A step of a stage announces, reads, or sends; a message is taken as soon as both sides are there. Written from what
    the engine does, with queues of messages in the place of positions.
    """

    def __init__(self, plan: Plan, schedule: Schedule, window: int) -> None:
        self.plan, self.schedule, self.window = plan, schedule, window
        stages = len(schedule)
        self.position = [0] * stages
        self.has_read = [False] * stages
        self.waiting = [{stage - 1: [], stage + 1: []} for stage in range(stages)]
        """By sender and target: what was sent and is not known to be taken, in order."""
        self.announced = [set() for _ in range(stages)]
        self.received = [set() for _ in range(stages)]
        self.most_waiting = 0

    def reads_from(self, stage: int, action) -> int | None:
        source = stage + 1 if action.kind is Kind.BACKWARD else stage - 1
        if action.kind is Kind.EXIT and action.query is None:
            return None
        return source if 0 <= source < len(self.schedule) else None

    def step(self, stage: int) -> bool:
        """Let a stage do its next small thing; False where it must wait or has nothing left."""
        actions, at = self.schedule[stage], self.position[stage]
        if at == len(actions):
            return False
        action = actions[at]
        if not self.has_read[stage]:
            few = self.plan.estimator == "boundary" and stage != self.plan.exit_stage
            if few and action.kind is Kind.PERTURBED:
                earlier = [other for other in actions[:at] if other.kind is Kind.PERTURBED]
                if len(earlier) >= 8 and earlier[-8] not in self.received[stage + 1]:
                    return False
            for ahead in actions[at : at + 5]:
                source = self.reads_from(stage, ahead)
                if source is not None and ahead not in self.received[stage]:
                    self.announced[stage].add(ahead)
                    self.take(source, stage)
            if self.reads_from(stage, action) is not None and action not in self.received[stage]:
                return False
            self.has_read[stage] = True
            return True
        target = stage - 1 if action.kind is Kind.BACKWARD else stage + 1
        if 0 <= target < len(self.schedule) and action in self.schedule[target]:
            waiting = self.waiting[stage][target]
            # The oldest first, whatever else has been taken.
            while len(waiting) >= self.window and waiting[0] in self.received[target]:
                waiting.pop(0)
            if len(waiting) >= self.window:
                return False
            waiting.append(action)
            self.most_waiting = max(self.most_waiting, len(waiting))
            self.take(stage, target)
        self.position[stage] += 1
        self.has_read[stage] = False
        return True

    def take(self, source: int, target: int) -> None:
        self.received[target] |= self.announced[target].intersection(self.waiting[source][target])

    def come_to_an_end(self, drawn: random.Random) -> bool:
        stages = list(range(len(self.schedule)))
        while True:
            drawn.shuffle(stages)
            if not any(self.step(stage) for stage in stages):
                return all(
                    at == len(actions) for at, actions in zip(self.position, self.schedule, strict=True)
                )


@pytest.mark.parametrize("name", SCHEDULES)
@ROBUST
@given(data=st.data())
def test_no_stage_waits_for_ever_with_the_window_of_its_schedule(
    name: ScheduleName, data: st.DataObject
) -> None:
    plan = data.draw(plans(schedule=name))
    transfers = data.draw(st.lists(st.sampled_from([0.0, 0.1, 5.0]), min_size=6, max_size=6))
    stages = tuple(replace(stage, transfer=time) for stage, time in zip(plan.stages, transfers, strict=False))
    plan = replace(plan, stages=stages, micro_batches=data.draw(st.sampled_from([1, 2, 5, 12])))
    schedule, window = build_schedule(plan), sends_ahead(plan)

    links = Links(plan, schedule, window)
    assert links.come_to_an_end(random.Random(data.draw(st.integers(0, 99))))
    assert links.most_waiting <= window


@pytest.mark.parametrize("name", SCHEDULES)
@ROBUST
@given(data=st.data())
def test_whether_a_window_is_wide_enough_does_not_depend_on_who_goes_first(
    name: ScheduleName, data: st.DataObject
) -> None:
    plan = replace(data.draw(plans(schedule=name)), micro_batches=data.draw(st.sampled_from([2, 6, 14])))
    schedule, window = build_schedule(plan), data.draw(st.integers(1, 8))
    expected = runs_to_its_end(schedule, plan, window=window)

    for number in range(3):
        assert Links(plan, schedule, window).come_to_an_end(random.Random(number)) == expected


# Each stage slower than the one before, and slow links: what is sent early is read late.
UNEVEN = Plan(
    blocks=3,
    stages=(
        Stage(first=0, last=1, role="zo", speed=10.0, transfer=5.0),
        Stage(first=1, last=2, speed=1.0),
        Stage(first=2, last=3, speed=0.2),
    ),
    micro_batches=8,
)


def test_a_schedule_that_needs_more_gets_more() -> None:
    window = sends_ahead(UNEVEN)

    assert window > SENDS_AHEAD
    assert not runs_to_its_end(build_schedule(UNEVEN), UNEVEN, window=SENDS_AHEAD)
    assert runs_to_its_end(build_schedule(UNEVEN), UNEVEN, window=window)


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_of_one_speed_do_with_a_few_messages(name: ScheduleName) -> None:
    shapes = product((1, 2, 3), (1, 2, 3), (1, 4, 16), (1, 12))
    for zo, bp, micro_batches, queries in shapes:
        plan = even_plan(
            blocks=zo + bp,
            stages=zo + bp,
            zo_stages=zo,
            micro_batches=micro_batches,
            queries=queries,
            schedule=name,
        )
        assert sends_ahead(plan) == SENDS_AHEAD
