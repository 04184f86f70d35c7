import dataclasses

import pytest

from lightning_hybridop.planning.costs import PipelineCosts
from lightning_hybridop.planning.infeasible import shortage
from lightning_hybridop.planning.partition import best_layout
from tests.planning.by_hand import every_layout, lacks, random_costs


def tight_costs(seed: int) -> PipelineCosts:
    """Draw costs with little memory."""
    costs = random_costs(seed, blocks=3 + seed % 4, devices=2 + seed % 3)
    devices = tuple(
        dataclasses.replace(each, memory=(seed % 5) * (1.0 + index))
        for index, each in enumerate(costs.devices)
    )
    return dataclasses.replace(costs, devices=devices)


@pytest.mark.parametrize("use_all", [False, True])
def test_the_least_change_is_named(use_all: bool) -> None:
    alone = everywhere = 0
    for seed in range(80):
        costs = tight_costs(seed)
        if use_all and costs.blocks < len(costs.devices):
            continue
        lacking = [
            lacks(costs, layout)
            for layout in every_layout(costs)
            if not use_all or len(layout) == len(costs.devices)
        ]
        if not all(any(each) for each in lacking):
            continue
        short = shortage(costs, use_all=use_all)
        one = [sum(each) for each in lacking if sum(lack > 0 for lack in each) == 1]
        expected = min(one) if one else min(max(each) for each in lacking)

        assert short.on_every_device == (not one)
        assert short.needs - short.has == pytest.approx(expected, rel=1e-9)
        # Following the advice is enough.
        names = {short.device} if one else {device.name for device in costs.devices}
        devices = tuple(
            dataclasses.replace(each, memory=each.memory + expected * (1 + 1e-9))
            if each.name in names
            else each
            for each in costs.devices
        )
        best_layout(dataclasses.replace(costs, devices=devices), use_all=use_all)
        alone, everywhere = alone + bool(one), everywhere + (not one)
    assert alone > 10
    # One device that back-propagates could always have the whole model.
    assert (everywhere > 10) if use_all else (everywhere == 0)
