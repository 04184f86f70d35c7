"""GPipe and 1F1B with even splits: every device, in the order of the cluster, gets as many blocks as any other."""

from lightning_hybridop.planning.costs import Assignment, PipelineCosts
from lightning_hybridop.planning.plan import Plan, ScheduleName, Stage
from lightning_hybridop.simulation.baselines.common import (
    Baseline,
    back_propagating,
    named_range,
    split_evenly,
)
from lightning_hybridop.simulation.program import layout_program


def even_pipeline(costs: PipelineCosts, schedule: ScheduleName) -> Baseline:
    """Return the pipeline of a schedule over all devices; the first also has the embedding, the last the head.

    Raises:
        BaselineError: a device cannot back-propagate, or there are fewer blocks than devices.
    """
    costs = back_propagating(costs)
    bounds = split_evenly(costs, len(costs.devices))
    layout = tuple(
        Assignment(device=device, first=bounds[device], last=bounds[device + 1])
        for device in range(len(costs.devices))
    )
    plan = Plan(
        blocks=costs.blocks,
        stages=tuple(Stage(first=part.first, last=part.last) for part in layout),
        micro_batches=costs.micro_batches,
        queries=0,
        schedule=schedule,
    )
    return Baseline(
        program=layout_program(costs, layout, plan),
        description="; ".join(
            f"{costs.devices[part.device].name}: {named_range(part.first, part.last)}" for part in layout
        ),
    )
