import pytest

from lightning_hybridop.pipeline.measured import figures
from lightning_hybridop.planning.plan import Figures


def test_the_median_leaves_out_the_first_mini_batch() -> None:
    # start, end, busy of four mini-batches on two stages; makespans 100, 4, 10, 6.
    first = [0.0, 90.0, 1.0, 100.0, 103.0, 3.0, 200.0, 208.0, 4.0, 300.0, 306.0, 6.0]
    second = [1.0, 100.0, 1.0, 101.0, 104.0, 1.0, 202.0, 210.0, 6.0, 301.0, 305.0, 3.0]

    measured = figures([first, second], [10, 20])

    assert measured.iteration_seconds == 6.0
    # (3 + 1) / 8, (4 + 6) / 20, (6 + 3) / 12
    assert measured.comu_ti == pytest.approx(0.5)
    assert measured.memory_mib == (10.0, 20.0)


def test_a_single_mini_batch_is_better_than_none() -> None:
    assert figures([[2.0, 5.0, 1.5]], [1.0]) == Figures(iteration_seconds=3.0, comu_ti=0.5, memory_mib=(1.0,))
