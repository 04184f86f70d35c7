"""Chooses between the planner's best layouts by what they take in simulation.

The planner's estimate is a formula: exact search is possible over it, but it knows nothing of a schedule's stalls. Whether
to use the zo devices at all, and how many micro-batches to cut, is therefore decided by the simulator.
"""

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from lightning_hybridop.planning.cluster import Cluster
from lightning_hybridop.planning.costs import Objective
from lightning_hybridop.planning.infeasible import InfeasibleError
from lightning_hybridop.planning.plan import Estimator, ExitBaseline
from lightning_hybridop.planning.planner import PlannedPipeline, plan_pipeline
from lightning_hybridop.planning.workload import Workload
from lightning_hybridop.simulation.predict import device_power, simulate_layout
from lightning_hybridop.simulation.simulator import Simulation

# Makespans that differ by less are sums of the same numbers in another order.
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPipeline:
    """A planned pipeline with its simulated mini-batch."""

    pipeline: PlannedPipeline
    simulation: Simulation


def simulate_pipeline(cluster: Cluster, pipeline: PlannedPipeline) -> SimulatedPipeline:
    """Return a planned pipeline of (some of) the cluster's devices with its simulated mini-batch."""
    names = [pipeline.costs.devices[part.device].name for part in pipeline.layout]
    power = device_power(cluster, names)
    simulation = simulate_layout(pipeline.costs, pipeline.layout, pipeline.plan, power=power)
    return SimulatedPipeline(pipeline=pipeline, simulation=simulation)


def plan_by_simulation(
    cluster: Cluster,
    workload: Workload,
    *,
    micro_batches: int | None = None,
    queries: int = 1,
    exit_queries: int = 0,
    objective: Objective = "makespan",
    use_all: bool = False,
    exit_baseline: ExitBaseline = "exit",
    estimator: Estimator = "loss",
    queries_per_forward: int = 1,
) -> SimulatedPipeline:
    """Return the pipeline that takes the least time in simulation among the planner's best.

    Candidates are the planner's own choice and, for each M to choose from, every device in use and all devices that
    back-propagate alone (not with `use_all`). With the paper's objective only the planner's own choice is simulated. Of
    two that are equally fast the first one in this order is taken, with the smaller M.

    Raises:
        ClusterError: a figure that is needed is unknown.
        InfeasibleError: no layout fits into memory; it says what would be enough.
        PlanError: the estimator takes gradients from bp stages, and no device back-propagates.
    """

    def simulated(among: Cluster, count: int | None, *, everything: bool) -> SimulatedPipeline:
        pipeline = plan_pipeline(
            among,
            workload,
            micro_batches=count,
            queries=queries,
            exit_queries=exit_queries,
            objective=objective,
            use_all=everything,
            exit_baseline=exit_baseline,
            estimator=estimator,
            queries_per_forward=queries_per_forward,
        )
        return simulate_pipeline(cluster, pipeline)

    # The planner's own choice: where nothing fits, it is the one that says why.
    chosen = simulated(cluster, micro_batches, everything=use_all)
    if objective == "paper":
        return chosen
    counts = workload.micro_batch_choices() if micro_batches is None else (micro_batches,)
    bp = tuple(device.name for device in chosen.pipeline.costs.devices if not device.zo)
    among = [cluster, *([cluster.only(bp)] if 0 < len(bp) < len(cluster.devices) and not use_all else [])]
    candidates = [chosen]
    for part in among:
        for count in counts:
            with suppress(InfeasibleError):
                candidates.append(simulated(part, count, everything=True))
    return _explained(_fastest(candidates), cluster, candidates)


def _fastest(candidates: Sequence[SimulatedPipeline]) -> SimulatedPipeline:
    """Return the first of the candidates that take the least time, within rounding."""
    least = min(candidate.simulation.makespan for candidate in candidates)
    return next(c for c in candidates if c.simulation.makespan <= least * (1 + _TOLERANCE))


def _explained(
    best: SimulatedPipeline, cluster: Cluster, candidates: Sequence[SimulatedPipeline]
) -> SimulatedPipeline:
    """Return the best candidate with a sentence about the devices that it leaves out, in simulated seconds."""
    used = {best.pipeline.costs.devices[part.device].name for part in best.pipeline.layout}
    unused = [device.name for device in cluster.devices if device.name not in used]
    complete = [c for c in candidates if len(c.pipeline.layout) == len(cluster.devices)]
    if not unused or not complete:
        return best
    everything = _fastest(complete).simulation.makespan
    verb, pronoun = ("is", "it") if len(unused) == 1 else ("are", "them")
    sentence = (
        f"{' and '.join(unused)} {verb} left out: a mini-batch takes {best.simulation.makespan:.3f} s without {pronoun} and "
        f"{everything:.3f} s with every device in use."
    )
    pipeline = dataclasses.replace(best.pipeline, left_out=(sentence,))
    return dataclasses.replace(best, pipeline=pipeline)
