"""The comparison: every method on one cluster and workload, with and without the devices that only run forward."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import get_args

from lightning_hybridop.planning.cluster import Cluster
from lightning_hybridop.planning.costs import Objective, PipelineCosts, pipeline_costs
from lightning_hybridop.planning.infeasible import InfeasibleError
from lightning_hybridop.planning.plan import Estimator
from lightning_hybridop.planning.workload import Workload
from lightning_hybridop.simulation.baselines import BASELINES, Baseline, BaselineError, hybridop_tail
from lightning_hybridop.simulation.baselines.common import named_range, only_devices
from lightning_hybridop.simulation.planning import plan_by_simulation
from lightning_hybridop.simulation.predict import device_power
from lightning_hybridop.simulation.program import layout_program
from lightning_hybridop.simulation.simulator import Simulation, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodResult:
    """One row of the comparison.

    `simulation` covers the devices that the method uses; it is None where the method cannot run, and `reason` says why.
    `description` says who holds what. Energy per sample is in J, that of devices in use alone, None where a device's
    power is unknown and an upper bound where `simulation.energy_is_bound`.
    `over_memory` names the devices that would need more memory than they have: the figures stand as if they had it.
    """

    method: str
    with_npus: bool
    simulation: Simulation | None = None
    reason: str | None = None
    description: str = ""
    samples_per_second: float | None = None
    energy_per_sample: float | None = None
    over_memory: tuple[str, ...] = ()


def compare(
    cluster: Cluster,
    workload: Workload,
    *,
    micro_batches: int,
    queries: int,
    exit_queries: int = 0,
    estimator: Estimator = "loss",
) -> tuple[MethodResult, ...]:
    """Return every method's result on the same mini-batch: first-order methods, HybridOP's tail placement, HybridOP.

    First-order methods come twice if there are devices that only run forward: on all devices, which then all
    back-propagate, and without those. All cut the mini-batch into `micro_batches`, but for AccPar, which has no pipeline
    and takes it whole, and HDP, whose groups cut their shares of it. HybridOP comes on all devices: with the paper's
    placement at the tail and its objective, both with the estimator that the paper has; then with `estimator`, once free
    to leave devices out and once with all, and with each other estimator (adjoints have no early exits); and on the bp
    devices alone. The workload's `wire` is HybridOP's, but for these rows of the paper's.

    Raises:
        ClusterError: a figure that is needed is unknown.
    """
    plain = dataclasses.replace(workload, wire=None)
    costs = pipeline_costs(
        cluster, plain, micro_batches=micro_batches, queries=queries, exit_queries=exit_queries
    )
    whole = pipeline_costs(cluster, plain, micro_batches=1, queries=queries, exit_queries=exit_queries)
    bp = [index for index, device in enumerate(costs.devices) if not device.zo]
    has_zo = len(bp) < len(costs.devices)

    methods: list[tuple[str, bool, Callable[[], Baseline]]] = []
    for method, build in BASELINES.items():
        given = whole if method == "AccPar" else costs
        if has_zo:
            methods.append((method, True, partial(build, given)))
        methods.append((method, False, partial(build, only_devices(given, bp))))
    if has_zo:
        planned = partial(_planned, cluster, workload, costs)
        methods += [
            ("HybridOP (tail)", True, partial(hybridop_tail, costs)),
            (
                "HybridOP (paper)",
                True,
                partial(_planned, cluster, plain, costs, objective="paper", use_all=True),
            ),
            ("HybridOP (free)", True, partial(planned, use_all=False, estimator=estimator)),
            ("HybridOP", True, partial(planned, use_all=True, estimator=estimator)),
            *(
                (f"HybridOP ({other})", True, partial(planned, use_all=True, estimator=other))
                for other in get_args(Estimator)
                if other != estimator
            ),
        ]
    methods.append(("HybridOP", False, partial(_bp_alone, cluster, workload, costs)))
    return tuple(_result(cluster, workload, costs, *method) for method in methods)


def _planned(
    cluster: Cluster,
    workload: Workload,
    costs: PipelineCosts,
    *,
    objective: Objective = "makespan",
    use_all: bool,
    estimator: Estimator = "loss",
) -> Baseline:
    """Return the program of HybridOP as planned for these devices, with the M, Q and Q' of `costs`."""
    if estimator != "loss" and all(device.zo for device in costs.devices):
        raise BaselineError(f"No device is left that sends the estimator {estimator} a gradient; add one.")
    found = plan_by_simulation(
        cluster,
        workload,
        micro_batches=costs.micro_batches,
        queries=costs.queries,
        exit_queries=0 if estimator == "adjoint" else costs.exit_queries,
        objective=objective,
        use_all=use_all,
        estimator=estimator,
    ).pipeline
    stages = "; ".join(
        f"{found.costs.devices[part.device].name} ({'zo' if found.costs.devices[part.device].zo else 'bp'}): "
        f"{named_range(part.first, part.last)}"
        for part in found.layout
    )
    return Baseline(
        program=layout_program(found.costs, found.layout, found.plan),
        description=". ".join([stages, *(sentence.rstrip(".") for sentence in found.left_out)]),
    )


def _bp_alone(cluster: Cluster, workload: Workload, costs: PipelineCosts) -> Baseline:
    names = tuple(device.name for device in costs.devices if not device.zo)
    if not names:
        raise BaselineError("No device is left that back-propagates; add one.")
    without = dataclasses.replace(costs, queries=0, exit_queries=0)
    return _planned(cluster.only(names), workload, without, use_all=False)


def _result(
    cluster: Cluster,
    workload: Workload,
    costs: PipelineCosts,
    method: str,
    with_npus: bool,
    build: Callable[[], Baseline],
) -> MethodResult:
    row = MethodResult(method=method, with_npus=with_npus)
    try:
        baseline = build()
    except (BaselineError, InfeasibleError) as error:
        return dataclasses.replace(row, reason=str(error))
    simulation = simulate(baseline.program, power=device_power(cluster, baseline.program.devices))
    memory = {device.name: device.memory for device in costs.devices}
    return dataclasses.replace(
        row,
        simulation=simulation,
        description=baseline.description,
        samples_per_second=workload.rows / simulation.makespan,
        energy_per_sample=None if simulation.energy is None else simulation.energy / workload.rows,
        over_memory=tuple(
            device.name for device in simulation.devices if device.memory > memory[device.name]
        ),
    )
