"""Links between real processes over Gloo."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_hybridop.pipeline import links
from lightning_hybridop.pipeline.links import MeasuredLink, measure_links
from tests.distributed.harness import run_ranks

PAIRS = [(0, 1), (0, 2), (1, 2)]


def measured() -> tuple[list[MeasuredLink], int]:
    dist.init_process_group("gloo")
    done: list[int] = []
    table = measure_links(size_bytes=2**18, repeats=3, step=lambda: done.append(1))
    # Nothing of the measurement is left on the way: the next message is this one.
    token = torch.tensor([dist.get_rank()])
    dist.all_reduce(token)
    assert token.item() == 3
    return table, len(done)


@pytest.mark.distributed
def test_every_rank_gets_every_link() -> None:
    (table, steps), *others = run_ranks(measured, 3)

    assert [(link.first, link.second) for link in table] == PAIRS
    assert others == [(table, 3), (table, 3)]
    assert steps == 3
    for measured_link in table:
        # Any host's own sockets are faster than 50 Mbit/s and answer within 50 ms.
        assert 50 < measured_link.link.bandwidth_mbit_s < 1e7
        assert 0 < measured_link.link.latency_ms < 50


SLOW_LINK, LATENCY, BANDWIDTH = {0, 2}, 0.01, 100e6  # seconds, bits per second


def measured_with_a_slow_link() -> list[MeasuredLink]:
    real = dist.send

    def slow(message: torch.Tensor, peer: int) -> Any:
        if {dist.get_rank(), peer} == SLOW_LINK:
            time.sleep(LATENCY + message.numel() * 8 / BANDWIDTH)
        return real(message, peer)

    links.dist.send = slow  # type: ignore[assignment]
    dist.init_process_group("gloo")
    return measure_links(size_bytes=2**18, repeats=3)


@pytest.mark.distributed
def test_a_slow_link_is_told_from_the_others() -> None:
    table = run_ranks(measured_with_a_slow_link, 3)[0]
    by_pair = {(link.first, link.second): link.link for link in table}
    slow = by_pair.pop((0, 2))

    # The sockets' own time comes on top of what the link sleeps.
    assert 10 <= slow.latency_ms < 15
    assert 70 < slow.bandwidth_mbit_s < 105
    for link in by_pair.values():
        assert link.latency_ms < slow.latency_ms
        assert link.bandwidth_mbit_s > slow.bandwidth_mbit_s


def one_rank() -> list[MeasuredLink]:
    dist.init_process_group("gloo")
    return measure_links()


@pytest.mark.distributed
def test_one_process_has_no_links() -> None:
    assert run_ranks(one_rank, 1) == [[]]


def test_seconds_become_latency_and_bandwidth() -> None:
    link = links._link(0.002, 0.002 + 0.08, 10**6)

    assert link.latency_ms == pytest.approx(2.0)
    assert link.bandwidth_mbit_s == pytest.approx(100.0)


def test_a_large_message_that_was_as_fast_as_a_small_one_still_has_a_bandwidth() -> None:
    assert links._link(0.002, 0.001, 10**6).bandwidth_mbit_s == pytest.approx(80_000)
