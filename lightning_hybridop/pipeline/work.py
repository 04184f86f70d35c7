"""What one stage does in one training mini-batch, action by action, apart from what connects the stages."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybridop.estimation.directions import DirectionKey, Distribution, derive_seed
from lightning_hybridop.estimation.estimators import Directions, query_key, query_sign
from lightning_hybridop.estimation.grouped import perturbed_in_groups
from lightning_hybridop.estimation.perturbation import perturbed
from lightning_hybridop.pipeline.boundary import InnerProducts
from lightning_hybridop.pipeline.random_state import random_state_kept
from lightning_hybridop.pipeline.stage import StageModel
from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.schedules.actions import Action, Kind
from lightning_hybridop.schedules.dependencies import backwards
from lightning_hybridop.schedules.timeline import TimedAction


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


class Work:
    """One stage's actions of one training mini-batch; each takes a tensor, or none, and gives one to send on, or none.

    Args:
        model: the stage's part of the user's model.
        plan: the plan of the whole pipeline.
        stage: which of the plan's stages this is.
        actions: all that the stage will run.
        parameters: the trainable parameters that the stage owns, by name.
        zo_parameters: those of them that a zo stage perturbs, or with the adjoint estimator trains.
        factors: the layers of `zo_parameters`, if those are LoRA factors that groups of rows can have values of.
        device: where the stage computes.
        steps: the user's step.
        token_shapes: the micro-batches' (rows, length).
        weights: the micro-batches' shares of the loss.
        perturbation: how directions are drawn.
    """

    def __init__(
        self,
        model: StageModel,
        plan: Plan,
        stage: int,
        *,
        actions: Sequence[Action],
        parameters: Mapping[str, nn.Parameter],
        zo_parameters: Mapping[str, nn.Parameter],
        factors: Mapping[str, nn.Linear] | None,
        device: torch.device,
        steps: Steps,
        token_shapes: Sequence[tuple[int, int]],
        weights: Sequence[float],
        perturbation: Perturbation,
    ) -> None:
        role = plan.stages[stage].role
        self._model = model
        self._plan = plan
        self._stage = stage
        self._is_last = stage == len(plan.stages) - 1
        self._learns_by_backward = role == "bp" or (role == "zo" and plan.estimator == "adjoint")
        self._sends_gradient = self._learns_by_backward and stage > 0 and len(backwards(plan, stage - 1)) > 0
        self._keeps_exit_inputs = any(a.kind is Kind.EXIT and a.query is None for a in actions)
        self._parameters = parameters
        self._zo_parameters = zo_parameters
        self._factors = factors
        self._device = device
        self._steps = steps
        self._token_shapes = token_shapes
        self._weights = weights
        self._perturbation = perturbation
        self._kept: dict[int, _Kept] = {}
        self._exit_inputs: dict[int, Tensor | None] = {}
        self.outcome = StageOutcome()
        if role == "zo" and plan.estimator == "boundary" and stage == plan.exit_stage:
            self.outcome.products = InnerProducts(_count_perturbed(actions))

    def run(self, action: Action, incoming: Tensor | None) -> Tensor | None:
        """Execute an action on the hidden state or gradient that it needs; return what is to be sent for it."""
        if action.kind is Kind.FORWARD and self._keeps_exit_inputs:
            self._exit_inputs[action.micro_batch] = incoming
        if action.kind is Kind.EXIT and action.query is None:
            incoming = self._exit_inputs.pop(action.micro_batch)
        with self._dropout_of(action):
            match action.kind:
                case Kind.FORWARD:
                    return self._forward(action, incoming)
                case Kind.BACKWARD:
                    return self._backward(action, incoming)
                case Kind.PERTURBED:
                    return self._perturbed(action, incoming)
                case Kind.EXIT:
                    return self._early_exit(action, incoming)

    @contextmanager
    def own_gradients(self) -> Iterator[None]:
        """Collect the gradients made inside the block in the outcome, and put the earlier ones back."""
        earlier = {name: parameter.grad for name, parameter in self._parameters.items()}
        for parameter in self._parameters.values():
            parameter.grad = None
        try:
            yield
            for name, parameter in self._parameters.items():
                if parameter.grad is not None:
                    self.outcome.gradients[name] = parameter.grad
        finally:
            for name, parameter in self._parameters.items():
                parameter.grad = earlier[name]

    def _forward(self, action: Action, received_BTD: Tensor | None) -> Tensor | None:
        def run() -> Any:
            return self._steps.base(action.micro_batch)

        if received_BTD is not None and self._learns_by_backward:
            # Its gradient has its dtype, and float16 has no room for small ones.
            wide = received_BTD.dtype == torch.float16
            received_BTD = (received_BTD.float() if wide else received_BTD).requires_grad_()
        with torch.set_grad_enabled(self._learns_by_backward):
            if self._is_last:
                end = loss_of(self._model.output(run, received_BTD))
                self.outcome.base[action.micro_batch, None, 1] = float(end.detach())
            else:
                end = self._model.hidden(run, received_BTD)
        if self._learns_by_backward:
            self._kept[action.micro_batch] = _Kept(received_BTD=received_BTD, end=end)
        if self.outcome.products is not None:
            self.outcome.products.put_base(action.micro_batch, end)
        return None if self._is_last else end

    def _backward(self, action: Action, gradient_BTD: Tensor | None) -> Tensor | None:
        if self.outcome.products is not None:
            assert gradient_BTD is not None
            self.outcome.products.put_gradient(action.micro_batch, gradient_BTD)
            return None
        micro_batch = self._kept.pop(action.micro_batch)
        weight = self._weights[action.micro_batch]
        # A micro-batch without label tokens has a loss of 0/0; its gradient is left out, not multiplied by 0.
        if weight > 0.0 and micro_batch.end.requires_grad:
            torch.autograd.backward(
                micro_batch.end * weight if gradient_BTD is None else micro_batch.end, gradient_BTD
            )
        if not self._sends_gradient:
            return None
        assert micro_batch.received_BTD is not None
        gradient = micro_batch.received_BTD.grad
        return torch.zeros_like(micro_batch.received_BTD) if gradient is None else gradient

    @torch.no_grad()
    def _perturbed(self, action: Action, received_BTD: Tensor | None) -> Tensor | None:
        assert action.query is not None

        def run() -> Any:
            return self._steps.perturbed(action.micro_batch, action.count)

        with self._moved(action, action.query):
            if self._is_last:
                loss = loss_of(self._model.output(run, received_BTD))
                self.outcome.perturbed[action.micro_batch, action.query, action.sign] = float(loss)
                return None
            hidden_BTD = self._model.hidden(run, received_BTD)
        if self.outcome.products is None:
            return hidden_BTD
        self.outcome.products.put_perturbed(action, hidden_BTD)
        return None

    @torch.no_grad()
    def _early_exit(self, action: Action, received_BTD: Tensor | None) -> Tensor | None:
        moved = (
            nullcontext() if action.query is None else self._moved(action, self._plan.queries + action.query)
        )
        with moved:
            if self._stage == self._plan.exit_stage:
                with self._model.exiting():
                    output = self._model.output(
                        lambda: self._steps.early_exit(action.micro_batch), received_BTD
                    )
                self.outcome.early_exit[action.micro_batch, action.query, action.sign] = float(
                    loss_of(output)
                )
                return None
            return self._model.hidden(lambda: self._steps.early_exit(action.micro_batch), received_BTD)

    def _moved(self, action: Action, query: int) -> AbstractContextManager[None]:
        """Move this stage's zo parameters along the directions of an action; other roles have none to move.

        `query` numbers the first of its directions.
        """
        rows, length = self._token_shapes[action.micro_batch]
        row_numbers = range(rows) if self._perturbation.directions == "row" else (None,)
        moves = [
            (
                self._key(action.micro_batch, number, row),
                query_sign(number, self._plan.difference) * action.sign * self._perturbation.epsilon,
            )
            for number in range(query, query + action.count)
            for row in row_numbers
        ]
        if len(moves) == 1:
            return perturbed(self._zo_parameters, *moves[0])
        if not self._zo_parameters:
            return nullcontext()
        assert self._factors is not None
        return perturbed_in_groups(self._factors, moves, rows=rows * action.count, length=length)

    def _key(self, micro_batch: int, query: int, row: int | None) -> DirectionKey:
        return query_key(
            seed=self._perturbation.seed,
            step=self._perturbation.step,
            directions=self._perturbation.directions,
            micro_batch=micro_batch,
            query=query,
            row=row,
            difference=self._plan.difference,
            distribution=self._perturbation.distribution,
        )

    @contextmanager
    def _dropout_of(self, action: Action) -> Iterator[None]:
        """Give every forward of a micro-batch on this stage the same dropout masks, and leave the global state be."""
        with random_state_kept(self._device):
            seed = derive_seed(
                "dropout", self._perturbation.seed, self._perturbation.step, action.micro_batch, self._stage
            )
            # Not torch.manual_seed: it takes milliseconds, to note a stack trace for each kind of device there is.
            torch.default_generator.manual_seed(seed)
            if self._device.type != "cpu":
                torch.get_device_module(self._device).manual_seed(seed)
            yield


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
