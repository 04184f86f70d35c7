"""One training mini-batch on one stage: run the schedule, share the losses, form the stage's gradient."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lightning_hybridop.estimation.estimators import Estimate, Losses
from lightning_hybridop.pipeline.engine import Engine
from lightning_hybridop.pipeline.estimates import (
    EstimatorSettings,
    Measured,
    Products,
    estimate_of,
    estimated_gradients,
    mean_exit_loss,
    warn_of_lost_and_drowned,
)
from lightning_hybridop.pipeline.exchange import broadcast_json
from lightning_hybridop.pipeline.work import Perturbation, StageOutcome, Steps
from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.schedules import build_schedule
from lightning_hybridop.schedules.actions import Action
from lightning_hybridop.schedules.flow import sends_ahead
from lightning_hybridop.schedules.timeline import TimedAction


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatchResult:
    """What a rank has after a mini-batch: the full loss, its own gradients by parameter name, and what it measured.

    `report` is what the last stage wanted all ranks to know. `estimate` is None without a stage that estimates.
    `exit_loss` is the mean of the early-exit losses, None without any. `sent_bytes` are what this stage sent to its
    neighbours.
    """

    loss: float
    gradients: Mapping[str, Tensor]
    estimate: Estimate | None
    exit_loss: float | None
    report: Any
    actions: Sequence[tuple[Action, ...]]
    timeline: tuple[TimedAction, ...]
    sent_bytes: int


def train_mini_batch(
    engine: Engine,
    *,
    weights: Sequence[float],
    token_shapes: Sequence[tuple[int, int]],
    steps: Steps,
    settings: EstimatorSettings,
    step: int,
    rank_of_stage: Sequence[int],
    report: Callable[[], Any],
    queries_per_forward: int = 1,
    running_exit_loss: float | None = None,
) -> MiniBatchResult:
    """Run one mini-batch of `len(weights)` micro-batches through the pipeline. Collective.

    `report` is called on the last stage after its last action. All ranks return the same loss: the mean of the
    micro-batch losses by weight. `running_exit_loss` is what exits are compared with if the plan says so; without one
    yet, this mini-batch's own mean is.
    """
    plan = replace(engine.plan, micro_batches=len(weights), queries_per_forward=queries_per_forward)
    schedule = build_schedule(plan)
    perturbation = Perturbation(
        seed=settings.seed,
        step=step,
        epsilon=settings.epsilon,
        directions=settings.directions,
        distribution=settings.distribution,
    )
    sent_before = engine.sent_bytes
    outcome = engine.train(
        schedule[engine.stage],
        steps=steps,
        token_shapes=token_shapes,
        weights=weights,
        perturbation=perturbation,
        sends_ahead=sends_ahead(plan),
    )
    message = (_encode(outcome.base), _encode(outcome.perturbed), report() if engine.is_last else None)
    base_list, perturbed_list, shared_report = broadcast_json(message, source=rank_of_stage[-1])
    base = _decode(base_list)
    loss = math.fsum(weight * base[m, None, 1] for m, weight in enumerate(weights) if weight > 0.0)
    result: Estimate | None = None
    exit_loss: float | None = None
    if plan.exit_stage is not None and plan.estimator != "adjoint":
        measured = _share(outcome, plan, base, _decode(perturbed_list), rank_of_stage)
        exit_loss = mean_exit_loss(measured.early_exit)
        result = estimate_of(
            measured,
            plan=plan,
            weights=weights,
            rows=[rows for rows, _ in token_shapes],
            settings=settings,
            step=step,
            running_exit_loss=exit_loss if running_exit_loss is None else running_exit_loss,
        )
        warn_of_lost_and_drowned(
            result, measured, loss=loss, settings=settings, moved=len(engine.zo_parameters) > 0
        )
    gradients: Mapping[str, Tensor] = outcome.gradients
    if plan.stages[engine.stage].role == "zo":
        if result is not None:
            gradients = estimated_gradients(engine.zo_parameters, result)
        else:
            gradients = {
                name: gradient for name, gradient in gradients.items() if name in engine.zo_parameters
            }
    return MiniBatchResult(
        loss=loss,
        gradients=gradients,
        estimate=result,
        exit_loss=exit_loss,
        report=shared_report,
        actions=schedule,
        timeline=tuple(outcome.timeline),
        sent_bytes=engine.sent_bytes - sent_before,
    )


def _share(
    outcome: StageOutcome, plan: Plan, base: Losses, perturbed: Losses, rank_of_stage: Sequence[int]
) -> Measured:
    """Return what the exit stage and the last one have measured, on every rank. Collective."""
    assert plan.exit_stage is not None
    source = rank_of_stage[plan.exit_stage]
    early_exit: Losses = {}
    if plan.exit_queries > 0:
        early_exit = _decode(broadcast_json(_encode(outcome.early_exit), source=source))
    products: Products = {}
    largest_movement = 0.0
    if plan.estimator == "boundary":
        own = outcome.products
        told = None if own is None else (_encode(own.changes), own.largest_movement)
        encoded, largest_movement = broadcast_json(told, source=source)
        products = _decode(encoded)
    return Measured(
        base=base,
        perturbed=perturbed,
        early_exit=early_exit,
        products=products,
        largest_movement=largest_movement,
    )


def _encode(values: Mapping[tuple[int, int | None, int], Any]) -> list[list[Any]]:
    return [[micro_batch, query, sign, value] for (micro_batch, query, sign), value in values.items()]


def _decode(rows: Sequence[Sequence[Any]]) -> dict[tuple[int, int | None, int], Any]:
    return {(row[0], row[1], row[2]): row[3] for row in rows}
