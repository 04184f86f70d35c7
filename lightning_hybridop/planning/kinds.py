"""Which devices are interchangeable, so that a search need not try all of them in every order."""

import dataclasses
from dataclasses import dataclass

from lightning_hybridop.planning.costs import DeviceCosts, LinkTimes, PipelineCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Devices that can be swapped without changing any layout's value: their indices, and the costs they share."""

    devices: tuple[int, ...]
    costs: DeviceCosts


def device_kinds(costs: PipelineCosts) -> tuple[Kind, ...]:
    """Return the kinds of devices, zo kinds first, otherwise in the order of their first device.

    Two devices are of one kind when their costs are equal up to the name and swapping them leaves the links as they
    are.
    """
    kinds: list[list[int]] = []
    for index in sorted(range(len(costs.devices)), key=lambda index: not costs.devices[index].zo):
        for kind in kinds:
            if _interchangeable(costs, kind[0], index):
                kind.append(index)
                break
        else:
            kinds.append([index])
    return tuple(Kind(devices=tuple(kind), costs=costs.devices[kind[0]]) for kind in kinds)


def _interchangeable(costs: PipelineCosts, first: int, second: int) -> bool:
    a, b = costs.devices[first], costs.devices[second]
    return dataclasses.replace(a, name=b.name) == b and all(
        costs.links[first][other] == costs.links[second][other]
        for other in range(len(costs.devices))
        if other not in (first, second)
    )


def link_between_kinds(costs: PipelineCosts, before: Kind, after: Kind) -> LinkTimes:
    """Return the link from a device of one kind to another device of the same or another kind."""
    if before is not after:
        return costs.links[before.devices[0]][after.devices[0]]
    if len(before.devices) == 1:
        return LinkTimes()  # Such neighbours do not exist.
    return costs.links[before.devices[0]][before.devices[1]]
