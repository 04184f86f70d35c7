"""The planner's problem in plain Python: random instances, the cost of a layout written out, all layouts tried."""

import itertools
import random
from collections.abc import Iterator

from lightning_hybridop.planning.costs import Assignment, DeviceCosts, Layout, LinkTimes, PipelineCosts
from lightning_hybridop.planning.plan import Estimator


def random_costs(seed: int, *, blocks: int, devices: int, estimator: Estimator = "loss") -> PipelineCosts:
    """Draw costs: unlike blocks or equal ones, devices of one kind or none, all kinds of links, some without a layout."""
    draw = random.Random(seed)
    equal = draw.random() < 0.5
    kinds = [_random_device(draw, blocks, equal=equal) for _ in range(draw.randint(1, devices))]
    links = [[LinkTimes()] * devices for _ in range(devices)]
    whole_numbers, shared = draw.random() < 0.3, draw.random() < 0.5
    link = LinkTimes(transfer=draw.uniform(0, 0.5), latency=draw.uniform(0, 0.3))
    for a, b in itertools.combinations(range(devices), 2):
        if not shared:
            link = LinkTimes(transfer=draw.uniform(0, draw.choice([2, 20])), latency=draw.uniform(0, 1))
        # Whole numbers, so that many layouts are equally good.
        links[a][b] = links[b][a] = LinkTimes(transfer=1.0, latency=0.0) if whole_numbers else link
    return PipelineCosts(
        devices=tuple(DeviceCosts(name=f"device-{i}", **draw.choice(kinds)) for i in range(devices)),
        links=tuple(map(tuple, links)),
        micro_batches=draw.randint(1, 6),
        queries=draw.randint(0, 4),
        exit_queries=draw.randint(0, 2),
        exit_baseline=draw.random() < 0.5,
        tied_embeddings=draw.random() < 0.5,
        estimator=estimator,
        queries_per_forward=draw.randint(1, 3) if estimator == "boundary" else 1,
        hidden_bytes=0.0 if estimator == "loss" else draw.uniform(0, 0.2),
        float32_bytes=0.0 if estimator == "loss" else draw.uniform(0, 0.2),
    )


def _random_device(draw: random.Random, blocks: int, *, equal: bool) -> dict:
    def each(least: float, most: float) -> tuple[float, ...]:
        first = draw.uniform(least, most)
        return tuple(first if equal else draw.uniform(least, most) for _ in range(blocks))

    forward, slower = each(0.5, 3), draw.uniform(1, 3)
    return {
        "zo": draw.random() < 0.45,
        "forward": forward,
        "backward": tuple(slower * time for time in forward),
        "resident": each(0.5, 1.5),
        "kept": each(0, 0.5),
        "memory": draw.choice([float("inf"), draw.uniform(1, 2 * blocks)]),
        "embedding_forward": draw.choice([0.0, draw.uniform(0, 1)]),
        "embedding_resident": draw.choice([0.0, draw.uniform(0, 2)]),
        "head_forward": draw.choice([0.0, draw.uniform(0, 3)]),
        "head_backward": draw.choice([0.0, draw.uniform(0, 5)]),
        "head_resident": draw.uniform(0, 2),
        "head_kept": draw.uniform(0, 1),
    }


def every_layout(costs: PipelineCosts) -> Iterator[Layout]:
    """Yield every layout: all subsets and orders of devices with zo before bp, and a bp stage if there is a device for it."""
    devices = range(len(costs.devices))
    for count in range(1, min(costs.blocks, len(costs.devices)) + 1):
        for order in itertools.permutations(devices, count):
            zo = [costs.devices[device].zo for device in order]
            if any(later and not earlier for earlier, later in itertools.pairwise(zo)):
                continue
            if all(zo) and not all(device.zo for device in costs.devices):
                continue
            for cuts in itertools.combinations(range(1, costs.blocks), count - 1):
                bounds = itertools.pairwise((0, *cuts, costs.blocks))
                yield tuple(
                    Assignment(device=device, first=first, last=last)
                    for device, (first, last) in zip(order, bounds, strict=True)
                )


