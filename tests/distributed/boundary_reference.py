"""The boundary estimator in one process, written out: what the pipeline's is compared with."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_hybridop.estimation.directions import DirectionKey, direction
from tests.distributed.reference import label_shares, sliced, unsplit
from tests.distributed.runs import Batch, Gradients, block_of
from tests.tiny import TinyModule


def boundary_estimate(
    *,
    batch: Batch,
    sizes: Sequence[int],
    zo_blocks: range,
    queries: int,
    epsilon: float,
    seed: int,
    step: int = 0,
    directions: str = "microbatch",
    difference: str = "forward",
    distribution: str = "normal",
    shrinkage: bool = False,
) -> Gradients:
    """Return `1 / Q sum_q <G, h(theta + eps z_q) - h(theta)> / eps z_q` of every parameter in `zo_blocks`.

    Rows with directions of their own are run one by one. `h` is the hidden state behind `zo_blocks`.
    """
    module = unsplit()
    shapes = {
        name: p.shape
        for name, p in module.named_parameters()
        if p.requires_grad and block_of(name) in zo_blocks
    }
    gradients = {name: torch.zeros(shape) for name, shape in shapes.items()}
    micro_batches = sliced(batch, sizes)
    count = 0
    for m, (rows, weight) in enumerate(zip(micro_batches, label_shares(micro_batches), strict=True)):
        gradient_BTD = weight * gradient_at(module, rows, zo_blocks.stop)
        units: list[int | None] = list(range(sizes[m])) if directions == "row" else [None]
        for row in units:
            part = slice(None) if row is None else slice(row, row + 1)
            own = {name: value[part] for name, value in rows.items()}
            for query in range(queries):
                odd = difference == "antithetic" and query % 2 == 1
                key = DirectionKey(
                    seed=seed,
                    step=step,
                    micro_batch=None if directions == "minibatch" else m,
                    query=query - odd,
                    row=row,
                    distribution=distribution,  # type: ignore[arg-type]
                )
                signs = (1, -1) if difference == "central" else (-1 if odd else 1,)
                base = hidden_at(module, own, zo_blocks.stop)
                g = 0.0
                for sign in signs:
                    with moved(module, list(shapes), key, sign * epsilon):
                        change_BTD = hidden_at(module, own, zo_blocks.stop) - base
                    g += sign * float((gradient_BTD[part] * change_BTD).sum()) / epsilon / len(signs)
                for name, shape in shapes.items():
                    gradients[name] += g / queries * direction(key, name, shape)
            count += queries
    if shrinkage:
        dimensions = sum(shape.numel() for shape in shapes.values())
        for gradient in gradients.values():
            gradient *= count / (dimensions + count + (1 if distribution == "normal" else -1))
    return gradients


def gradient_at(module: TinyModule, rows: Batch, block: int) -> Tensor:
    """Return the gradient of the mean loss of `rows` with respect to the hidden state before a block."""
    with captured(module, block) as kept:
        (gradient_BTD,) = torch.autograd.grad(module.model(**rows).loss, kept)
    return gradient_BTD


@torch.no_grad()
def hidden_at(module: TinyModule, rows: Batch, block: int) -> Tensor:
    with captured(module, block) as kept:
        module.model(**rows)
    return kept[0]


@contextmanager
def captured(module: TinyModule, block: int) -> Iterator[list[Tensor]]:
    kept: list[Tensor] = []
    layer = module.model.get_base_model().model.layers[block - 1]
    handle = layer.register_forward_hook(lambda _, __, output: kept.append(output))
    try:
        yield kept
    finally:
        handle.remove()


@contextmanager
def moved(module: TinyModule, names: Sequence[str], key: DirectionKey, scale: float) -> Iterator[None]:
    parameters = dict(module.named_parameters())
    before = {name: parameters[name].detach().clone() for name in names}
    with torch.no_grad():
        for name in names:
            parameters[name] += scale * direction(key, name, parameters[name].shape)
        yield
        for name in names:
            parameters[name].copy_(before[name])
