"""The cost model: the paper's equations under their names, and what a cluster and a workload make of them.

Times are in seconds, sizes in bytes. Equations take one `StageTimes` per stage, in pipeline order.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_hybridop.planning.cluster import BYTES_PER_GB, Cluster, ClusterError, Device, DeviceProfile
from lightning_hybridop.planning.plan import PERTURBED_AHEAD, Estimator, Role, WireName
from lightning_hybridop.planning.workload import DTYPE_BYTES, PartCosts, Workload, WorkloadError

# A vector-Jacobian product as a graph of inference operators takes this many times its forward: measured once, on six
# blocks of SmolLM2.
ADJOINT_FORWARDS = 2.2


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """How long one micro-batch occupies one stage, in seconds.

    `exit_forward` is an early-exit forward: on the exit stage it runs the head as well. `baseline_forward` is the
    unperturbed one there, 0 on all other stages.
    """

    role: Role
    forward: float
    backward: float = 0.0
    exit_forward: float = 0.0
    baseline_forward: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """How long one micro-batch's hidden state keeps a link busy, and the latency behind that.

    `gradient` is how long a gradient that comes back does; None: as long.
    """

    transfer: float = 0.0
    latency: float = 0.0
    gradient: float | None = None

    @property
    def back(self) -> float:
        """Seconds that a gradient keeps the link busy on its way back."""
        return self.transfer if self.gradient is None else self.gradient

    @property
    def arrival(self) -> float:
        """Seconds from the start of a transfer over an idle link to its arrival."""
        return self.transfer + self.latency


# The paper's equations. Roles other than bp stand for D_N, the stages that only run forward.


def gpipe_time(stages: Sequence[StageTimes], *, micro_batches: int) -> float:
    """Return `T_gpipe = sum (t + b) + (M - 1) max (t + b)`; with b = 2 t the paper's `3 (sum t + (M - 1) max t)`."""
    both = [stage.forward + stage.backward for stage in stages]
    return sum(both) + (micro_batches - 1) * max(both)


def tail_time(stages: Sequence[StageTimes], *, micro_batches: int, queries: int) -> float:
    """Return the paper's `T_tail = sum_G (t + b) + sum_N t + ((1 + Q) M - 1) max_N t`: zo stages behind the bp stages."""
    zo, bp = _by_role(stages)
    slowest = max((stage.forward for stage in zo), default=0.0)
    return (
        sum(stage.forward + stage.backward for stage in bp)
        + sum(stage.forward for stage in zo)
        + ((1 + queries) * micro_batches - 1) * slowest
    )


def head_time(stages: Sequence[StageTimes], *, micro_batches: int, queries: int) -> float:
    """Return the paper's `T_head = sum_N t + sum_G (t + b) + (M - 1) max_G (t + b) + M Q t*`.

    t* is the forward time of the first bp stage. Without zo stages nothing is perturbed and the last term vanishes;
    without bp stages only the `zo_bound` means anything.
    """
    zo, bp = _by_role(stages)
    both = [stage.forward + stage.backward for stage in bp]
    perturbed = micro_batches * queries * bp[0].forward if zo and bp else 0.0
    slowest = max(both, default=0.0)
    return sum(stage.forward for stage in zo) + sum(both) + (micro_batches - 1) * slowest + perturbed


def zo_bound(stages: Sequence[StageTimes], *, micro_batches: int, queries: int) -> float:
    """Return `sum t + ((1 + Q) M - 1) max_N t`: the slowest zo stage runs all its forwards, the last one drains.

    The published `T_head` lacks it; an event simulation gives it exactly where it exceeds `T_head`.
    """
    zo, _ = _by_role(stages)
    slowest = max((stage.forward for stage in zo), default=0.0)
    return sum(stage.forward for stage in stages) + ((1 + queries) * micro_batches - 1) * slowest


def boundary_time(stages: Sequence[StageTimes], *, micro_batches: int, queries: int) -> float:
    """Return the iteration time with the boundary estimator: perturbed forwards end at the last zo stage.

    The larger of `T_head` at Q = 0 and `sum_N t + ((1 + Q) M - 1) max_N t`.
    """
    zo, _ = _by_role(stages)
    perturbed = zo_bound(zo, micro_batches=micro_batches, queries=queries)
    return max(head_time(stages, micro_batches=micro_batches, queries=0), perturbed)


