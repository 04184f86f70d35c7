"""AccPar (Song et al., 2020): tensor partition over unlike devices, of a type chosen for each layer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from lightning_hybridop.planning.costs import PipelineCosts
from lightning_hybridop.schedules.actions import Action, Kind
from lightning_hybridop.simulation.baselines.common import (
    Baseline,
    all_gather_seconds,
    all_reduce_seconds,
    back_propagating,
    exchange_seconds,
    largest_remainders,
    named_range,
    total_seconds,
    whole_rows,
)
from lightning_hybridop.simulation.program import Collective, Program, Task


class Partition(StrEnum):
    """What of a layer is shared out: the rows (type I), its inputs (type II) or its outputs (type III)."""

    ROWS = "I"
    INPUTS = "II"
    OUTPUTS = "III"


class _Held(StrEnum):
    """How a hidden state lies on the devices: everything on all, or each its own rows or columns."""

    WHOLE = "whole"
    ROWS = "rows"
    COLUMNS = "columns"


_NEEDS = {Partition.ROWS: _Held.ROWS, Partition.INPUTS: _Held.COLUMNS, Partition.OUTPUTS: _Held.WHOLE}
_GIVES = {Partition.ROWS: _Held.ROWS, Partition.INPUTS: _Held.WHOLE, Partition.OUTPUTS: _Held.COLUMNS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The embedding, a block or the head on every device: seconds and bytes if it did all of it."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    resident: tuple[float, ...]
    kept: tuple[float, ...]
    adapter_bytes: float = 0.0


def accpar(costs: PipelineCosts) -> Baseline:
    """Return AccPar: all devices work on every layer together, each on a share in proportion to its speed.

    A dynamic programme over the layers chooses each one's type so that computing and communicating take least time. In
    type I each device has all weights and some rows, in type II some rows of the weight matrix, so that the outputs are
    summed by an all-reduce, in type III some columns, so that the gradients of the inputs are. Between layers hidden
    states (forward) and gradients (backward) are gathered or exchanged where the types lay them out differently.

    Chosen here: a layer is a whole block, the embedding or the head (the head is never of type II, which would send
    logits); type I shares out whole rows; blocks of type I all-reduce their adapters at the end of the mini-batch, those
    of other types share them out with the weights; nothing goes back beyond the first block; of the assignments with
    each number of type I blocks the fastest that fits the memory wins, or, if none fits, the smallest. There is no
    pipeline: micro-batches come one after another, with M = 1 the whole mini-batch at once.

    Raises:
        BaselineError: a device cannot back-propagate.
    """
    costs = back_propagating(costs)
    layers = layers_of(costs)
    shares = shares_of(costs)
    candidates = assignments(costs, layers, shares)
    fitting = [candidate for candidate in candidates if _excess(costs, layers, candidate[1], shares) == 0]
    if fitting:
        _, types = min(fitting, key=lambda candidate: candidate[0])
    else:
        _, types = min(
            candidates, key=lambda candidate: (_excess(costs, layers, candidate[1], shares), candidate[0])
        )
    program = partition_program(costs, layers, types, shares)
    return Baseline(program=program, description=_text(costs, types, shares))


Shares = dict[Partition, tuple[float, ...]]
"""Each device's share of a layer, by the layer's type."""


def shares_of(costs: PipelineCosts) -> Shares:
    """Return shares in proportion to speed, those of rows rounded to whole rows."""
    speeds = [1 / total_seconds(device) for device in costs.devices]
    parts = tuple(speed / sum(speeds) for speed in speeds)
    rows = whole_rows(costs)
    by_rows = tuple(share / rows for share in largest_remainders(speeds, rows))
    return {Partition.ROWS: by_rows, Partition.INPUTS: parts, Partition.OUTPUTS: parts}


def layers_of(costs: PipelineCosts) -> tuple[Layer, ...]:
    """Return the embedding, the blocks and the head; with tied embeddings the head alone has the matrix."""
    devices = costs.devices
    nothing = (0.0,) * len(devices)
    embedding = Layer(
        forward=tuple(device.embedding_forward for device in devices),
        backward=nothing,
        resident=nothing if costs.tied_embeddings else tuple(d.embedding_resident for d in devices),
        kept=nothing,
    )
    blocks = (
        Layer(
            forward=tuple(device.forward[block] for device in devices),
            backward=tuple(device.backward[block] for device in devices),
            resident=tuple(device.resident[block] for device in devices),
            kept=tuple(device.kept[block] for device in devices),
            adapter_bytes=costs.adapter_bytes,
        )
        for block in range(costs.blocks)
    )
    head = Layer(
        forward=tuple(device.head_forward for device in devices),
        backward=tuple(device.head_backward for device in devices),
        resident=tuple(device.head_resident for device in devices),
        kept=tuple(device.head_kept for device in devices),
    )
    return (embedding, *blocks, head)


def assignments(
    costs: PipelineCosts, layers: Sequence[Layer], shares: Shares
) -> list[tuple[float, tuple[Partition, ...]]]:
    """Return, for each possible number of type I layers, the fastest types of all layers and their seconds."""
    best: dict[tuple[int, Partition], tuple[float, tuple[Partition, ...]]] = {}
    for index in range(len(layers)):
        longer: dict[tuple[int, Partition], tuple[float, tuple[Partition, ...]]] = {}
        for partition in _choices(index, len(layers)):
            own = _layer_seconds(costs, layers, index, partition, shares)
            before = best.items() if index else [((0, None), (0.0, ()))]
            for (count, previous), (seconds, types) in before:
                crossing = 0.0
                if previous is not None:
                    crossing = costs.micro_batches * sum(
                        each.seconds for each in _between(costs, index, previous, partition)
                    )
                key = (count + (partition is Partition.ROWS), partition)
                candidate = (seconds + crossing + own, (*types, partition))
                if key not in longer or candidate[0] < longer[key][0]:
                    longer[key] = candidate
        best = longer
    fastest: dict[int, tuple[float, tuple[Partition, ...]]] = {}
    for (count, _), found in sorted(best.items()):
        if count not in fastest or found[0] < fastest[count][0]:
            fastest[count] = found
    return list(fastest.values())


def partition_program(
    costs: PipelineCosts, layers: Sequence[Layer], types: Sequence[Partition], shares: Shares
) -> Program:
    """Return the program: runs of layers without communication are one task on each device that has a share."""
    everyone = tuple(range(len(costs.devices)))
    tasks: list[Task | Collective] = []
    order: list[list[int]] = [[] for _ in everyone]

    def communicate(collectives: Sequence[Collective]) -> None:
        for collective in collectives:
            for device in everyone:
                order[device].append(len(tasks))
            tasks.append(collective)

    def compute(run: Sequence[int], action: Action) -> None:
        goes_back = action.kind is Kind.BACKWARD
        for device in everyone:
            parts = [(layers[index], shares[types[index]][device]) for index in run]
            seconds = sum(
                share * (layer.backward if goes_back else layer.forward)[device] for layer, share in parts
            )
            kept = sum(share * layer.kept[device] for layer, share in parts)
            if seconds == 0 and kept == 0:
                continue
            order[device].append(len(tasks))
            tasks.append(
                Task(
                    device=device,
                    action=action,
                    seconds=seconds,
                    holds=0.0 if goes_back else kept,
                    releases=kept if goes_back else 0.0,
                )
            )

    for micro_batch in range(costs.micro_batches):
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            action = Action(kind=kind, micro_batch=micro_batch)
            run: list[int] = []
            indices = range(len(layers))
            for index in indices if kind is Kind.FORWARD else reversed(indices):
                before, behind = _around(costs, types, index, kind)
                if before:
                    compute(run, action)
                    run = []
                    communicate(before)
                run.append(index)
                if behind:
                    compute(run, action)
                    run = []
                    communicate(behind)
            compute(run, action)
    size = sum(
        layer.adapter_bytes
        for layer, partition in zip(layers, types, strict=True)
        if partition is Partition.ROWS
    )
    if size and len(everyone) > 1:
        seconds = all_reduce_seconds(costs, everyone, size)
        communicate([Collective(name="all-reduce of adapters", devices=everyone, seconds=seconds)])
    return Program(
        devices=tuple(device.name for device in costs.devices),
        tasks=tuple(tasks),
        order=tuple(map(tuple, order)),
        resident=tuple(_resident(layers, types, shares, device) for device in everyone),
    )


def _choices(index: int, layers: int) -> tuple[Partition, ...]:
    return (Partition.ROWS, Partition.OUTPUTS) if index == layers - 1 else tuple(Partition)


def _layer_seconds(
    costs: PipelineCosts, layers: Sequence[Layer], index: int, partition: Partition, shares: Shares
) -> float:
    """Return what a layer takes in a mini-batch: its slowest device, its own all-reduces, its adapters'."""
    layer, devices = layers[index], range(len(costs.devices))
    computing = sum(
        max(share * times[device] for device, share in enumerate(shares[partition]))
        for times in (layer.forward, layer.backward)
    )
    summing = sum(each.seconds for each in _own(costs, index, partition))
    adapters = all_reduce_seconds(costs, devices, layer.adapter_bytes) if partition is Partition.ROWS else 0.0
    return costs.micro_batches * (computing + summing) + adapters