def needs(costs: PipelineCosts, layout: Layout) -> list[float]:
    """Return the bytes that every stage of a layout needs."""
    zo_stages = sum(costs.devices[part.device].zo for part in layout)
    found = []
    for index, part in enumerate(layout):
        device = costs.devices[part.device]
        head = index == len(layout) - 1 or (costs.exit_queries > 0 and index == zo_stages - 1)
        need = sum(device.resident[part.first : part.last])
        if index == 0 and not (costs.tied_embeddings and head):
            need += device.embedding_resident
        need += device.head_resident * head
        if device.zo:
            found.append(need + device.head_kept * head + _waiting(costs, last=index == zo_stages - 1))
        else:
            kept = sum(device.kept[part.first : part.last]) + device.head_kept * head
            found.append(need + min(costs.micro_batches, len(layout) - index) * kept)
    return found


def _waiting(costs: PipelineCosts, *, last: bool) -> float:
    """Return the bytes of hidden states that a zo stage keeps."""
    if costs.estimator == "loss" or (costs.estimator == "boundary" and costs.queries == 0):
        return 0.0
    if costs.estimator == "adjoint":
        return costs.micro_batches * costs.hidden_bytes
    group = min(costs.queries_per_forward, costs.queries)
    if not last:
        return 8 * group * costs.hidden_bytes
    # Of each micro-batch the unperturbed hidden state, the gradient, and perturbed ones.
    return costs.micro_batches * (costs.hidden_bytes + (1 + group) * costs.float32_bytes)


def lacks(costs: PipelineCosts, layout: Layout) -> list[float]:
    """Return how many bytes every stage of a layout lacks, 0 where it fits."""
    return [
        max(0.0, need - costs.devices[part.device].memory)
        for need, part in zip(needs(costs, layout), layout, strict=True)
    ]


def values(costs: PipelineCosts, layout: Layout) -> dict[str, float]:
    """Return the iteration time of a layout by both objectives, every action of a mini-batch counted by hand."""
    m = costs.micro_batches
    devices = [costs.devices[part.device] for part in layout]
    zo = [device.zo for device in devices]
    q = costs.queries if any(zo) and costs.estimator != "adjoint" else 0
    last, exit_stage = len(layout) - 1, sum(zo) - 1
    forward, backward, exits = [], [], []
    for index, (part, device) in enumerate(zip(layout, devices, strict=True)):
        blocks = sum(device.forward[i] for i in range(part.first, part.last))
        body = blocks + (device.embedding_forward if index == 0 else 0)
        forward.append(body + (device.head_forward if index == last else 0))
        one = sum(device.backward[i] for i in range(part.first, part.last))
        adjoint = 2.2 * blocks if costs.estimator == "adjoint" else 0
        backward.append(adjoint if device.zo else one + (device.head_backward if index == last else 0))
        leaving = body + (device.head_forward if index == exit_stage else 0)
        baseline = leaving if index == exit_stage and costs.exit_baseline else 0
        exits.append(m * (costs.exit_queries * leaving + baseline) if costs.exit_queries else 0)
    links = [costs.links[a.device][b.device] for a, b in itertools.pairwise(layout)]
    goes_back = [index for index in range(len(layout)) if not zo[index] or costs.estimator == "adjoint"]
    through = sum(forward)
    far = q if costs.estimator == "loss" else 0

    first_order = through + sum(backward)
    if goes_back:
        first_order += (m - 1) * max(forward[i] + backward[i] for i in goes_back)
        if any(zo):
            first_order += m * far * forward[exit_stage + 1 if exit_stage < last else last]
        paper = first_order
    else:
        paper = through + (m * (1 + q) - 1) * max(forward)
    arrivals = [link.transfer + link.latency for link in links]
    first_order += sum(time * (2 if index in goes_back else 1) for index, time in enumerate(arrivals))

    work = [m * (1 + far) * f - f + m * b for f, b in zip(forward, backward, strict=True)]
    busiest = max(work + [(m * (1 + far) - 1) * link.transfer for link in links])
    largest = [first_order, through + sum(arrivals) + busiest]
    if any(zo) and costs.estimator != "adjoint":
        to_exit = sum(forward[: exit_stage + 1])
        passes = [(m * (1 + q) - 1) * f for f in forward[: exit_stage + 1]]
        if costs.estimator == "boundary":
            paper = max(paper if goes_back else through, to_exit + max(passes))
        sent = m * (1 + q + costs.exit_queries) - 1 if costs.estimator == "boundary" else 0
        largest.append(
            to_exit
            + sum(arrivals[:exit_stage])
            + max(
                [x + y for x, y in zip(passes, exits, strict=False)]
                + [sent * link.transfer for link in links[:exit_stage]]
            )
        )
    return {"makespan": max(largest), "paper": paper}
