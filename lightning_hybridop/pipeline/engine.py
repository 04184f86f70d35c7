"""Runs one stage's actions with real tensors: the second reader of a schedule."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybridop.estimation.directions import DirectionKey, Distribution, derive_seed
from lightning_hybridop.estimation.estimators import Directions, query_key, query_sign
from lightning_hybridop.estimation.grouped import perturbed_in_groups
from lightning_hybridop.estimation.perturbation import perturbed
from lightning_hybridop.pipeline.boundary import InnerProducts
from lightning_hybridop.pipeline.emulation import Pace, PacedChannel
from lightning_hybridop.pipeline.random_state import random_state_kept
from lightning_hybridop.pipeline.stage import StageModel
from lightning_hybridop.pipeline.transport import Channel
from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.schedules.actions import Action, Kind
from lightning_hybridop.schedules.dependencies import PERTURBED_AHEAD, backwards
from lightning_hybridop.schedules.timeline import TimedAction

# How many receives are announced ahead of the one that is waited for: enough for a transfer to run beside the
# computation, few enough to bound the buffers of a stage that lags behind.
RECEIVES_AHEAD = 4


class StepError(RuntimeError):
    """The user's step returned something that cannot be trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The user's step on one micro-batch, in its three uses; each takes the micro-batch's number.

    `perturbed` takes as well how many copies of the micro-batch's rows to run. `base` is the only one whose logging
    counts. All return what the user's step returns.
    """

    base: Callable[[int], Any]
    perturbed: Callable[[int, int], Any]
    early_exit: Callable[[int], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Perturbation:
    """How directions are drawn, as far as a stage needs to know."""

    seed: int
    step: int
    epsilon: float
    directions: Directions
    distribution: Distribution = "normal"


@dataclass(slots=True, kw_only=True)
class StageOutcome:
    """What one stage knows after a mini-batch.

    Losses are keyed by (micro-batch, query or None, sign); the last stage holds `base` and `perturbed`, the exit
    stage `early_exit`, and `products` with the boundary estimator. `gradients` are those of the stage's own backward
    passes, by parameter name.
    """

    base: dict[tuple[int, int | None, int], float] = field(default_factory=dict)
    perturbed: dict[tuple[int, int | None, int], float] = field(default_factory=dict)
    early_exit: dict[tuple[int, int | None, int], float] = field(default_factory=dict)
    products: InnerProducts | None = None
    gradients: dict[str, Tensor] = field(default_factory=dict)
    timeline: list[TimedAction] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """Activations that a backward will need: the leaf that came in and the end of the graph that went out."""

    received_BTD: Tensor | None
    end: Tensor


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
        self.clock_offset = clock_offset
        self.pace = pace
        role = plan.stages[stage].role
        self.learns_by_backward = role == "bp" or (role == "zo" and plan.estimator == "adjoint")
        self.is_last = stage == len(plan.stages) - 1
        self.sends_gradient = self.learns_by_backward and stage > 0 and len(backwards(plan, stage - 1)) > 0
        self.takes_products = role == "zo" and plan.estimator == "boundary" and stage == plan.exit_stage

    def train(
        self,
        actions: Sequence[Action],
        *,
        steps: Steps,
        token_shapes: Sequence[tuple[int, int]],
        weights: Sequence[float],
        perturbation: Perturbation,
    ) -> StageOutcome:
        """Execute this stage's actions of one training mini-batch.

        `token_shapes` are the micro-batches' (rows, length), `weights` their shares of the loss. Gradients that the
        parameters held before are left as they were; the new ones are in the outcome.
        """
        outcome = StageOutcome()
        kept: dict[int, _Kept] = {}
        exit_inputs: dict[int, Tensor | None] = {}
        if self.takes_products:
            outcome.products = InnerProducts(_count_perturbed(actions))
        underway: list[Action] = []
        keeps_exit_input = any(action.kind is Kind.EXIT and action.query is None for action in actions)
        with self._own_gradients(outcome.gradients):
            for position, action in enumerate(actions):
                if (
                    action.kind is Kind.PERTURBED
                    and self.plan.estimator == "boundary"
                    and not self.takes_products
                ):
                    self._keep_few_underway(underway, action)
                incoming = self._receive(actions, position, token_shapes)
                if action.kind is Kind.FORWARD and keeps_exit_input:
                    exit_inputs[action.micro_batch] = incoming
                if action.kind is Kind.EXIT and action.query is None:
                    incoming = exit_inputs.pop(action.micro_batch)
                started = time.perf_counter()
                with self._dropout_of(action, perturbation):
                    match action.kind:
                        case Kind.FORWARD:
                            outgoing = self._forward(action, steps, incoming, kept, outcome)
                        case Kind.BACKWARD:
                            outgoing = self._backward(action, weights, incoming, kept, outcome)
                        case Kind.PERTURBED:
                            rows = token_shapes[action.micro_batch][0]
                            outgoing = self._perturbed(action, steps, incoming, perturbation, rows, outcome)
                        case Kind.EXIT:
                            outgoing = self._early_exit(action, steps, incoming, perturbation, outcome)
                if self.pace is not None:
                    self.pace.hold(action, started)
                self._record(action, started, outcome.timeline)
                if outgoing is not None:
                    self._send(action, outgoing)
        for channel in self.channels.values():
            channel.flush()
        if self.pace is not None:
            self.pace.end_mini_batch()
        return outcome

    def evaluate(
        self,
        actions: Sequence[Action],
        *,
        step: Callable[[int], Any],
        whole_step: Callable[[], Any],
        token_shapes: Sequence[tuple[int, int]],
    ) -> Any:
        """Execute a forward-only schedule; the last stage returns what `whole_step` does, the others None.

        `step` runs the user's step on one micro-batch and `whole_step` on the mini-batch. Only the latter runs to its
        end, once and on the last stage, so that whatever the step does behind the model is done as in one process.
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
                self._send(action, self.model.hidden(run, incoming))
        if self.is_last:
            with self.model.behind_blocks():
                output = self.model.output(whole_step, torch.cat(ended_BTD))
        for channel in self.channels.values():
            channel.flush()
        return output

    def _forward(
        self,
        action: Action,
        steps: Steps,
        received_BTD: Tensor | None,
        kept: dict[int, _Kept],
        outcome: StageOutcome,
    ) -> Tensor | None:
        def run() -> Any:
            return steps.base(action.micro_batch)

        if received_BTD is not None and self.learns_by_backward:
            received_BTD.requires_grad_()
        with torch.set_grad_enabled(self.learns_by_backward):
            if self.is_last:
                end = loss_of(self.model.output(run, received_BTD))
                outcome.base[action.micro_batch, None, 1] = float(end.detach())
            else:
                end = self.model.hidden(run, received_BTD)
        if self.learns_by_backward:
            kept[action.micro_batch] = _Kept(received_BTD=received_BTD, end=end)
        if outcome.products is not None:
            outcome.products.put_base(action.micro_batch, end)
        return None if self.is_last else end

    def _backward(
        self,
        action: Action,
        weights: Sequence[float],
        gradient_BTD: Tensor | None,
        kept: dict[int, _Kept],
        outcome: StageOutcome,
    ) -> Tensor | None:
        if outcome.products is not None:
            assert gradient_BTD is not None
            outcome.products.put_gradient(action.micro_batch, gradient_BTD)
            return None
        micro_batch = kept.pop(action.micro_batch)
        weight = weights[action.micro_batch]
        # A micro-batch without label tokens has a loss of 0/0; its gradient is left out, not multiplied by 0.
        if weight > 0.0 and micro_batch.end.requires_grad:
            torch.autograd.backward(
                micro_batch.end * weight if gradient_BTD is None else micro_batch.end, gradient_BTD
            )
        if not self.sends_gradient:
            return None
        assert micro_batch.received_BTD is not None
        gradient = micro_batch.received_BTD.grad
        return torch.zeros_like(micro_batch.received_BTD) if gradient is None else gradient

    @torch.no_grad()
    def _perturbed(
        self,
        action: Action,
        steps: Steps,
        received_BTD: Tensor | None,
        perturbation: Perturbation,
        rows: int,
        outcome: StageOutcome,
    ) -> Tensor | None:
        assert action.query is not None

        def run() -> Any:
            return steps.perturbed(action.micro_batch, action.count)

        with self._moved(action, action.query, perturbation, rows=rows):
            if self.is_last:
                loss = loss_of(self.model.output(run, received_BTD))
                outcome.perturbed[action.micro_batch, action.query, action.sign] = float(loss)
                return None
            hidden_BTD = self.model.hidden(run, received_BTD)
        if outcome.products is None:
            return hidden_BTD
        outcome.products.put_perturbed(action, hidden_BTD)
        return None

    @torch.no_grad()
    def _early_exit(
        self,
        action: Action,
        steps: Steps,
        received_BTD: Tensor | None,
        perturbation: Perturbation,
        outcome: StageOutcome,
    ) -> Tensor | None:
        moved = (
            nullcontext()
            if action.query is None
            else self._moved(action, self.plan.queries + action.query, perturbation)
        )
        with moved:
            if self.stage == self.plan.exit_stage:
                with self.model.exiting():
                    output = self.model.output(lambda: steps.early_exit(action.micro_batch), received_BTD)
                outcome.early_exit[action.micro_batch, action.query, action.sign] = float(loss_of(output))
                return None
            return self.model.hidden(lambda: steps.early_exit(action.micro_batch), received_BTD)

    def _moved(
        self, action: Action, query: int, perturbation: Perturbation, *, rows: int = 1
    ) -> AbstractContextManager[None]:
        """Move this stage's zo parameters along the directions of an action; other roles have none to move.

        `query` numbers the first of its directions, `rows` are those of its micro-batch.
        """
        row_numbers = range(rows) if perturbation.directions == "row" else (None,)
        moves = [
            (
                self._key(perturbation, action.micro_batch, number, row),
                query_sign(number, self.plan.difference) * action.sign * perturbation.epsilon,
            )
            for number in range(query, query + action.count)
            for row in row_numbers
        ]
        if len(moves) == 1:
            return perturbed(self.zo_parameters, *moves[0])
        if not self.zo_parameters:
            return nullcontext()
        assert self.factors is not None
        return perturbed_in_groups(self.factors, moves)

    def _key(self, perturbation: Perturbation, micro_batch: int, query: int, row: int | None) -> DirectionKey:
        return query_key(
            seed=perturbation.seed,
            step=perturbation.step,
            directions=perturbation.directions,
            micro_batch=micro_batch,
            query=query,
            row=row,
            difference=self.plan.difference,
            distribution=perturbation.distribution,
        )

    def _keep_few_underway(self, underway: list[Action], action: Action) -> None:
        """Wait until the next stage has taken all but a few of the perturbed forwards before `action`.

        A slower stage would else find them all in its mailbox. By the schedule's dependencies this ends.
        """
        if len(underway) == PERTURBED_AHEAD:
            self.channels[self.stage + 1].wait_until_taken(underway.pop(0))
        underway.append(action)

    @contextmanager
    def _dropout_of(self, action: Action, perturbation: Perturbation) -> Iterator[None]:
        """Give every forward of a micro-batch on this stage the same dropout masks, and leave the global state be."""
        with random_state_kept(self.device):
            seed = derive_seed(
                "dropout", perturbation.seed, perturbation.step, action.micro_batch, self.stage
            )
            # Not torch.manual_seed: it takes milliseconds, to note a stack trace for each kind of device there is.
            torch.default_generator.manual_seed(seed)
            if self.device.type != "cpu":
                torch.get_device_module(self.device).manual_seed(seed)
            yield

    @contextmanager
    def _own_gradients(self, gradients: dict[str, Tensor]) -> Iterator[None]:
        """Collect the gradients made inside the block into `gradients`, and put the earlier ones back."""
        earlier = {name: parameter.grad for name, parameter in self.parameters.items()}
        for parameter in self.parameters.values():
            parameter.grad = None
        try:
            yield
            for name, parameter in self.parameters.items():
                if parameter.grad is not None:
                    gradients[name] = parameter.grad
        finally:
            for name, parameter in self.parameters.items():
                parameter.grad = earlier[name]

    def _source(self, action: Action) -> int | None:
        """Return the stage whose tensor an action consumes; None if it needs none."""
        if action.kind is Kind.BACKWARD:
            return None if self.is_last else self.stage + 1
        if self.stage == 0 or (action.kind is Kind.EXIT and action.query is None):
            return None
        return self.stage - 1

    def _receive(
        self, actions: Sequence[Action], position: int, token_shapes: Sequence[tuple[int, int]]
    ) -> Tensor | None:
        """Announce the next receives, then wait for this action's own."""
        for action in actions[position : position + 1 + RECEIVES_AHEAD]:
            source = self._source(action)
            if source is not None and not self.channels[source].is_posted(action):
                sender = self.stage if action.kind is Kind.BACKWARD else source
                rows, length = token_shapes[action.micro_batch]
                shape = (rows * action.count, length, self.width)
                self.channels[source].post(action, shape, self.boundary_dtypes[sender])
        source = self._source(actions[position])
        return None if source is None else self.channels[source].receive(actions[position]).to(self.device)

    def _send(self, action: Action, tensor: Tensor) -> None:
        backward = action.kind is Kind.BACKWARD
        target = self.stage - 1 if backward else self.stage + 1
        self.channels[target].send(tensor, action, self.boundary_dtypes[target if backward else self.stage])

    def _record(self, action: Action, started: float, timeline: list[TimedAction]) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        timeline.append(
            TimedAction(
                stage=self.stage,
                action=action,
                start=started + self.clock_offset,
                end=time.perf_counter() + self.clock_offset,
            )
        )


def _count_perturbed(actions: Sequence[Action]) -> dict[int, int]:
    """Return how many perturbed forwards each micro-batch has."""
    return Counter(action.micro_batch for action in actions if action.kind is Kind.PERTURBED)


def loss_of(output: Any) -> Tensor:
    """Return the loss in what a training step returned: a tensor of one element, or a dict with `loss`.

    Raises:
        StepError: it returned something else.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise StepError(
            f"training_step returned {type(output).__name__}, expected a loss tensor of one element or a dict with "
            "'loss'; a pipelined step cannot be skipped by returning None."
        )
    return loss.reshape(())
