"""How near each estimator comes to the true gradient of the zo stages, and what it takes to get there."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hybridop.estimation.directions import DirectionKey
from lightning_hybridop.estimation.estimators import Directions, Estimate
from lightning_hybridop.pipeline.anatomy import Anatomy
from lightning_hybridop.pipeline.batches import repeat_rows, token_shape
from lightning_hybridop.pipeline.engine import Engine
from lightning_hybridop.pipeline.estimates import (
    EstimatorSettings,
    Measured,
    estimate_of,
    estimated_gradients,
)
from lightning_hybridop.pipeline.one_process import engines_of, run_schedule
from lightning_hybridop.pipeline.ownership import owned_parameters
from lightning_hybridop.pipeline.work import Perturbation, Steps, Work, loss_of
from lightning_hybridop.planning.plan import Estimator, Plan
from lightning_hybridop.schedules import build_schedule
from lightning_hybridop.schedules.actions import Action, Kind

Gradients = Mapping[str, Tensor]
Step = Callable[[nn.Module, Any], Any]
"""The user's training step on some rows: (module, rows) -> what it returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """An estimator with the directions that it draws; those of the adjoint mean nothing."""

    estimator: Estimator
    directions: Directions = "microbatch"

    @property
    def name(self) -> str:
        """What tables call it."""
        return self.estimator if self.estimator == "adjoint" else f"{self.estimator}, {self.directions}"


