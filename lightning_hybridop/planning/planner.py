"""From a cluster and a workload to a plan: the best layout, what it leaves out and why."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_hybridop.planning.cluster import Cluster, ClusterError
from lightning_hybridop.planning.costs import (
    Assignment,
    Layout,
    LinkTimes,
    Objective,
    PipelineCosts,
    layout_times,
    pipeline_costs,
)
from lightning_hybridop.planning.infeasible import InfeasibleError, infeasible, shortage
from lightning_hybridop.planning.kinds import device_kinds
from lightning_hybridop.planning.partition import PlannedLayout, best_layout
from lightning_hybridop.planning.plan import Estimator, ExitBaseline, Plan, PlanError, Stage
from lightning_hybridop.planning.search import PRECISION
from lightning_hybridop.planning.workload import Workload

MOST_KINDS = 10
"""The most unlike devices that a plan is searched for: the time doubles with each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPipeline:
    """A plan with what it was made from.

    `value` is its iteration time by the objective, in seconds. `left_out` has a sentence for each kind of devices that
    have no stage, `notes` what else there is to say.
    """

    costs: PipelineCosts
    layout: Layout
    value: float
    plan: Plan
    left_out: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What `plan_pipeline` was asked for, without M."""

    cluster: Cluster
    workload: Workload
    queries: int
    exit_queries: int
    exit_baseline: ExitBaseline
    estimator: Estimator
    queries_per_forward: int
    objective: Objective

    def costs(self, micro_batches: int) -> PipelineCosts:
        return pipeline_costs(
            self.cluster,
            self.workload,
            micro_batches=micro_batches,
            queries=self.queries,
            exit_queries=self.exit_queries,
            exit_baseline=self.exit_baseline == "exit",
            estimator=self.estimator,
            queries_per_forward=self.queries_per_forward,
        )


def plan_pipeline(
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
) -> PlannedPipeline:
    """Return the best plan of a workload on a cluster.

    Without `micro_batches` every M that cuts the mini-batch evenly is tried; of two that are equally fast the smaller
    one is taken, which sends fewer messages.

    Raises:
        ClusterError: a figure that is needed is unknown.
        InfeasibleError: no layout fits into memory; it says what would be enough.
        PlanError: the estimator takes gradients from bp stages, and no device back-propagates.
    """
    request = _Request(
        cluster=cluster,
        workload=workload,
        queries=queries,
        exit_queries=exit_queries,
        exit_baseline=exit_baseline,
        estimator=estimator,
        queries_per_forward=queries_per_forward,
        objective=objective,
    )
    choices = workload.micro_batch_choices() if micro_batches is None else (micro_batches,)
    devices = request.costs(choices[0])
    if estimator != "loss" and all(device.zo for device in devices.devices):
        raise PlanError(
            f"estimator: found {estimator} for devices of which none back-propagates, but its gradient comes from a bp "
            "stage; add such a device, or use the estimator loss."
        )
    kinds = len(device_kinds(devices))
    if kinds > MOST_KINDS:
        raise ClusterError(
            f"devices: found {kinds} kinds of devices, expected at most {MOST_KINDS}, because every order of unlike devices is "
            "tried; give devices that differ little the same figures."
        )
    best = _best(request, choices, use_all=use_all)
    if best is None:
        raise _infeasible(request, choices, use_all=use_all)
    costs, planned = best
    return PlannedPipeline(
        costs=costs,
        layout=planned.layout,
        value=planned.value,
        plan=layout_plan(costs, planned.layout, exit_baseline=exit_baseline),
        left_out=_left_out(request, choices, costs, planned),
        notes=_notes(costs, planned.layout),
    )


def layout_plan(
    costs: PipelineCosts, layout: Sequence[Assignment], *, exit_baseline: ExitBaseline = "exit"
) -> Plan:
    """Return the plan of a layout: its stages by the devices' names, with M, Q and Q' of the costs.

    A stage's speed is its blocks per second of forward, embedding and head included, relative to the slowest one; its
    backward and the transfer to the next stage are relative likewise. A layout without zo stages has no early exits.
    """
    times, links = layout_times(costs, layout)
    rates = [(part.last - part.first) / stage.forward for part, stage in zip(layout, times, strict=True)]
    stages = tuple(
        Stage(
            first=part.first,
            last=part.last,
            role=stage.role,
            name=costs.devices[part.device].name,
            speed=_rounded(rate / min(rates)),
            backward=_rounded(stage.backward / stage.forward)
            if stage.role == "bp" or stage.backward > 0
            else 2.0,
            transfer=_rounded(link.arrival * min(rates)),
            wire=costs.wire if part is not layout[-1] else None,
        )
        for part, stage, rate, link in zip(layout, times, rates, (*links, LinkTimes()), strict=True)
    )
    has_zo = any(stage.role == "zo" for stage in stages)
    return Plan(
        blocks=costs.blocks,
        stages=stages,
        micro_batches=costs.micro_batches,
        queries=costs.queries,
        exit_queries=costs.exit_queries if has_zo else 0,
        exit_baseline=exit_baseline,
        estimator=costs.estimator,
        queries_per_forward=costs.queries_per_forward,
    )


def plan_layout(plan: Plan, costs: PipelineCosts) -> Layout:
    """Return the layout of a plan: stages by their names; those without one take the other devices in their order.

    Raises:
        PlanError: a stage's name is no device of the cluster or is another stage's too, or there are too few devices.
    """
    names = [device.name for device in costs.devices]
    named = [stage.name for stage in plan.stages if stage.name is not None]
    for index, stage in enumerate(plan.stages):
        if stage.name is not None and stage.name not in names:
            raise PlanError(
                f"stages[{index}].name: there is no device {stage.name}; the cluster has {', '.join(names)}."
            )
        if stage.name is not None and named.count(stage.name) > 1:
            raise PlanError(
                f"stages[{index}].name: {stage.name} has {named.count(stage.name)} stages; give each a device of its own."
            )
    if len(plan.stages) > len(names):
        raise PlanError(
            f"stages: found {len(plan.stages)} for the {len(names)} devices of the cluster; use at most one stage per "
            "device."
        )
    free = iter([index for index, name in enumerate(names) if name not in named])
    return tuple(
        Assignment(
            device=next(free) if stage.name is None else names.index(stage.name),
            first=stage.first,
            last=stage.last,
        )
        for stage in plan.stages
    )


def checked_layout(plan: Plan, costs: PipelineCosts) -> Layout:
    """Return the layout of a plan whose roles are those that its devices have.

    Raises:
        PlanError: as `plan_layout`, and for a stage whose device cannot play its role in this cluster.
    """
    layout = plan_layout(plan, costs)
    for index, (stage, part) in enumerate(zip(plan.stages, layout, strict=True)):
        device = costs.devices[part.device]
        if (stage.role != "bp") != device.zo:
            can = "only runs forward" if device.zo else "back-propagates"
            raise PlanError(
                f"stages[{index}].role: found {stage.role}, but {device.name} {can} in this cluster; change the role, or the "
                "device's forward_only."
            )
    return layout


def _best(
    request: _Request, choices: Iterable[int], *, use_all: bool
) -> tuple[PipelineCosts, PlannedLayout] | None:
    """Return the best layout over all M to choose from, None if there is none."""
    best: tuple[PipelineCosts, PlannedLayout] | None = None
    for micro_batches in choices:
        costs = request.costs(micro_batches)
        try:
            planned = best_layout(costs, objective=request.objective, use_all=use_all)
        except InfeasibleError:
            continue
        if best is None or planned.value < best[1].value * (1 - PRECISION):
            best = costs, planned
    return best


def _infeasible(request: _Request, choices: Sequence[int], *, use_all: bool) -> InfeasibleError:
    """Return the error for M of which none fits: a larger M is the cheapest remedy, then memory."""
    tried = choices[-1]
    costs = request.costs(tried)
    larger = [count for count in request.workload.micro_batch_choices() if count > tried]
    enough = next((count for count in larger if _best(request, [count], use_all=use_all)), None)
    if use_all and costs.blocks < len(costs.devices):
        return infeasible(costs, use_all=True)
    short = shortage(costs, use_all=use_all)
    remedy = short.remedy if enough is None else f"{enough} micro-batches would fit"
    cut = f"{tried} micro-batch" + ("" if tried == 1 else "es")
    return InfeasibleError(f"No layout with {cut} fits into memory: {short.found}; {remedy}.")


def _left_out(
    request: _Request, choices: Sequence[int], costs: PipelineCosts, planned: PlannedLayout
) -> tuple[str, ...]:
    """Return a sentence for each kind of devices without a stage."""
    used = {part.device for part in planned.layout}
    unused = [
        [costs.devices[index].name for index in kind.devices if index not in used]
        for kind in device_kinds(costs)
    ]
    unused = [names for names in unused if names]
    if not unused:
        return ()
    everything = _best(request, choices, use_all=True)
    sentences = []
    for names in unused:
        verb, pronoun = ("is", "it") if len(names) == 1 else ("are", "them")
        if costs.blocks < len(costs.devices):
            reason = f"the cluster has {len(costs.devices)} devices, more than the model has blocks"
        elif everything is None:
            reason = "with every device in use nothing fits into memory"
        else:
            without, with_all = _unlike(planned.value, everything[1].value)
            by = "by the published formula " if request.objective == "paper" else ""
            reason = f"{by}the iteration takes {without} s without {pronoun} and {with_all} s with every device in use"
        sentences.append(f"{_listed(names)} {verb} left out: {reason}.")
    return tuple(sentences)


def _notes(costs: PipelineCosts, layout: Layout) -> tuple[str, ...]:
    """Return what is special about the stages."""
    zo = [costs.devices[part.device].zo for part in layout]
    notes = []
    if len(zo) == 1:
        notes.append("one device: no pipeline, it runs the whole model.")
    if all(zo):
        notes.append("no device can back-propagate: every stage learns from perturbations alone.")
    if not any(zo):
        notes.append("no zo stage: every stage back-propagates, and nothing is perturbed, whatever Q.")
    if any(zo) and costs.estimator == "adjoint":
        notes.append(
            "exact adjoints: zo stages have gradients of their own, and nothing is perturbed, whatever Q."
        )
    return tuple(notes)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _unlike(first: float, second: float) -> tuple[str, str]:
    """Return two numbers with three digits, or as many as tell them apart, at most nine."""
    for digits in range(3, 10):
        pair = f"{first:.{digits}g}", f"{second:.{digits}g}"
        if pair[0] != pair[1]:
            return pair
    return f"{first:.3g}", f"{second:.3g}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
