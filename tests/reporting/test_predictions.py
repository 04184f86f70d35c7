import pytest

from lightning_hybridop.reporting.predictions import comparison_rows
from lightning_hybridop.simulation.compare import MethodResult
from lightning_hybridop.simulation.simulator import DeviceFigures, Simulation


def result(method: str, seconds: float | None, *, with_npus: bool) -> MethodResult:
    if seconds is None:
        return MethodResult(method=method, with_npus=with_npus, reason="nothing fits")
    figures = DeviceFigures(name="board", busy=seconds, idle=0.0, memory=2e9)
    simulation = Simulation(timeline=(), transfers=(), collectives=(), devices=(figures,), makespan=seconds)
    return MethodResult(method=method, with_npus=with_npus, simulation=simulation)


@pytest.mark.parametrize(("with_npus", "ratios"), [(4.0, [1.5, 1.0, 2.0]), (None, [0.75, None, 1.0])])
def test_ratios_are_to_hybridop_with_npus_or_else_without(
    with_npus: float | None, ratios: list[float | None]
) -> None:
    rows = comparison_rows(
        [
            result("GPipe", 6.0, with_npus=False),
            result("HybridOP", with_npus, with_npus=True),
            result("HybridOP", 8.0, with_npus=False),
        ]
    )

    assert [row["ratio"] for row in rows] == ratios
    assert [row["peak_memory_gb"] for row in rows][::2] == [2.0, 2.0]
