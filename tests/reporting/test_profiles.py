from rich.console import Console, RenderableType

from lightning_hybridop.planning.cluster import Link
from lightning_hybridop.reporting.profiles import TimedPart, links_table, profile_table


def lines(table: RenderableType) -> list[list[str]]:
    """Return the words of each line of a table."""
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return [line.split() for line in capture.get().splitlines() if line.strip()]


def test_rates_follow_from_seconds_and_a_backward_has_twice_the_flops() -> None:
    part = TimedPart(name="block", forward=0.002, backward=0.008, flops=6e9)

    table = lines(profile_table([part], title="tiny", memory_bytes=5.25e9, activation_bytes=12_345))
    assert table[0] == ["tiny"]
    assert ["block", "2.000", "3.0000", "8.000", "1.5000"] in table
    memory = " ".join(table[-1])
    assert memory == "Memory for a process 5.2 GB; activations that a block keeps 12.3 kB per token."


def test_what_was_not_measured_is_a_dash() -> None:
    npu = TimedPart(name="block", forward=0.002, backward=None, flops=6e9)
    embedding = TimedPart(name="embedding", forward=0.001, backward=None, flops=0)

    table = lines(profile_table([npu, embedding], title="npu", memory_bytes=4e9, activation_bytes=None))
    assert ["block", "2.000", "3.0000", "–", "–"] in table
    assert ["embedding", "1.000", "–", "–", "–"] in table
    assert "activations that a block keeps – per token" in " ".join(table[-1])


def test_links() -> None:
    link = Link(bandwidth_mbit_s=12_345.6, latency_ms=0.125)

    table = lines(links_table([("rank 0", "rank 2", link)]))
    assert table[-1] == ["rank", "0", "and", "rank", "2", "12,346", "0.12"]
