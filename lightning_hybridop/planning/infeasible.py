"""Why no layout fits, and what would be enough."""

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_hybridop.planning.candidate_stages import Place, stage_needs
from lightning_hybridop.planning.cluster import BYTES_PER_GB
from lightning_hybridop.planning.costs import Layout, PipelineCosts, layout_memory
from lightning_hybridop.planning.kinds import device_kinds
from lightning_hybridop.planning.pipelines import Pipelines, layout_of, pipelines, stage_steps
from lightning_hybridop.planning.search import Found, best_chain
from lightning_hybridop.planning.search_bounds import Links
from lightning_hybridop.planning.steps import Step


class InfeasibleError(ValueError):
    """No layout fits. The message names a device, what it needs and has, and the least change that is enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """What one device needs and has, in bytes, and how much more would be enough on it, or on every device."""

    device: str
    needs: float
    has: float
    on_every_device: bool

    @property
    def found(self) -> str:
        """What is short, as a part of a sentence."""
        return f"{self.device} needs {_gb(self.needs, math.ceil)} GB or more and has {_gb(self.has, math.floor)} GB"

    @property
    def remedy(self) -> str:
        """How much more memory is enough, as a part of a sentence."""
        more = f"{_gb(self.needs - self.has, math.ceil)} GB more"
        if self.on_every_device:
            return f"no single device can make up for it, {more} on every device would"
        return f"{more} on this device alone would be enough"


def infeasible(costs: PipelineCosts, *, use_all: bool) -> InfeasibleError:
    """Return the error that says why no layout fits."""
    if use_all and costs.blocks < len(costs.devices):
        return InfeasibleError(
            f"use_all: found {len(costs.devices)} devices for {costs.blocks} blocks, expected a block for each; leave "
            "devices out."
        )
    short = shortage(costs, use_all=use_all)
    return InfeasibleError(f"No layout fits into memory: {short.found}; {short.remedy}.")


def shortage(costs: PipelineCosts, *, use_all: bool) -> Shortage:
    """Return the least memory that makes a layout fit: on one device if any can, else as much on all of them."""
    alone = [_need_alone(costs, kind.devices[0], use_all=use_all) for kind in device_kinds(costs)]
    found = [each for each in alone if each is not None]
    if found:
        return min(found, key=lambda each: each.needs - each.has)
    layout = _least_lacking(costs, use_all=use_all)
    needs = layout_memory(costs, layout)
    lacks = [need - costs.devices[part.device].memory for need, part in zip(needs, layout, strict=True)]
    worst = int(np.argmax(lacks))
    device = costs.devices[layout[worst].device]
    return Shortage(device=device.name, needs=needs[worst], has=device.memory, on_every_device=True)


def _need_alone(costs: PipelineCosts, device: int, *, use_all: bool) -> Shortage | None:
    """Return what a device must have for a layout to fit, None if no memory on this device alone is enough."""
    given = costs.devices[device]
    # As good as endless, yet unlike that of any other device, so that it is a kind of its own.
    enlarged = dataclasses.replace(given, memory=sys.float_info.max)
    devices = (*costs.devices[:device], enlarged, *costs.devices[device + 1 :])
    costs = dataclasses.replace(costs, devices=devices)
    found = [
        _least(costs, searched, counted=[kind.devices == (device,) for kind in searched.kinds])
        for searched in pipelines(costs, use_all=use_all)
    ]
    needs = [each.value for each in found if each is not None]
    if not needs:
        return None
    return Shortage(device=given.name, needs=min(needs), has=given.memory, on_every_device=False)


def _least_lacking(costs: PipelineCosts, *, use_all: bool) -> Layout:
    """Return the layout whose device that lacks most lacks least."""
    found = [
        (each, searched.kinds)
        for searched in pipelines(costs, use_all=use_all)
        if (each := _least(costs, searched, counted=None)) is not None
    ]
    chain, kinds = min(found, key=lambda each: each[0].value)
    return layout_of(chain.chain, kinds)


def _least(costs: PipelineCosts, searched: Pipelines, *, counted: Sequence[bool] | None) -> Found | None:
    """Return the layout that needs least on the counted kinds and fits; for None, that lacks least on its worst stage.

    The search for the fastest layout does it, with bytes in the place of seconds.
    """

    def step(kind: int, place: Place) -> Step:
        device = searched.kinds[kind].costs
        need = stage_needs(costs, device, place)[None]
        if counted is None:
            exists = np.isfinite(need)
            lack = np.maximum(np.where(exists, need, 0.0) - device.memory, 0.0)
            return Step(sums=np.where(exists, 0.0, np.inf), peaks=lack)
        amount = need if counted[kind] else np.zeros_like(need)
        return Step(sums=np.where(need <= device.memory, amount, np.inf), peaks=np.zeros_like(need))

    nothing = np.zeros((1, len(searched.kinds), len(searched.kinds) + 1))
    return best_chain(
        searched.levels,
        stage_steps(costs, searched, step),
        Links(sums=nothing, peaks=nothing),
        counts=searched.counts,
    )


def _gb(size: float, rounded: Callable[[float], int]) -> str:
    """Return bytes in GB; needs are rounded up and possessions down, so that following the advice is enough."""
    return f"{rounded(round(size / BYTES_PER_GB * 100, 6)) / 100:.2f}"
