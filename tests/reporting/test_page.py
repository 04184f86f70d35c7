from html.parser import HTMLParser
from pathlib import Path

import pytest

from lightning_hybridop.reporting.page import write_page
from lightning_hybridop.reporting.panels import Panel
from lightning_hybridop.schedules.actions import Action, Kind
from lightning_hybridop.schedules.timeline import TimedAction, Timeline

VOID = {"meta", "input"}


class Reader(HTMLParser):
    """Checks that elements nest, and collects bars, cells and whatever would be loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.bars: list[dict[str, str | None]] = []
        self.loaded: list[str] = []
        self.cells = 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        if tag not in VOID:
            self.open.append(tag)
        if values.get("class") == "action":
            self.bars.append(values)
        self.loaded += [str(values[name]) for name in ("src", "href") if name in values]
        self.cells += tag == "td"

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_shows_every_action(timeline: Timeline, tmp_path: Path) -> None:
    panel = Panel(
        title="<plan> & simulation",
        devices=("npu-0", "gpu-0"),
        timeline=timeline,
        collectives=((1, 50.0, 50.01),),
    )
    write_page(
        panel, tmp_path / "new" / "page.html", notes=("a < b",), columns=("x", "y"), rows=(("1", "<2>"),)
    )
    text = (tmp_path / "new" / "page.html").read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(text)

    assert reader.open == []
    assert reader.loaded == []
    assert len(reader.bars) == len(timeline) + 1
    assert reader.cells == 2
    assert "<title>&lt;plan&gt; &amp; simulation</title>" in text
    assert "a &lt; b" in text
    assert any("perturbed forward of micro-batch 0, query 0" in str(bar["data-what"]) for bar in reader.bars)


def test_a_gradient_that_takes_no_time_has_no_bar(timeline: Timeline, tmp_path: Path) -> None:
    gradient = TimedAction(
        stage=0, action=Action(kind=Kind.BACKWARD, micro_batch=0), start=50.001, end=50.001
    )
    riding = TimedAction(
        stage=0,
        action=Action(kind=Kind.PERTURBED, micro_batch=0, query=2, count=2),
        start=50.006,
        end=50.008,
    )
    panel = Panel(title="t", devices=("a", "b"), timeline=(*timeline, gradient, riding))
    write_page(panel, tmp_path / "p.html", notes=(), columns=(), rows=())
    reader = Reader()
    reader.feed((tmp_path / "p.html").read_text(encoding="utf-8"))

    assert len(reader.bars) == len(timeline) + 1
    assert "perturbed forward of micro-batch 0, queries 2-3" in str(reader.bars[-1]["data-what"])


def test_bars_lie_where_their_times_say(timeline: Timeline, tmp_path: Path) -> None:
    write_page(
        Panel(title="t", devices=("a", "b"), timeline=timeline),
        tmp_path / "p.html",
        notes=(),
        columns=(),
        rows=(),
    )
    reader = Reader()
    reader.feed((tmp_path / "p.html").read_text(encoding="utf-8"))
    end = max(timed.end for timed in timeline)
    per_second = (1000 - 190) / end

    for bar, timed in zip(reader.bars, timeline, strict=True):
        assert float(str(bar["x"])) == pytest.approx(190 + timed.start * per_second, abs=2e-3)
        assert float(str(bar["width"])) == pytest.approx((timed.end - timed.start) * per_second, abs=2e-3)


def test_an_empty_timeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="The timeline is empty"):
        write_page(
            Panel(title="t", devices=("a",), timeline=()), tmp_path / "p.html", notes=(), columns=(), rows=()
        )