METHODS = (
    Method(estimator="loss", directions="minibatch"),
    Method(estimator="loss", directions="microbatch"),
    Method(estimator="boundary", directions="minibatch"),
    Method(estimator="boundary", directions="microbatch"),
    Method(estimator="boundary", directions="row"),
    Method(estimator="adjoint"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """How a gradient compares with the true one: the cosine between them, and its norm over the true one's."""

    cosine: float
    norm_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """What a method yields with so many queries, and what it costs in one mini-batch.

    `stages` are the likenesses of the zo stages by number, `whole` that over all of them. `forwards` are those of the
    mini-batch through the whole model, parts of it counted by their blocks; `seconds` is the time of all stages' work
    together, `sent` the bytes from stage to stage.
    """

    method: Method
    queries: int
    stages: Mapping[int, Likeness]
    whole: Likeness
    forwards: float
    seconds: float
    sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """Micro-batches with their shares of the loss."""

    micro_batches: Sequence[Any]
    weights: Sequence[float]


def true_gradients(
    module: nn.Module, step: Step, batch: MiniBatch, names: Sequence[str]
) -> dict[str, Tensor]:
    """Return the gradient of each named parameter, back-propagated through the whole model in one process."""
    module.zero_grad()
    for rows, weight in zip(batch.micro_batches, batch.weights, strict=True):
        if weight > 0.0:
            torch.autograd.backward(loss_of(step(module, rows)) * weight)
    parameters = dict(module.named_parameters())
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name in names
        for parameter in (parameters[name],)
    }
    module.zero_grad()
    return gradients


def measure_method(
    module: nn.Module,
    anatomy: Anatomy,
    step: Step,
    batch: MiniBatch,
    *,
    method: Method,
    plan: Plan,
    counts: Sequence[int],
    settings: EstimatorSettings,
    true: Gradients,
) -> Iterator[Quality]:
    """Yield a method's quality with each of the `counts` of queries, from one run with the most of them.

    `plan` gives the stages, `true` the gradient of every parameter that zo stages train. The adjoint has one quality, that
    of no query. `module` is left as it is.
    """
    counts = (0,) if method.estimator == "adjoint" else sorted(counts)
    plan = replace(
        plan,
        estimator=method.estimator,
        micro_batches=len(batch.micro_batches),
        queries=counts[-1],
        exit_queries=0,
        queries_per_forward=1,
    )
    settings = replace(settings, directions=method.directions)
    names = true.keys()
    engines = engines_of(module, anatomy, plan, perturbable=names)
    # Once beforehand, so that nothing is compiled or allocated while it is timed.
    _run(engines, replace(plan, queries=min(1, counts[-1])), step, batch, settings)
    works, sent = _run(engines, plan, step, batch, settings)
    for count in counts:
        fewer = replace(plan, queries=count)
        gradients = _gradients(works, engines, fewer, batch, settings)
        own = {stage: gradients[stage] for stage in plan.zo_stages}
        yield Quality(
            method=method,
            queries=count,
            stages={stage: likeness(found, true) for stage, found in own.items()},
            whole=likeness({name: g for found in own.values() for name, g in found.items()}, true),
            forwards=_forwards(works, fewer),
            seconds=math.fsum(
                timed.end - timed.start
                for work in works
                for timed in work.outcome.timeline
                if _takes_part(timed.action, count)
            ),
            sent=sum(size for (_, action), size in sent.items() if _takes_part(action, count)),
        )


def directional_derivatives(
    module: nn.Module,
    anatomy: Anatomy,
    step: Step,
    batch: MiniBatch,
    *,
    estimator: Estimator,
    plan: Plan,
    queries: int,
    settings: EstimatorSettings,
) -> dict[DirectionKey, float]:
    """Return the derivative that an estimator measures along each of its directions."""
    plan = replace(plan, estimator=estimator, micro_batches=len(batch.micro_batches), queries=queries)
    names = zo_names(module, anatomy, plan)
    works, _ = _run(engines_of(module, anatomy, plan, perturbable=names), plan, step, batch, settings)
    return dict(_estimate(works, plan, batch, settings).derivatives)


def likeness(found: Gradients, true: Gradients) -> Likeness:
    """Compare a gradient with the true one over the parameters that it has, in float64; 0 without any."""
    if not found:
        return Likeness(cosine=0.0, norm_ratio=0.0)
    flat = torch.cat([gradient.double().flatten() for gradient in found.values()])
    expected = torch.cat([true[name].double().flatten() for name in found])
    size, true_size = float(flat.norm()), float(expected.norm())
    if size == 0.0 or true_size == 0.0:
        return Likeness(cosine=0.0, norm_ratio=0.0)
    return Likeness(cosine=float(flat @ expected) / (size * true_size), norm_ratio=size / true_size)


def zo_names(module: nn.Module, anatomy: Anatomy, plan: Plan) -> list[str]:
    """Return the names of all parameters that zo stages train."""
    owned = owned_parameters(module, anatomy, tuple(stage.last for stage in plan.stages))
    return [name for stage in plan.zo_stages for name in owned[stage]]


def _run(
    engines: Sequence[Engine], plan: Plan, step: Step, batch: MiniBatch, settings: EstimatorSettings
) -> tuple[list[Work], Mapping[tuple[int, Action], int]]:
    """Run a mini-batch; return the works with their outcomes, and what each action sent."""
    schedule = build_schedule(plan)
    works = []
    for engine, actions in zip(engines, schedule, strict=True):
        run = partial(_on_copies, engine.model.module, step, batch.micro_batches)
        work = engine.work(
            actions,
            steps=Steps(base=run, perturbed=run, early_exit=run),
            token_shapes=[token_shape(rows) for rows in batch.micro_batches],
            weights=batch.weights,
            perturbation=Perturbation(
                seed=settings.seed,
                step=0,
                epsilon=settings.epsilon,
                directions=settings.directions,
                distribution=settings.distribution,
            ),
        )
        works.append(work)
    return works, run_schedule(works, schedule, plan)


def _on_copies(
    module: nn.Module, step: Step, micro_batches: Sequence[Any], micro_batch: int, copies: int = 1
) -> Any:
    return step(module, repeat_rows(micro_batches[micro_batch], copies))


def _gradients(
    works: Sequence[Work],
    engines: Sequence[Engine],
    plan: Plan,
    batch: MiniBatch,
    settings: EstimatorSettings,
) -> list[Gradients]:
    """Return what each stage learns."""
    if plan.estimator == "adjoint":
        return [work.outcome.gradients for work in works]
    found = _estimate(works, plan, batch, settings)
    return [estimated_gradients(engine.zo_parameters, found) for engine in engines]


def _estimate(works: Sequence[Work], plan: Plan, batch: MiniBatch, settings: EstimatorSettings) -> Estimate:
    assert plan.exit_stage is not None
    products = works[plan.exit_stage].outcome.products
    measured = Measured(
        base=works[-1].outcome.base,
        perturbed=works[-1].outcome.perturbed,
        early_exit={},
        products={} if products is None else products.changes,
        largest_movement=0.0 if products is None else products.largest_movement,
    )
    return estimate_of(
        measured,
        plan=plan,
        weights=batch.weights,
        rows=[token_shape(rows)[0] for rows in batch.micro_batches],
        settings=settings,
        step=0,
    )


def _takes_part(action: Action, queries: int) -> bool:
    return action.query is None or action.query < queries


def _forwards(works: Sequence[Work], plan: Plan) -> float:
    """Return how many forwards of the mini-batch through the whole model all stages' forwards come to."""
    blocks = sum(
        plan.stages[timed.stage].last - plan.stages[timed.stage].first
        for work in works
        for timed in work.outcome.timeline
        if timed.action.kind is not Kind.BACKWARD and _takes_part(timed.action, plan.queries)
    )
    return blocks / plan.blocks / plan.micro_batches
