"""Costs that are easy to work out by hand, and laws that every first-order method obeys."""

from hypothesis import strategies as st

from lightning_hybridop.planning.costs import DeviceCosts, LinkTimes, PipelineCosts
from lightning_hybridop.simulation.program import Program, Task
from lightning_hybridop.simulation.simulator import simulate


def device(
    name: str,
    *,
    blocks: int,
    speed: float = 1.0,
    zo: bool = False,
    memory: float = float("inf"),
    resident: float = 0.0,
    kept: float = 1.0,
    ends: float = 0.0,
) -> DeviceCosts:
    """Return a device whose blocks take 1 / speed forward and 2 / speed backward; `ends` scales embedding and head."""
    return DeviceCosts(
        name=name,
        zo=zo,
        forward=(1 / speed,) * blocks,
        backward=(2 / speed,) * blocks,
        resident=(resident,) * blocks,
        kept=(kept,) * blocks,
        memory=memory,
        embedding_resident=100 * ends,
        head_forward=ends / speed,
        head_backward=2 * ends / speed,
        head_resident=100 * ends,
        head_kept=10 * ends,
    )


def cluster_costs(
    devices: list[DeviceCosts],
    *,
    micro_batches: int = 4,
    queries: int = 1,
    exit_queries: int = 0,
    rows: float = 1.0,
    transfer: float = 0.0,
    latency: float = 0.0,
    hidden_bytes: float = 1.0,
    adapter_bytes: float = 0.0,
    tied_embeddings: bool = False,
) -> PipelineCosts:
    """Return the costs of devices with one link between any two of them."""
    everyone = range(len(devices))
    link = LinkTimes(transfer=transfer, latency=latency)
    return PipelineCosts(
        devices=tuple(devices),
        links=tuple(tuple(LinkTimes() if a == b else link for b in everyone) for a in everyone),
        micro_batches=micro_batches,
        queries=queries,
        exit_queries=exit_queries,
        rows=rows,
        hidden_bytes=hidden_bytes,
        adapter_bytes=adapter_bytes,
        tied_embeddings=tied_embeddings,
    )


def equal(count: int, *, blocks: int, **fields: float) -> list[DeviceCosts]:
    return [device(f"gpu-{index}", blocks=blocks, **fields) for index in range(count)]  # type: ignore[arg-type]


@st.composite
def first_order_costs(draw: st.DrawFn) -> PipelineCosts:
    """Draw 2 to 5 devices of mixed speed, some of which only run forward elsewhere, with links and head."""
    blocks = draw(st.integers(5, 7))
    ends = draw(st.sampled_from([0.0, 0.5]))
    devices = [
        device(
            f"device-{index}",
            blocks=blocks,
            speed=draw(st.sampled_from([0.5, 1.0, 4.0])),
            zo=draw(st.booleans()),
            ends=ends,
        )
        for index in range(draw(st.integers(2, 5)))
    ]
    return cluster_costs(
        devices,
        micro_batches=draw(st.integers(1, 6)),
        rows=draw(st.sampled_from([1.0, 2.0, 4.0])),
        transfer=draw(st.sampled_from([0.0, 0.3])),
        latency=draw(st.sampled_from([0.0, 0.1])),
        adapter_bytes=draw(st.sampled_from([0.0, 0.2])),
    )


def check_first_order(costs: PipelineCosts, program: Program) -> None:
    """Check that a program does all work once, gives back all memory, and is no faster than its devices together.

    Costs must be those of `device`: a device of speed s takes 1 / s of what one of speed 1 would.
    """
    speeds = {each.name: 1 / each.forward[0] for each in costs.devices}
    model = 3 * (costs.blocks + costs.devices[0].head_forward * speeds[costs.devices[0].name])
    work = costs.micro_batches * model
    simulation = simulate(program)
    done = sum(each.busy * speeds[each.name] for each in simulation.devices)
    assert abs(done - work) < 1e-9 * work
    assert simulation.makespan >= work / sum(speeds[name] for name in program.devices) - 1e-9
    for index in range(len(program.devices)):
        own = [task for task in program.tasks if isinstance(task, Task) and task.device == index]
        assert abs(sum(task.holds for task in own) - sum(task.releases for task in own)) < 1e-9
    assert len(set(program.devices)) == len(program.devices)
