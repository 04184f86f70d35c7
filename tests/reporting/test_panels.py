from pathlib import Path

import pytest

from lightning_hybridop.reporting.panels import Panel, draw_panels
from lightning_hybridop.schedules.timeline import Timeline


def test_a_picture_of_every_panel_is_drawn(timeline: Timeline, tmp_path: Path) -> None:
    one = Panel(title="GPipe", devices=("a", "b"), timeline=timeline)
    other = Panel(title="AccPar", devices=("a", "b"), timeline=timeline, collectives=((0, 50.2, 60.0),))
    draw_panels([one], tmp_path / "new" / "one.png")
    draw_panels([one, other], tmp_path / "two.png")

    for name in ("new/one.png", "two.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "two.png").stat().st_size > (tmp_path / "new" / "one.png").stat().st_size
    assert other.end == 60.0


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="There is nothing to draw"):
        draw_panels([], tmp_path / "none.png")
