"""Several pipelines side by side: who belongs to which, what share of a mini-batch each has, and what they exchange.

Everything goes from process to process, so that no groups have to be made again after a failure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybridop.pipeline.packing import checked_length, pack, unpack
from lightning_hybridop.schedules.actions import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """The processes of a run: `ranks` by replica and stage, and in which of the replicas this process is."""

    ranks: tuple[tuple[int, ...], ...]
    index: int = 0

    @property
    def first(self) -> list[int]:
        """The ranks of the first replica's stages: what all have in common is taken from there."""
        return list(self.ranks[0])

    @property
    def own(self) -> list[int]:
        """The ranks of the stages of this process's replica."""
        return list(self.ranks[self.index])

    @property
    def last_stages(self) -> list[int]:
        """The rank of each replica's last stage."""
        return self.of_stage(-1)

    def of_stage(self, stage: int) -> list[int]:
        """Return the rank that each replica runs a stage on."""
        return [ranks[stage] for ranks in self.ranks]

    def stage_of(self, rank: int) -> int:
        """Return the stage that a rank runs."""
        return next(ranks.index(rank) for ranks in self.ranks if rank in ranks)


def side_by_side(rank_of_stage: Sequence[int], *, replicas: int, rank: int) -> Replicas:
    """Return the replicas of a pipeline: the next one's ranks begin where those of the one before end.

    `rank_of_stage` are those of the first one, `rank` is this process.
    """
    stages = len(rank_of_stage)
    ranks = tuple(tuple(own + index * stages for own in rank_of_stage) for index in range(replicas))
    return Replicas(ranks=ranks, index=rank // stages)


def share_of(micro_batches: int, *, replicas: int, index: int) -> range:
    """Return which of a mini-batch's micro-batches a replica runs: as many as the others or one more, and maybe none."""
    least, more = divmod(micro_batches, replicas)
    start = index * least + min(index, more)
    return range(start, start + least + (index < more))


def renumbered(actions: Sequence[Action], share: range) -> tuple[Action, ...]:
    """Return the actions of a pipeline's own micro-batches with the numbers that these have in the mini-batch."""
    return tuple(replace(action, micro_batch=share[action.micro_batch]) for action in actions)


def summed(
    gradients: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter], *, peers: Sequence[int]
) -> dict[str, Tensor]:
    """Return the sum of the replicas' gradients of one stage, bit for bit the same on all `peers`. Collective over these.

    A parameter that has a gradient on none of them has none. They add up in float32 (or float64) on the first one.
    """
    wide = [torch.promote_types(parameter.dtype, torch.float32) for parameter in parameters.values()]
    flat = torch.zeros(
        sum(parameter.numel() for parameter in parameters.values()),
        dtype=torch.float64 if torch.float64 in wide else torch.float32,
    )
    has_gradient = torch.zeros(len(parameters), dtype=torch.uint8)
    sizes = [parameter.numel() for parameter in parameters.values()]
    for number, (name, part) in enumerate(zip(parameters, torch.split(flat, sizes), strict=True)):
        if name in gradients:
            has_gradient[number] = 1
            part.copy_(gradients[name].reshape(-1))
    hub, *others = peers
    if dist.get_rank() == hub:
        theirs, they_have = torch.empty_like(flat), torch.empty_like(has_gradient)
        for other in others:
            dist.recv(they_have, other)
            dist.recv(theirs, other)
            has_gradient |= they_have
            flat += theirs
        for other in others:
            dist.send(has_gradient, other)
            dist.send(flat, other)
    else:
        for tensor in (has_gradient, flat):
            dist.send(tensor, hub)
        for tensor in (has_gradient, flat):
            dist.recv(tensor, hub)
    return {
        name: part.view_as(parameter).to(parameter.device, parameter.dtype, copy=True)
        for (name, parameter), part, flag in zip(
            parameters.items(), torch.split(flat, sizes), has_gradient.tolist(), strict=True
        )
        if flag
    }


def joined_on_first(parts: Sequence[Tensor], *, peers: Sequence[int]) -> list[Tensor] | None:
    """Return the tensors of all `peers`, in their order, on the first one; None on the others. Collective over these."""
    hub, *others = peers
    if dist.get_rank() != hub:
        content = torch.frombuffer(bytearray(pack(list(parts))), dtype=torch.uint8)
        dist.send(torch.tensor([len(content)]), hub)
        dist.send(content, hub)
        return None
    joined = list(parts)
    for other in others:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, other)
        content = torch.empty(checked_length(length), dtype=torch.uint8)
        dist.recv(content, other)
        joined += unpack(content.numpy().tobytes())
    return joined
