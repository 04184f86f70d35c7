import builtins
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_hybridop.planning.plan import Plan
from lightning_hybridop.reporting.gantt import COLOURS, draw_timeline
from lightning_hybridop.schedules.actions import Action, Kind
from lightning_hybridop.schedules.timeline import TimedAction, Timeline


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved during a test."""
    from matplotlib.figure import Figure

    saved: list[Any] = []
    save = Figure.savefig

    def spy(figure: Any, *args: Any, **kwargs: Any) -> None:
        saved.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", spy)
    return saved


def bars(figure: Any, kind: Kind) -> list[tuple[float, float, int]]:
    """Return (start ms, end ms, row) of the bars that were drawn in a kind's colour."""
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgba

    found = []
    for collection in figure.axes[0].collections:
        if isinstance(collection, PolyCollection) and tuple(collection.get_facecolor()[0]) == to_rgba(
            COLOURS[kind]
        ):
            for path in collection.get_paths():
                box = path.get_extents()
                found.append((round(box.x0, 6), round(box.x1, 6), round((box.y0 + box.y1) / 2)))
    return sorted(found)


def test_writes_a_png_and_its_folder(plan: Plan, timeline: Timeline, tmp_path: Path) -> None:
    path = tmp_path / "new" / "timeline.png"
    draw_timeline(timeline, plan, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_every_action_is_one_bar_in_its_row_and_colour(
    plan: Plan, timeline: Timeline, tmp_path: Path, figures: list[Any]
) -> None:
    draw_timeline(timeline, plan, tmp_path / "a.png")
    assert bars(figures[0], Kind.FORWARD) == [(0, 2, 0), (2, 4, 1)]
    assert bars(figures[0], Kind.BACKWARD) == [(4, 8, 1)]
    assert bars(figures[0], Kind.PERTURBED) == [(2, 4, 0), (9, 10, 1)]
    assert bars(figures[0], Kind.EXIT) == [(4, 6, 0)]


def test_a_gradient_that_takes_no_time_has_no_bar_and_the_estimator_is_named(
    plan: Plan, timeline: Timeline, tmp_path: Path, figures: list[Any]
) -> None:
    gradient = TimedAction(
        stage=0, action=Action(kind=Kind.BACKWARD, micro_batch=0), start=50.008, end=50.008
    )
    draw_timeline((*timeline, gradient), replace(plan, estimator="boundary"), tmp_path / "a.png")
    assert bars(figures[0], Kind.BACKWARD) == [(4, 8, 1)]
    assert "Q = 1 · estimator boundary" in figures[0].texts[1].get_text()


def test_title_rows_and_legend_say_what_is_shown(
    plan: Plan, timeline: Timeline, tmp_path: Path, figures: list[Any]
) -> None:
    draw_timeline(timeline, plan, tmp_path / "a.png")
    figure = figures[0]
    rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert rows == ["stage 0 · zo · blocks 0-1", "stage 1 · bp · block 2"]
    assert figure.texts[0].get_text() == "makespan 10.0 ms · Comu_ti 65%"
    assert "M = 1 · Q = 1 · Q' = 1" in figure.texts[1].get_text()
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == [
        "F  base forward",
        "B  backward",
        "P  perturbed forward",
        "X  early-exit forward",
        "idle",
    ]
    shares = [text.get_text() for text in figure.axes[0].texts if text.get_text().endswith("%")]
    assert shares == ["60%", "70%"]


def test_micro_batch_numbers_only_where_they_fit(plan: Plan, tmp_path: Path, figures: list[Any]) -> None:
    def chain(count: int) -> Timeline:
        return tuple(
            TimedAction(stage=0, action=Action(kind=Kind.FORWARD, micro_batch=m), start=m, end=m + 1)
            for m in range(count)
        )

    draw_timeline(chain(12), plan, tmp_path / "a.png")
    draw_timeline(chain(1000), plan, tmp_path / "b.png")
    numbers = [
        [text.get_text() for text in figure.axes[0].texts if "%" not in text.get_text()] for figure in figures
    ]
    assert numbers[0] == [str(m) for m in range(12)]
    assert numbers[1] == []


def test_picture_stays_inside_its_frame(
    plan: Plan, timeline: Timeline, tmp_path: Path, figures: list[Any]
) -> None:
    draw_timeline(timeline, plan, tmp_path / "a.png")
    figure = figures[0]
    frame = figure.bbox
    drawn = figure.axes[0].get_tightbbox()
    legend = figure.legends[0].get_window_extent()
    for box in (drawn, legend, *(text.get_window_extent() for text in figure.texts)):
        assert frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
    assert legend.y1 <= drawn.y0 + 1 or legend.x1 < figure.axes[0].xaxis.label.get_window_extent().x0


def test_empty_timeline_is_refused(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="timeline is empty"):
        draw_timeline((), plan, tmp_path / "a.png")


def test_missing_matplotlib_names_the_extra(
    plan: Plan, timeline: Timeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    importer = builtins.__import__

    def without_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return importer(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(ModuleNotFoundError, match=r"lightning-hybridop\[viz\]"):
        draw_timeline(timeline, plan, tmp_path / "a.png")


def test_reporting_loads_neither_torch_nor_lightning_nor_matplotlib() -> None:
    # The package's own __init__ registers things with Lightning, so the module is looked at for what it adds itself.
    code = (
        "import sys, types, pathlib, importlib.util as u\n"
        "root = pathlib.Path(u.find_spec('lightning_hybridop').submodule_search_locations[0])\n"
        "package = types.ModuleType('lightning_hybridop'); package.__path__ = [str(root)]\n"
        "sys.modules['lightning_hybridop'] = package\n"
        "import lightning_hybridop.reporting\n"
        "print([name for name in ('torch', 'lightning', 'matplotlib') if name in sys.modules])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[]"