def _own(costs: PipelineCosts, index: int, partition: Partition) -> list[Collective]:
    """Return a layer's own all-reduce: of outputs (forward, type II) or of its inputs' gradients (backward, type III)."""
    reduces = partition is Partition.INPUTS or (partition is Partition.OUTPUTS and _goes_back_to(index - 1))
    if not reduces or len(costs.devices) == 1:
        return []
    devices = tuple(range(len(costs.devices)))
    what = "hidden state" if partition is Partition.INPUTS else "gradient"
    seconds = all_reduce_seconds(costs, devices, costs.hidden_bytes)
    return [Collective(name=f"all-reduce of {what}", devices=devices, seconds=seconds)]


def _between(costs: PipelineCosts, index: int, before: Partition, behind: Partition) -> list[Collective]:
    """Return what lays the hidden state out anew in front of layer `index`, and its gradient on the way back."""
    both = [_rearranged(costs, _GIVES[before], _NEEDS[behind], "hidden state")]
    if _goes_back_to(index - 1):
        both.append(_rearranged(costs, _NEEDS[behind], _GIVES[before], "gradient"))
    return [each for found in both for each in found]


def _around(
    costs: PipelineCosts, types: Sequence[Partition], index: int, kind: Kind
) -> tuple[list[Collective], list[Collective]]:
    """Return the collectives in front of a layer's computation and behind it, in one direction."""
    what = "hidden state" if kind is Kind.FORWARD else "gradient"
    own = [each for each in _own(costs, index, types[index]) if each.name == f"all-reduce of {what}"]
    if kind is Kind.FORWARD:
        if index == 0:
            return [], own
        return _rearranged(costs, _GIVES[types[index - 1]], _NEEDS[types[index]], what), own
    if index == len(types) - 1 or not _goes_back_to(index):
        return [], own
    return _rearranged(costs, _NEEDS[types[index + 1]], _GIVES[types[index]], what), own


