"""The exact planner: which devices run which blocks, in which order."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from lightning_hybridop.planning.candidate_stages import Place, Terms, stage_needs, terms
from lightning_hybridop.planning.costs import Layout, Objective, PipelineCosts, layout_value
from lightning_hybridop.planning.infeasible import infeasible
from lightning_hybridop.planning.kinds import Kind, link_between_kinds
from lightning_hybridop.planning.pipelines import Pipelines, layout_of, pipelines, stage_steps
from lightning_hybridop.planning.search import Found, best_chain
from lightning_hybridop.planning.search_bounds import Links
from lightning_hybridop.planning.steps import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLayout:
    """A layout and its iteration time by the objective, in seconds."""

    layout: Layout
    value: float


def best_layout(
    costs: PipelineCosts, *, objective: Objective = "makespan", use_all: bool = False
) -> PlannedLayout:
    """Return the layout of the least `layout_value` among all that fit into the devices' memory.

    All splits, all orders of devices with zo before bp, and, without `use_all`, all choices of devices to leave out
    are considered: no layout is better by more than one part in 10^10. A cluster with a bp device gets a bp stage,
    because with zo stages alone nothing would be trained exactly. Equal devices are used in their order. The same
    costs always give the same layout.

    The paper's two dynamic programmes take the devices in a fixed order and its objective, a sum and the largest
    stage; here the order is searched, and each further term of `makespan_estimate` is one more such pair.

    Raises:
        InfeasibleError: no layout fits; it says what is missing.
    """
    layout: Layout | None = None
    limit = np.inf
    for searched in pipelines(costs, use_all=use_all):
        found = _best(costs, searched, objective, below=limit)
        if found is not None:
            layout, limit = layout_of(found.chain, searched.kinds), found.value
    if layout is None:
        raise infeasible(costs, use_all=use_all)
    return PlannedLayout(layout=layout, value=layout_value(costs, layout, objective))


def _best(costs: PipelineCosts, searched: Pipelines, objective: Objective, *, below: float) -> Found | None:
    parts = terms(costs, objective, zo=any(searched.zo), bp=not all(searched.zo))
    shared: dict[tuple[int, Place, bytes], Step] = {}

    def step(kind: int, place: Place) -> Step:
        device = searched.kinds[kind].costs
        fits = stage_needs(costs, device, place) <= device.memory
        # How many micro-batches are in flight only decides what fits, and often not even that.
        key = kind, dataclasses.replace(place, in_flight=0), fits.tobytes()
        if key not in shared:
            sums, peaks = parts.stages(device, place)
            shared[key] = Step(sums=np.where(fits, sums, np.inf), peaks=peaks)
        return shared[key]

    return best_chain(
        searched.levels,
        stage_steps(costs, searched, step),
        _links(costs, searched.kinds, parts),
        counts=searched.counts,
        below=below,
    )


def _links(costs: PipelineCosts, kinds: tuple[Kind, ...], parts: Terms) -> Links:
    shape = (len(parts.criteria), len(kinds), len(kinds) + 1)
    sums, peaks = np.zeros(shape), np.zeros(shape)
    for a, before in enumerate(kinds):
        for b, after in enumerate(kinds):
            link = link_between_kinds(costs, before, after)
            sums[:, a, b], peaks[:, a, b] = parts.link(
                link, zo_before=before.costs.zo, zo_after=after.costs.zo
            )
    return Links(sums=sums, peaks=peaks)
