"""Runs one stage's actions with real tensors: the second reader of a schedule."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybridop.devices.host import has_bfloat16, synchronize
from lightning_hybridop.pipeline.emulation import Pace, PacedChannel
from lightning_hybridop.pipeline.stage import StageModel
from lightning_hybridop.pipeline.transport import Channel
from lightning_hybridop.pipeline.work import Perturbation, StageOutcome, Steps, Work
from lightning_hybridop.planning.plan import Plan, WireName
from lightning_hybridop.schedules.actions import Action, Kind
from lightning_hybridop.schedules.flow import (
    PERTURBED_AHEAD,
    RECEIVES_AHEAD,
    SENDS_AHEAD,
    keeps_few_underway,
    source_of,
)
from lightning_hybridop.schedules.timeline import TimedAction

WIRES: Mapping[WireName, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}


class Engine:
    """Executes schedules on one stage.

    Args:
        model: this stage's part of the user's model.
        plan: the plan of the whole pipeline.
        stage: which of the plan's stages this is.
        parameters: the trainable parameters that this stage owns, by name.
        zo_parameters: those of them that a zo stage perturbs, or with the adjoint estimator trains.
        factors: the layers of `zo_parameters`, if those are LoRA factors that groups of rows can have values of.
        channels: a channel to each neighbouring stage, keyed by that stage.
        width: size D of the hidden state [B, T, D].
        boundary_dtypes: dtype in which stage `i` sends its hidden states, for every stage.
        device: where this stage computes.
        clock_offset: seconds to add to `time.perf_counter()` to get rank 0's.
        pace: how long training actions must last, when this stage stands for another device.
    """

    def __init__(
        self,
        *,
        model: StageModel,
        plan: Plan,
        stage: int,
        parameters: Mapping[str, nn.Parameter],
        zo_parameters: Mapping[str, nn.Parameter],
        factors: Mapping[str, nn.Linear] | None = None,
        channels: Mapping[int, Channel | PacedChannel],
        width: int,
        boundary_dtypes: Sequence[torch.dtype],
        device: torch.device,
        clock_offset: float,
        pace: Pace | None = None,
    ) -> None:
        self.model = model
        self.plan = plan
        self.stage = stage
        self.parameters = parameters
        self.zo_parameters = zo_parameters
        self.factors = factors
        self.channels = channels
        self.width = width
        self.boundary_dtypes = boundary_dtypes
        self.device = device
        self._has_bfloat16 = has_bfloat16(device)
        self.clock_offset = clock_offset
        self.pace = pace
        self.is_last = stage == len(plan.stages) - 1

    def train(
        self,
        actions: Sequence[Action],
        *,
        steps: Steps,
        token_shapes: Sequence[tuple[int, int]],
        weights: Sequence[float],
        perturbation: Perturbation,
        sends_ahead: int = SENDS_AHEAD,
    ) -> StageOutcome:
        """Execute this stage's actions of one training mini-batch.

        `token_shapes` are the micro-batches' (rows, length), `weights` their shares of the loss. Gradients that the
        parameters held before are left as they were; the new ones are in the outcome. Of what was sent to a neighbour at
        most `sends_ahead` messages wait here until it takes them; the schedule must come to its end with so few.
        """
        work = self.work(
            actions, steps=steps, token_shapes=token_shapes, weights=weights, perturbation=perturbation
        )
        outcome = work.outcome
        underway: list[Action] = []
        with work.own_gradients():
            for position, action in enumerate(actions):
                if keeps_few_underway(self.plan, self.stage, action):
                    self._keep_few_underway(underway, action)
                incoming = self._receive(actions, position, token_shapes)
                started = time.perf_counter()
                outgoing = work.run(action, incoming)
                if self.pace is not None:
                    self.pace.hold(action, started)
                self._record(action, started, outcome.timeline)
                if outgoing is not None:
                    self.send(action, outgoing, ahead=sends_ahead)
        for channel in self.channels.values():
            channel.flush()
        if self.pace is not None:
            self.pace.end_mini_batch()
        return outcome

    def work(
        self,
        actions: Sequence[Action],
        *,
        steps: Steps,
        token_shapes: Sequence[tuple[int, int]],
        weights: Sequence[float],
        perturbation: Perturbation,
    ) -> Work:
        """Return this stage's part of one training mini-batch, apart from what connects the stages."""
        return Work(
            self.model,
            self.plan,
            self.stage,
            actions=actions,
            parameters=self.parameters,
            zo_parameters=self.zo_parameters,
            factors=self.factors,
            device=self.device,
            steps=steps,
            token_shapes=token_shapes,
            weights=weights,
            perturbation=perturbation,
        )

    def evaluate(
        self,
        actions: Sequence[Action],
        *,
        step: Callable[[int], Any],
        whole_step: Callable[[], Any],
        token_shapes: Sequence[tuple[int, int]],
        join: Callable[[list[Tensor]], list[Tensor] | None] = lambda ended_BTD: ended_BTD,
    ) -> Any:
        """Execute a forward-only schedule; the last stage returns what `whole_step` does, the others None.

        `step` runs the user's step on one micro-batch and `whole_step` on the mini-batch. Only the latter runs to its
        end, once and on the last stage, so that whatever the step does behind the model is done as in one process. `join`
        makes the hidden states of the whole mini-batch from those of `actions`; where it returns None another replica's
        last stage goes on with them.
        """
        output: Any = None
        if self.is_last and self.stage == 0:
            return self.model.output(whole_step, None)
        ended_BTD: list[Tensor] = []
        for position, action in enumerate(actions):
            incoming = self._receive(actions, position, token_shapes)
            run = partial(step, action.micro_batch)
            if self.is_last:
                assert incoming is not None
                ended_BTD.append(self.model.through_blocks(run, incoming))
            else:
                self.send(action, self.model.hidden(run, incoming))
        joined_BTD = join(ended_BTD) if self.is_last else None
        if joined_BTD is not None:
            with self.model.behind_blocks():
                output = self.model.output(
                    whole_step, torch.cat([part.to(self.device) for part in joined_BTD])
                )
        for channel in self.channels.values():
            channel.flush()
        return output

    def _keep_few_underway(self, underway: list[Action], action: Action) -> None:
        """Wait until the next stage has taken all but a few of the perturbed forwards before `action`.

        A slower stage would else find them all in its mailbox. By the schedule's dependencies this ends.
        """
        if len(underway) == PERTURBED_AHEAD:
            self.channels[self.stage + 1].wait_until_taken(underway.pop(0))
        underway.append(action)

    def _receive(
        self, actions: Sequence[Action], position: int, token_shapes: Sequence[tuple[int, int]]
    ) -> Tensor | None:
        """Announce the next receives, then wait for this action's own."""
        for action in actions[position : position + 1 + RECEIVES_AHEAD]:
            source = source_of(self.plan, self.stage, action)
            if source is not None and not self.channels[source].is_posted(action):
                rows, length = token_shapes[action.micro_batch]
                self.post(action, (rows * action.count, length, self.width))
        source = source_of(self.plan, self.stage, actions[position])
        return None if source is None else self.receive(actions[position])

    def post(self, action: Action, shape: tuple[int, ...]) -> None:
        """Announce that the hidden state or gradient of `action` will be received."""
        if action.kind is Kind.BACKWARD:
            self.channels[self.stage + 1].post(action, shape, self._gradient_form(self.stage))
        else:
            self.channels[self.stage - 1].post(action, shape, self._hidden_form(self.stage - 1))

    def receive(self, action: Action) -> Tensor:
        """Wait for what was announced, and return it on this stage's device as if it had travelled in its own dtype."""
        backward = action.kind is Kind.BACKWARD
        source = self.stage + 1 if backward else self.stage - 1
        dtype = self._gradient_dtype(self.stage) if backward else self.boundary_dtypes[source]
        # Widened on the way to a device that has no bfloat16.
        lacking = dtype == torch.bfloat16 and not self._has_bfloat16
        return self.channels[source].receive(action).to(torch.float32 if lacking else dtype).to(self.device)

    def send(self, action: Action, tensor: Tensor, *, ahead: int = SENDS_AHEAD) -> None:
        """Start sending the hidden state or gradient of `action` to the stage that waits for it.

        Waits until the other stage has taken all but fewer than `ahead` of the earlier messages to it.
        """
        backward = action.kind is Kind.BACKWARD
        channel = self.channels[self.stage - 1 if backward else self.stage + 1]
        channel.make_room(ahead)
        channel.send(
            tensor, action, self._gradient_form(self.stage - 1) if backward else self._hidden_form(self.stage)
        )

    @property
    def sent_bytes(self) -> int:
        """All that this stage ever sent to its neighbours."""
        return sum(channel.sent_bytes for channel in self.channels.values())

    def _hidden_form(self, stage: int) -> torch.dtype:
        """Return the format that hidden states travel in from `stage` to the next one."""
        wire = self.plan.stages[stage].wire
        return self.boundary_dtypes[stage] if wire is None else WIRES[wire]

    def _gradient_form(self, stage: int) -> torch.dtype:
        """Return the format that gradients travel in to `stage` from the next one."""
        return self._gradient_dtype(stage) if self.plan.stages[stage].wire is None else torch.bfloat16

    def _gradient_dtype(self, stage: int) -> torch.dtype:
        """Return what a stage receives gradients in: its own dtype, but for float16, which small gradients fall out of."""
        dtype = self.boundary_dtypes[stage]
        return torch.float32 if dtype == torch.float16 else dtype

    def _record(self, action: Action, started: float, timeline: list[TimedAction]) -> None:
        synchronize(self.device)
        timeline.append(
            TimedAction(
                stage=self.stage,
                action=action,
                start=started + self.clock_offset,
                end=time.perf_counter() + self.clock_offset,
            )
        )
