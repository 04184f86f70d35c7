"""What a plan will take on the devices of a layout, and how many more perturbations would cost no time."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from lightning_hybridop.planning.cluster import Cluster
from lightning_hybridop.planning.costs import Assignment, PipelineCosts, layout_memory
from lightning_hybridop.planning.plan import MIB, Figures, Plan
from lightning_hybridop.simulation.program import layout_program
from lightning_hybridop.simulation.simulator import Power, Simulation, simulate

# Makespans that differ by less are sums of the same numbers in another order.
_TOLERANCE = 1e-9


def device_power(cluster: Cluster, names: Sequence[str]) -> tuple[Power | None, ...]:
    """Return what each named device draws; None where it is unknown."""
    profiles = {device.name: device.profile for device in cluster.devices}
    return tuple(
        None
        if profiles[name].busy_w is None
        else Power(busy_w=profiles[name].busy_w, idle_w=profiles[name].idle_w)  # type: ignore[arg-type]
        for name in names
    )


def simulate_layout(
    costs: PipelineCosts,
    layout: Sequence[Assignment],
    plan: Plan,
    *,
    power: Sequence[Power | None] | None = None,
) -> Simulation:
    """Return one mini-batch of the plan's schedule on the devices of a layout, `power` being that of its stages."""
    return simulate(layout_program(costs, layout, plan), power=power)


def with_prediction(plan: Plan, simulation: Simulation, *, time_scale: float = 1.0) -> Plan:
    """Return the plan with what a simulation predicts of it; an emulated run takes `time_scale` times as long."""
    predicted = Figures(
        iteration_seconds=simulation.makespan * time_scale,
        comu_ti=simulation.comu_ti,
        memory_mib=tuple(device.memory / MIB for device in simulation.devices),
    )
    return dataclasses.replace(plan, predicted=predicted)


def most_within_idle_time(
    costs: PipelineCosts, layout: Sequence[Assignment], plan: Plan, field: Literal["queries", "exit_queries"]
) -> int:
    """Return the most perturbations (of either field) per micro-batch that do not lengthen the plan's mini-batch.

    Counted up one by one from the plan's own number until the simulated makespan grows or a device's memory ends; the
    plan's own number if it perturbs nothing.
    """

    def fits(number: int) -> bool:
        changed: dict[str, Any] = {field: number}
        more = dataclasses.replace(costs, **changed)
        within = all(
            need <= costs.devices[part.device].memory
            for need, part in zip(layout_memory(more, layout), layout, strict=True)
        )
        return (
            within and simulate_layout(more, layout, dataclasses.replace(plan, **changed)).makespan <= limit
        )

    number: int = getattr(plan, field)
    if not plan.zo_stages or plan.estimator == "adjoint":
        return number
    limit = simulate_layout(costs, layout, plan).makespan * (1 + _TOLERANCE)
    while fits(number + 1):
        number += 1
    return number
