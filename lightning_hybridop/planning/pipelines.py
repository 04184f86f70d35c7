"""What is searched: sets of pipelines over kinds of devices, with arrays of what their stages cost."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lightning_hybridop.planning.candidate_stages import Place
from lightning_hybridop.planning.chains import Level, Turn, chains
from lightning_hybridop.planning.costs import Assignment, DeviceCosts, Layout, PipelineCosts
from lightning_hybridop.planning.kinds import Kind, device_kinds
from lightning_hybridop.planning.search import Chain
from lightning_hybridop.planning.steps import Step, Steps, joined_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelines:
    """All pipelines that have a stage of each role of these kinds, as a graph from their last stages to the first."""

    kinds: tuple[Kind, ...]
    levels: tuple[Level, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of devices of each kind."""
        return tuple(len(kind.devices) for kind in self.kinds)

    @property
    def zo(self) -> tuple[bool, ...]:
        """Whether each kind only runs forward."""
        return tuple(kind.costs.zo for kind in self.kinds)


def pipelines(costs: PipelineCosts, *, use_all: bool) -> Iterator[Pipelines]:
    """Yield the sets of pipelines to search: with bp stages alone, and with all roles that the devices have.

    Without bp devices all stages are zo. With `use_all` every device has a stage.
    """
    kinds = device_kinds(costs)
    bp = tuple(kind for kind in kinds if not kind.costs.zo)
    for group in [kinds] if use_all or len(bp) in (0, len(kinds)) else [bp, kinds]:
        counts, zo = tuple(len(kind.devices) for kind in group), tuple(kind.costs.zo for kind in group)
        most = min(costs.blocks, sum(counts))
        yield Pipelines(kinds=group, levels=chains(counts, zo, most=most, use_all=use_all))


def stage_steps(costs: PipelineCosts, searched: Pipelines, step: Callable[[int, Place], Step]) -> Steps:
    """Return the steps of every turn by level; `step` gives that of a kind in a place, and is asked once for each."""
    known: dict[tuple[int, Place], Step] = {}
    rows = []
    for behind, level in enumerate(searched.levels):
        row = []
        for turn in level.turns:
            place = _place(costs, searched.kinds[turn.kind].costs, turn, behind)
            if (turn.kind, place) not in known:
                known[turn.kind, place] = step(turn.kind, place)
            row.append(known[turn.kind, place])
        rows.append(row)
    return joined_steps(searched.levels, rows)


def _place(costs: PipelineCosts, device: DeviceCosts, turn: Turn, behind: int) -> Place:
    """Return the place of a stage with `behind` stages behind it."""
    in_flight = 0 if device.zo else min(behind + 1, costs.micro_batches)
    return Place(in_flight=in_flight, last=behind == 0, first_bp=turn.first_bp, exit=turn.exit)


def layout_of(chain: Chain, kinds: tuple[Kind, ...]) -> Layout:
    """Return a chain with devices: of each kind, the first ones in pipeline order."""
    left = [list(kind.devices) for kind in kinds]
    return tuple(Assignment(device=left[kind].pop(0), first=first, last=last) for kind, first, last in chain)