def _goes_back_to(index: int) -> bool:
    """Whether a gradient reaches the output of a layer: nothing is trained in the embedding, layer 0."""
    return index >= 1


def _rearranged(costs: PipelineCosts, held: _Held, needed: _Held, what: str) -> list[Collective]:
    """Return the collective that turns one layout into the other; none where each device has what it needs."""
    devices = tuple(range(len(costs.devices)))
    if held is needed or held is _Held.WHOLE or len(devices) == 1:
        return []
    if needed is _Held.WHOLE:
        seconds = all_gather_seconds(costs, devices, costs.hidden_bytes)
        return [Collective(name=f"all-gather of {what}", devices=devices, seconds=seconds)]
    seconds = exchange_seconds(costs, devices, costs.hidden_bytes)
    return [Collective(name=f"exchange of {what}", devices=devices, seconds=seconds)]


def _resident(layers: Sequence[Layer], types: Sequence[Partition], shares: Shares, device: int) -> float:
    """Return the bytes of a device's weights: all of a layer of type I (if it has rows), else its share."""
    total = 0.0
    for layer, partition in zip(layers, types, strict=True):
        share = shares[partition][device]
        total += layer.resident[device] * (math.ceil(share) if partition is Partition.ROWS else share)
    return total


def _excess(
    costs: PipelineCosts, layers: Sequence[Layer], types: Sequence[Partition], shares: Shares
) -> float:
    """Return how many bytes the devices lack, one micro-batch's activations included."""
    lacking = 0.0
    for index, device in enumerate(costs.devices):
        kept = sum(
            shares[partition][index] * layer.kept[index]
            for layer, partition in zip(layers, types, strict=True)
        )
        lacking += max(0.0, _resident(layers, types, shares, index) + kept - device.memory)
    return lacking


def _text(costs: PipelineCosts, types: Sequence[Partition], shares: Shares) -> str:
    parts = ", ".join(
        f"{device.name} {share:.0%}"
        for device, share in zip(costs.devices, shares[Partition.INPUTS], strict=True)
    )
    kinds = " ".join(types[1:-1])
    return (
        f"all devices, types of {named_range(0, len(types) - 2)}: {kinds}; embedding {types[0]}, head {types[-1]}; "
        f"shares {parts}"
    )
