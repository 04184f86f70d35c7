"""One process, the unsplit model, plain torch: what the pipeline is compared with.

The formulas are written out here on their own; of the package only `direction` is used, so that z is the same.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from lightning_hybridop.estimation.directions import DirectionKey, direction
from tests.distributed.runs import Batch, Gradients, block_of
from tests.tiny import TinyModule


def backpropagated(module: TinyModule, batch: Batch) -> tuple[float, Gradients]:
    """Return the loss of the whole mini-batch and the gradient of every trainable parameter."""
    module.zero_grad()
    loss = module.model(**batch).loss
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return float(loss.detach()), gradients


def sliced(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    parts = {name: value.split(list(sizes)) for name, value in batch.items()}
    return [{name: values[m] for name, values in parts.items()} for m in range(len(sizes))]


def label_shares(micro_batches: Sequence[Batch]) -> list[float]:
    """A causal model predicts each token from those before it, so the first one of a row is never a label."""
    counts = [int((rows["labels"][:, 1:] != -100).sum()) for rows in micro_batches]
    return [count / sum(counts) for count in counts]


@torch.no_grad()
def moved_loss(
    module: TinyModule, names: Sequence[str], rows: Batch, key: DirectionKey, scale: float
) -> float:
    """Return the loss at `theta + scale * z`."""
    parameters = dict(module.named_parameters())
    before = {name: parameters[name].clone() for name in names}
    for name in names:
        parameters[name] += scale * direction(key, name, parameters[name].shape)
    loss = float(module.model(**rows).loss)
    for name in names:
        parameters[name].copy_(before[name])
    return loss


@torch.no_grad()
def loss(module: TinyModule, rows: Batch) -> float:
    return float(module.model(**rows).loss)


@cache
def unsplit() -> TinyModule:
    return TinyModule()


@cache
def without_later_blocks(blocks: int) -> TinyModule:
    """Return the model of an early exit: the blocks behind the first `blocks` are taken out."""
    module = TinyModule()
    decoder = module.model.get_base_model().model
    assert isinstance(decoder.layers, nn.ModuleList)
    decoder.layers = decoder.layers[:blocks]
    return module


def estimated(
    *,
    batch: Batch,
    sizes: Sequence[int],
    zo_blocks: range,
    step: int = 0,
    queries: int,
    exit_queries: int = 0,
    directions: str = "microbatch",
    difference: str = "forward",
    exit_baseline: str = "exit",
    epsilon: float,
    seed: int,
) -> Gradients:
    """Return the estimated gradient of every parameter in `zo_blocks`, of the model that TinyModule() makes.

    `1 / (Q + Q') sum_q sum_m w_m g_(m, q) z_(m, q)`; exit query q' uses the direction of number Q + q'.
    """
    full, early = unsplit(), without_later_blocks(zo_blocks.stop)
    trainable = [name for name, p in full.named_parameters() if p.requires_grad]
    names = [name for name in trainable if block_of(name) in zo_blocks]
    micro_batches = sliced(batch, sizes)
    shapes = {name: p.shape for name, p in full.named_parameters()}
    gradients = {name: torch.zeros(shapes[name]) for name in names}
    for m, (rows, weight) in enumerate(zip(micro_batches, label_shares(micro_batches), strict=True)):
        for number in range(queries + exit_queries):
            key = DirectionKey(
                seed=seed, step=step, micro_batch=None if directions == "minibatch" else m, query=number
            )
            model = full if number < queries else early
            plus = moved_loss(model, names, rows, key, epsilon)
            if difference == "central":
                g = (plus - moved_loss(model, names, rows, key, -epsilon)) / (2 * epsilon)
            else:
                baseline = loss(full if exit_baseline == "full" else model, rows)
                g = (plus - baseline) / epsilon
            for name in names:
                z: Tensor = direction(key, name, shapes[name])
                gradients[name] += weight / (queries + exit_queries) * g * z
    return gradients
