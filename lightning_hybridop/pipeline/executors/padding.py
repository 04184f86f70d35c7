"""Whether padding changes what blocks compute at the other positions, tried out once for each kind of block."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_hybridop.pipeline.executors.arguments import BatchTensors
from lightning_hybridop.pipeline.executors.buckets import padded
from lightning_hybridop.pipeline.executors.tracing import evaluating, run_blocks

_TOLERANCE = 1e-3  # of the most that the block changes at a position: what the order of a sum may change


@torch.no_grad()
def padding_is_harmless(
    block: nn.Module,
    names: Mapping[str, str],
    parameters: Mapping[str, Tensor],
    batch: BatchTensors,
    hidden_BTD: Tensor,
    *,
    to: int,
) -> bool:
    """Tell whether a block computes the same at all positions of a batch when more are put behind them.

    `batch` holds the block's own call. False as well when the padded batch does not fit together.
    """
    length = hidden_BTD.shape[1]

    def output(hidden_BTD: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        with torch.autocast("cpu", enabled=False), evaluating([block]):
            return run_blocks([block], [names], batch.calls, hidden_BTD, tensors, parameters)

    hidden_BTD = hidden_BTD.detach().float()
    tensors = [tensor.float() if tensor.is_floating_point() else tensor for tensor in batch.tensors]
    expected = output(hidden_BTD, tensors)
    more = [
        padded(tensor, name, length=length, to=to) for tensor, name in zip(tensors, batch.names, strict=True)
    ]
    try:
        found = output(padded(hidden_BTD, "hidden", length=length, to=to), more)[:, :length]
    except (RuntimeError, ValueError, IndexError):
        return False
    changes_BT1 = (expected - hidden_BTD).abs().amax(dim=-1, keepdim=True)
    return bool(((found - expected).abs() <= _TOLERANCE * changes_BT1).all())