def adjoint_time(stages: Sequence[StageTimes], *, micro_batches: int) -> float:
    """Return the iteration time with the exact adjoint: `T_gpipe` with `b = 2.2 t` on zo stages."""
    exact = [
        stage
        if stage.role == "bp"
        else StageTimes(role=stage.role, forward=stage.forward, backward=ADJOINT_FORWARDS * stage.forward)
        for stage in stages
    ]
    return gpipe_time(exact, micro_batches=micro_batches)


def makespan_estimate(
    stages: Sequence[StageTimes],
    links: Sequence[LinkTimes],
    *,
    micro_batches: int,
    queries: int,
    exit_queries: int = 0,
    estimator: Estimator = "loss",
) -> float:
    """Return the iteration time that the planner minimises by default: the largest of three.

    * `T_head`, plus the arrival of one hidden state over every link and of one gradient between bp stages;
    * one forward through all stages and links, plus what the busiest stage or link does beyond its first forward:
      M (1 + Q) forwards (and M backwards on a bp stage), M (1 + Q) transfers;
    * one forward through the zo stages, plus all that the busiest zo stage does beyond it, early exits included.

    `links[i]` lies between stages i and i + 1. With equal zo stages, without transfers and exits, this is the larger
    of `T_head` and `zo_bound`. With the boundary estimator Q is 0 in the first two, and links between zo stages count in
    the third: so that it is `boundary_time` without transfers and exits. With adjoints zo stages count as bp stages.
    """
    if estimator == "adjoint":
        stages = [dataclasses.replace(stage, role="bp") for stage in stages]
    zo, _ = _by_role(stages)
    to_the_end = queries if estimator == "loss" else 0
    passes = (1 + to_the_end if zo else 1) * micro_batches
    crossing = sum(link.arrival for link in links)
    back = sum(
        link.back + link.latency for before, link in zip(stages, links, strict=False) if before.role == "bp"
    )
    first_order = head_time(stages, micro_batches=micro_batches, queries=to_the_end) + crossing + back
    busiest = max(
        [
            stage_work(stage, micro_batches=micro_batches, queries=passes // micro_batches - 1)
            for stage in stages
        ]
        + [(passes - 1) * link.transfer for link in links]
    )
    through = sum(stage.forward for stage in stages) + crossing
    among_zo = links[: max(0, len(zo) - 1)]
    on_zo = max(
        (
            stage_work(stage, micro_batches=micro_batches, queries=queries)
            + micro_batches * (exit_queries * stage.exit_forward + stage.baseline_forward)
            for stage in zo
        ),
        default=0.0,
    )
    if estimator == "boundary":
        sent = micro_batches * (1 + queries + exit_queries) - 1
        on_zo = max([on_zo, *(sent * link.transfer for link in among_zo)])
    to_exit = sum(stage.forward for stage in zo) + sum(link.arrival for link in among_zo)
    return max(first_order, through + busiest, to_exit + on_zo)


def stage_work(stage: StageTimes, *, micro_batches: int, queries: int) -> float:
    """Return the busy time of a stage beyond its first forward, early exits not included."""
    return (micro_batches * (1 + queries) - 1) * stage.forward + micro_batches * stage.backward


def paper_estimate(
    stages: Sequence[StageTimes], *, micro_batches: int, queries: int, estimator: Estimator = "loss"
) -> float:
    """Return the planner's objective as published: `T_head`; for zo stages alone, where it says nothing, `zo_bound`.

    For estimators that the paper does not have it is `boundary_time`, and `T_gpipe` over all stages.
    """
    if estimator == "boundary":
        return boundary_time(stages, micro_batches=micro_batches, queries=queries)
    if estimator == "adjoint":
        return gpipe_time(stages, micro_batches=micro_batches)
    if all(stage.role != "bp" for stage in stages):
        return zo_bound(stages, micro_batches=micro_batches, queries=queries)
    return head_time(stages, micro_batches=micro_batches, queries=queries)


def zo_memory(*, frozen: float, trained: float) -> float:
    """Return a zo stage's memory, `l1 |Theta| + (l2 + l3) |theta|`, from its two parts in bytes."""
    return frozen + trained


def bp_memory(*, frozen: float, trained: float, activations: float, in_flight: int) -> float:
    """Return a bp stage's memory, `l1 |Theta| + (l2 + l3) |theta| + l4 (|D_G| - i) |Theta|`.

    `activations` are those of one micro-batch, `in_flight` is `|D_G| - i`.
    """
    return zo_memory(frozen=frozen, trained=trained) + in_flight * activations


def _by_role(stages: Sequence[StageTimes]) -> tuple[list[StageTimes], list[StageTimes]]:
    return (
        [stage for stage in stages if stage.role != "bp"],
        [stage for stage in stages if stage.role == "bp"],
    )


# What a cluster and a workload make of them.


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCosts:
    """What one micro-batch costs on one device: seconds and bytes of each block, and of embedding and head.

    `resident` are the bytes that a block takes for good (frozen weights, adapters and their optimizer), `kept` those
    of one micro-batch between its forward and its backward. `memory` is what the device has. `zo` says that it only
    runs forward.
    """

    name: str
    zo: bool
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    resident: tuple[float, ...]
    kept: tuple[float, ...]
    memory: float = float("inf")
    embedding_forward: float = 0.0
    embedding_resident: float = 0.0
    head_forward: float = 0.0
    head_backward: float = 0.0
    head_resident: float = 0.0
    head_kept: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCosts:
    """What the planner knows: every device's costs, and `links[a][b]` between devices a and b (symmetric).

    `rows` are those of one micro-batch, `hidden_bytes` is the size of its hidden state, `float32_bytes` that in float32;
    `links` are the times of it and of its gradient as they travel with `wire`. `adapter_bytes` is the size of one block's
    adapter gradients. `exit_baseline` says that early exits cost one more forward of the exit stage. `queries_per_forward`
    is a plan's.
    With tied embeddings a device that has both embedding and head holds the matrix once.
    """

    devices: tuple[DeviceCosts, ...]
    links: tuple[tuple[LinkTimes, ...], ...]
    micro_batches: int
    queries: int
    exit_queries: int = 0
    exit_baseline: bool = True
    estimator: Estimator = "loss"
    queries_per_forward: int = 1
    tied_embeddings: bool = False
    rows: float = 1.0
    wire: WireName | None = None
    hidden_bytes: float = 0.0
    float32_bytes: float = 0.0
    adapter_bytes: float = 0.0

    @property
    def blocks(self) -> int:
        """Number of blocks to lay out."""
        return len(self.devices[0].forward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One stage of a layout: the blocks `[first, last)` on the device of that index."""

    device: int
    first: int
    last: int


Layout = tuple[Assignment, ...]
"""The stages of a pipeline in order: zo devices before bp devices, every block once."""


def layout_times(
    costs: PipelineCosts, layout: Sequence[Assignment]
) -> tuple[tuple[StageTimes, ...], tuple[LinkTimes, ...]]:
    """Return the times of each stage of a layout and of each link between neighbours.

    The first stage has the embedding, the last one the head; with exit queries the last zo stage has a head as well.
    A zo stage goes back only with adjoints, in `ADJOINT_FORWARDS` forwards of its blocks.
    """
    last_zo = max((i for i, part in enumerate(layout) if costs.devices[part.device].zo), default=-1)
    stages = []
    for index, part in enumerate(layout):
        device = costs.devices[part.device]
        forward = sum(device.forward[part.first : part.last])
        if not device.zo:
            backward = sum(device.backward[part.first : part.last])
        else:
            backward = ADJOINT_FORWARDS * forward if costs.estimator == "adjoint" else 0.0
        if index == 0:
            forward += device.embedding_forward
        exit_forward = forward if index <= last_zo else 0.0
        baseline = 0.0
        if index == len(layout) - 1:
            forward += device.head_forward
            backward += 0.0 if device.zo else device.head_backward
        if index == last_zo and costs.exit_queries:
            exit_forward += device.head_forward
            if costs.exit_baseline:
                baseline = exit_forward
        stages.append(
            StageTimes(
                role="zo" if device.zo else "bp",
                forward=forward,
                backward=backward,
                exit_forward=exit_forward,
                baseline_forward=baseline,
            )
        )
    links = tuple(costs.links[before.device][after.device] for before, after in itertools.pairwise(layout))
    return tuple(stages), links


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """What a stage holds, in bytes: for good, and of one micro-batch between its forward and its backward.

    Of what a zo stage keeps for its estimator, `kept` is the hidden state in the stage's own dtype alone.
    """

    resident: float
    kept: float = 0.0


def layout_bytes(costs: PipelineCosts, layout: Sequence[Assignment]) -> tuple[StageBytes, ...]:
    """Return what each stage of a layout holds, with embedding and head where they are."""
    last_zo = max((i for i, part in enumerate(layout) if costs.devices[part.device].zo), default=-1)
    held = []
    for index, part in enumerate(layout):
        device = costs.devices[part.device]
        resident = sum(device.resident[part.first : part.last])
        kept = sum(device.kept[part.first : part.last])
        has_head = index == len(layout) - 1 or (index == last_zo and costs.exit_queries > 0)
        if index == 0 and not (has_head and costs.tied_embeddings):
            resident += device.embedding_resident
        if has_head:
            resident += device.head_resident
        if device.zo:
            # Logits exist while the head runs, and nothing is kept behind it.
            hidden = costs.hidden_bytes if costs.estimator != "loss" else 0.0
            held.append(StageBytes(resident=resident + (device.head_kept if has_head else 0.0), kept=hidden))
            continue
        if has_head:
            kept += device.head_kept
        held.append(StageBytes(resident=resident, kept=kept))
    return tuple(held)


def waiting_bytes(costs: PipelineCosts, *, exit_stage: bool) -> float:
    """Return the most bytes of hidden states that a zo stage keeps for its estimator.

    At the boundary the last zo stage, the `exit_stage`, keeps those of M micro-batches, as many gradients, and as many
    groups of perturbed ones that wait for their gradient, the latter two in float32; another one has up to
    `PERTURBED_AHEAD` groups on their way to the next stage. With adjoints what came in is kept until the gradient comes.
    """
    if costs.estimator == "adjoint":
        return costs.micro_batches * costs.hidden_bytes
    if costs.estimator == "loss" or costs.queries == 0:
        return 0.0
    together = min(costs.queries_per_forward, costs.queries)
    if exit_stage:
        return costs.micro_batches * (costs.hidden_bytes + (1 + together) * costs.float32_bytes)
    return PERTURBED_AHEAD * together * costs.hidden_bytes


def layout_memory(costs: PipelineCosts, layout: Sequence[Assignment]) -> tuple[float, ...]:
    """Return the bytes that each stage needs: `zo_memory` or `bp_memory`, with embedding and head where they are.

    A zo stage also keeps `waiting_bytes`. A bp stage never holds more micro-batches than there are.
    """
    last_zo = max((i for i, part in enumerate(layout) if costs.devices[part.device].zo), default=-1)
    needs = []
    for index, (part, held) in enumerate(zip(layout, layout_bytes(costs, layout), strict=True)):
        if costs.devices[part.device].zo:
            waiting = waiting_bytes(costs, exit_stage=index == last_zo)
            needs.append(zo_memory(frozen=held.resident, trained=0.0) + waiting)
            continue
        in_flight = min(len(layout) - index, costs.micro_batches)
        needs.append(bp_memory(frozen=held.resident, trained=0.0, activations=held.kept, in_flight=in_flight))
    return tuple(needs)


Objective = Literal["makespan", "paper"]


def layout_value(costs: PipelineCosts, layout: Sequence[Assignment], objective: Objective) -> float:
    """Return the iteration time of a layout by one of the planner's objectives, in seconds."""
    stages, links = layout_times(costs, layout)
    if objective == "paper":
        return paper_estimate(
            stages, micro_batches=costs.micro_batches, queries=costs.queries, estimator=costs.estimator
        )
    return makespan_estimate(
        stages,
        links,
        micro_batches=costs.micro_batches,
        queries=costs.queries,
        exit_queries=costs.exit_queries,
        estimator=costs.estimator,
    )


def pipeline_costs(
    cluster: Cluster,
    workload: Workload,
    *,
    micro_batches: int,
    queries: int,
    exit_queries: int = 0,
    exit_baseline: bool = True,
    estimator: Estimator = "loss",
    queries_per_forward: int = 1,
) -> PipelineCosts:
    """Return what one micro-batch of the workload costs on every device of the cluster.

    A forward takes as long as its arithmetic at the device's rate, or as reading its weights at the device's memory
    bandwidth, whichever is longer; a backward, whose rate counts two forwards' worth of FLOPs as the paper does,
    likewise. Raises ClusterError for a figure that is needed and unknown, and WorkloadError for micro-batches that the
    mini-batch cannot be cut into.
    """
    whole = isinstance(micro_batches, int) and not isinstance(micro_batches, bool)
    if not whole or not 1 <= micro_batches <= workload.rows:
        raise WorkloadError(
            f"micro_batches: found {micro_batches!r}, expected a whole number from 1 to {workload.rows}, the rows of the "
            "mini-batch."
        )
    devices = tuple(_device_costs(device, cluster, workload, micro_batches) for device in cluster.devices)
    # Where the rows cannot be cut evenly, the largest micro-batch sets the pace and the memory.
    rows = math.ceil(workload.rows / micro_batches)
    block = workload.block(rows)
    size = block.output_bytes
    links = tuple(
        tuple(_link_times(cluster, a, b, workload, rows) for b in cluster.devices) for a in cluster.devices
    )
    return PipelineCosts(
        devices=devices,
        links=links,
        micro_batches=micro_batches,
        queries=queries,
        exit_queries=exit_queries,
        exit_baseline=exit_baseline,
        estimator=estimator,
        queries_per_forward=queries_per_forward,
        tied_embeddings=workload.architecture.tied_embeddings,
        rows=rows,
        wire=workload.wire,
        hidden_bytes=size,
        float32_bytes=size * 4 / DTYPE_BYTES[workload.dtype],
        adapter_bytes=4.0 * block.trainable_parameters,
    )


def _link_times(
    cluster: Cluster, first: Device, second: Device, workload: Workload, rows: float
) -> LinkTimes:
    if first.name == second.name:
        return LinkTimes()
    link = cluster.link_between(first.name, second.name)
    transfer = link.seconds(workload.hidden_wire_bytes(rows))
    back = link.seconds(workload.gradient_wire_bytes(rows))
    return LinkTimes(transfer=transfer, latency=link.latency, gradient=None if back == transfer else back)


def _device_costs(device: Device, cluster: Cluster, workload: Workload, micro_batches: int) -> DeviceCosts:
    profile = device.profile
    if profile.memory_gb is None:
        raise ClusterError(
            f"{device.name}: its memory is unknown; set memory_gb in the cluster's entry for {profile.name}."
        )
    rows = math.ceil(workload.rows / micro_batches)
    block, embedding, head = workload.block(rows), workload.embedding(rows), workload.head(rows)
    blocks = workload.architecture.blocks
    zo = profile.forward_only or not profile.backward_tflops
    forward_rates = profile.forward_tflops
    head_rates = profile.head_forward_tflops or forward_rates
    head_backward_rates = profile.head_backward_tflops or profile.backward_tflops
    forward = _seconds(profile, "forward", forward_rates, block, workload.dtype, passes=1)
    can_go_back = bool(profile.backward_tflops)
    backward = (
        _seconds(profile, "backward", profile.backward_tflops, block, workload.dtype, passes=2)
        if can_go_back
        else 0.0
    )
    return DeviceCosts(
        name=device.name,
        zo=zo,
        forward=(forward,) * blocks,
        backward=(backward,) * blocks,
        resident=(block.parameter_bytes + block.trained_bytes,) * blocks,
        kept=(block.activation_bytes,) * blocks,
        memory=profile.memory_gb * BYTES_PER_GB * cluster.usable_memory,
        embedding_resident=embedding.parameter_bytes,
        head_forward=_seconds(profile, "forward", head_rates, head, workload.dtype, passes=1),
        head_backward=(
            _seconds(profile, "backward", head_backward_rates, head, workload.dtype, passes=2)
            if can_go_back
            else 0.0
        ),
        head_resident=head.parameter_bytes,
        head_kept=head.activation_bytes,
    )


def _seconds(
    profile: DeviceProfile, what: str, rates: Mapping[str, float], part: PartCosts, dtype: str, *, passes: int
) -> float:
    """Return the time of `passes` forwards' worth of arithmetic or of reading the weights as often."""
    rate = rates.get(dtype)
    if rate is None:
        known = ", ".join(rates) or "none"
        raise ClusterError(
            f"{profile.name}: its {what} rate in {dtype} is unknown (known: {known}); set {what}_tflops.{dtype}, choose "
            "another dtype, or measure the device with `hybridop profile`."
        )
    arithmetic = passes * part.forward_flops / (rate * 1e12 * (profile.efficiency or 1.0))
    if profile.memory_bandwidth_gb_s is None:
        return arithmetic
    return max(arithmetic, passes * part.parameter_bytes / (profile.memory_bandwidth_gb_s * BYTES_PER_GB))
