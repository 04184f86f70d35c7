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
from lightning_hybridop.pipeline.replicas import Replicas, renumbered, share_of, summed
from lightning_hybridop.pipeline.work import Perturbation, StageOutcome, Steps
from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.schedules import build_schedule
from lightning_hybridop.schedules.actions import Action
from lightning_hybridop.schedules.dependencies import backwards
from lightning_hybridop.schedules.flow import sends_ahead
from lightning_hybridop.schedules.timeline import TimedAction


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatchResult:
    """What a rank has after a mini-batch: the full loss, its own gradients by parameter name, and what it measured.

    `report` is what each replica's last stage wanted all ranks to know, `actions` are the first replica's. `estimate` is
    None without a stage that estimates. `exit_loss` is the mean of the early-exit losses, None without any. `sent_bytes`
    are what this stage sent to its neighbours.
    """

    loss: float
    gradients: Mapping[str, Tensor]
    estimate: Estimate | None
    exit_loss: float | None
    report: list[Any]
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
    replicas: Replicas,
    report: Callable[[], Any],
    queries_per_forward: int = 1,
    running_exit_loss: float | None = None,
) -> MiniBatchResult:
    """Run one mini-batch of `len(weights)` micro-batches through the pipeline, or its replicas. Collective.

    Each replica runs a share of the micro-batches, whose weights and numbers are those in the whole mini-batch. Of zo stages
    replicas tell each other only what was measured, and all estimate the same; other gradients are added up.
    `report` is called on the last stages after their last action. All ranks return the same loss: the mean of the
    micro-batch losses by weight. `running_exit_loss` is what exits are compared with if the plan says so; without one
    yet, this mini-batch's own mean is.
    """
    count = len(replicas.ranks)
    shares = [share_of(len(weights), replicas=count, index=index) for index in range(count)]
    share = shares[replicas.index]
    # The first replica has the most to do, and always something.
    plan = replace(engine.plan, micro_batches=len(shares[0]), queries_per_forward=queries_per_forward)
    schedule = build_schedule(plan)
    perturbation = Perturbation(
        seed=settings.seed,
        step=step,
        epsilon=settings.epsilon,
        directions=settings.directions,
        distribution=settings.distribution,
    )
    sent_before = engine.sent_bytes
    outcome = StageOutcome()
    if share:
        own = replace(plan, micro_batches=len(share))
        outcome = engine.train(
            renumbered(build_schedule(own)[engine.stage], share),
            steps=steps,
            token_shapes=token_shapes,
            weights=weights,
            perturbation=perturbation,
            sends_ahead=sends_ahead(own),
        )
    message = (_encode(outcome.base), _encode(outcome.perturbed), report() if engine.is_last else None)
    told = [broadcast_json(message, source=rank) for rank in replicas.last_stages]
    base = _decode([row for base_list, _, _ in told for row in base_list])
    perturbed = _decode([row for _, perturbed_list, _ in told for row in perturbed_list])
    role = plan.stages[engine.stage].role
    loss = math.fsum(weight * base[m, None, 1] for m, weight in enumerate(weights) if weight > 0.0)
    result: Estimate | None = None
    exit_loss: float | None = None
    if plan.exit_stage is not None and plan.estimator != "adjoint":
        measured = _share(outcome, plan, base, perturbed, replicas.of_stage(plan.exit_stage))
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
    if count > 1 and backwards(plan, engine.stage) and not (role == "zo" and plan.estimator == "boundary"):
        gradients = summed(gradients, engine.parameters, peers=replicas.of_stage(engine.stage))
    if role == "zo":
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
        report=[shared_report for _, _, shared_report in told],
        actions=schedule,
        timeline=tuple(outcome.timeline),
        sent_bytes=engine.sent_bytes - sent_before,
    )


def _share(
    outcome: StageOutcome, plan: Plan, base: Losses, perturbed: Losses, exit_ranks: Sequence[int]
) -> Measured:
    """Return what the exit stages and the last ones have measured, on every rank. Collective."""
    early_exit: Losses = {}
    if plan.exit_queries > 0:
        encoded = [broadcast_json(_encode(outcome.early_exit), source=rank) for rank in exit_ranks]
        early_exit = _decode([row for rows in encoded for row in rows])
    products: Products = {}
    largest_movement = 0.0
    if plan.estimator == "boundary":
        own = outcome.products
        message = ([], 0.0) if own is None else (_encode(own.changes), own.largest_movement)
        told = [broadcast_json(message, source=rank) for rank in exit_ranks]
        products = _decode([row for rows, _ in told for row in rows])
        largest_movement = max(movement for _, movement in told)
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
