"""What an early exit's losses are compared with decides how noisy its gradient is."""

import copy

import torch
from torch import Tensor

from lightning_hybridop.estimation.directions import direction
from lightning_hybridop.estimation.estimators import Losses, estimate, query_key
from lightning_hybridop.estimation.perturbation import perturbed
from lightning_hybridop.pipeline.anatomy import read_anatomy
from lightning_hybridop.pipeline.stage import StageModel
from tests.pipeline.plain import PlainModel, plain_step

EXIT_QUERIES, REPETITIONS, EPSILON = 2, 300, 1e-3
TRAINED = ("trunk.0.mix.weight", "trunk.1.mix.weight")


def exit_stage() -> tuple[StageModel, float]:
    """Return the head stage of a plain model, able to exit, and the whole model's loss."""
    model = PlainModel(blocks=4).double()
    loss = float(plain_step(model).loss.detach())
    return StageModel(model, read_anatomy(model), first=0, last=2, keep_behind=True), loss


def exit_loss(stage: StageModel) -> Tensor:
    with stage.exiting():
        loss: Tensor = stage.output(lambda: plain_step(stage.module), None).loss
    return loss


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].reshape(-1) for name in TRAINED])


def estimated(stage: StageModel, baseline: float) -> Tensor:
    """Return exit gradients [REPETITIONS, D] with `baseline` as the loss that exit losses are compared with."""
    parameters = {name: stage.module.get_parameter(name) for name in TRAINED}
    base: Losses = {(0, None, 1): baseline}
    rows = []
    for step in range(REPETITIONS):
        losses: dict[tuple[int, int | None, int], float] = {}
        for query in range(EXIT_QUERIES):
            key = query_key(seed=0, step=step, directions="microbatch", micro_batch=0, query=query)
            with torch.no_grad(), perturbed(parameters, key, EPSILON):
                losses[0, query, 1] = float(exit_loss(stage))
        result = estimate(
            weights=[1.0],
            base={},
            perturbed={},
            exit_base=base,
            exit_perturbed=losses,
            queries=0,
            exit_queries=EXIT_QUERIES,
            epsilon=EPSILON,
            directions="microbatch",
            difference="forward",
            seed=0,
            step=step,
        )
        row = torch.zeros(sum(parameter.numel() for parameter in parameters.values()), dtype=torch.float64)
        for key, coefficient in result.coefficients:
            row += coefficient * flat({name: direction(key, name, p.shape) for name, p in parameters.items()})
        rows.append(row)
    return torch.stack(rows)


def test_exit_loss_as_baseline_is_unbiased_and_of_far_lower_variance() -> None:
    stage, full_loss = exit_stage()
    differentiated = copy.deepcopy(stage)
    exit_loss(differentiated).backward()
    gradient = flat({name: differentiated.module.get_parameter(name).grad for name in TRAINED})
    own_loss = float(exit_loss(stage).detach())
    dimensions = len(gradient)
    # The two losses differ, and by far more than a perturbation of one of them.
    gap = own_loss - full_loss
    assert abs(gap) > 10 * EPSILON * float(gradient.norm())

    exits, fulls = estimated(stage, own_loss), estimated(stage, full_loss)

    # Unbiased for the exit loss: within five standard errors in every coordinate (and the curvature's share).
    error = (exits.mean(dim=0) - gradient).abs()
    assert (error < 5 * exits.std(dim=0) / REPETITIONS**0.5 + EPSILON).all()
    # With g(z) = <g, z> + gap/eps the variance is ((d+1) ||g||^2 + d (gap/eps)^2) / n; gap is 0 for the exit's own.
    variances = [float((drawn - gradient).square().sum(dim=1).mean()) for drawn in (exits, fulls)]
    slope = float(gradient.square().sum())
    of_exit = (dimensions + 1) * slope / EXIT_QUERIES
    of_full = of_exit + dimensions * (gap / EPSILON) ** 2 / EXIT_QUERIES
    # Relative standard errors: at most sqrt(2 + 14/d)/sqrt(300), about 9 %, of a product of squared normals.
    assert abs(variances[0] / of_exit - 1) < 0.4
    assert abs(variances[1] / of_full - 1) < 0.1
    ratio = variances[1] / variances[0]
    print(f"variance with the full model's loss as baseline: {ratio:.0f} times that with the exit's own")
    assert 0.6 < ratio / (of_full / of_exit) < 1.6
    assert ratio > 100
