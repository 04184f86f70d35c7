"""A simulated mini-batch as one self-contained HTML page: picture, table, and each action under the pointer."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from lightning_hybridop.reporting.gantt import COLOURS
from lightning_hybridop.reporting.labels import KIND_NAMES, drawn_actions, query_label
from lightning_hybridop.reporting.panels import COLLECTIVE, Panel
from lightning_hybridop.schedules.actions import Action, Kind

_WIDTH, _ROW, _BAR, _LEFT, _AXIS = 1000.0, 34.0, 24.0, 190.0, 30.0  # of the picture's own units

_STYLE = """
:root { color-scheme: light dark; --ink: #22262b; --faint: #6b737c; --idle: #eef0f2; --paper: #fff }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --faint: #9aa2aa; --idle: #2a2f35; --paper: #16191d } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
       max-width: 1200px; padding: 0 1rem }
h1 { font-size: 1.3rem; margin-bottom: .2rem } p { color: var(--faint); margin-top: 0 }
.picture { overflow-x: auto } svg { min-width: 900px; width: calc(100% * var(--zoom, 1)) }
svg text { fill: var(--ink); font-size: 12px } .idle { fill: var(--idle) } .tick { stroke: var(--idle) }
rect.action { stroke: var(--paper); stroke-width: .6 } rect.action:hover { stroke: var(--ink); stroke-width: 1.5 }
#what { min-height: 1.6em; font-variant-numeric: tabular-nums } label { color: var(--faint) }
table { border-collapse: collapse; margin-top: 1rem; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .25rem .9rem; border-bottom: 1px solid var(--idle) }
th:first-child, td:first-child { text-align: left } .key span { margin-right: 1.2rem }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 2px }
"""

_SCRIPT = """
const what = document.getElementById("what"), hint = what.textContent;
document.querySelector("svg").addEventListener("pointerover", event => {
  what.textContent = event.target.dataset.what || hint;
});
document.getElementById("zoom").addEventListener("input", event => {
  document.documentElement.style.setProperty("--zoom", event.target.value);
});
"""


def write_page(
    panel: Panel,
    path: str | Path,
    *,
    notes: Sequence[str],
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> None:
    """Write the page at `path`; it needs no other file and no network.

    `notes` stand under the title; `columns` and `rows` are a table of texts, one row per device. Missing parent folders are
    created. Raises ValueError for an empty timeline.
    """
    if not panel.timeline:
        raise ValueError("The timeline is empty, expected the actions of one simulated mini-batch.")
    kinds = [kind for kind in Kind if any(timed.action.kind is kind for timed in panel.timeline)]
    key = [
        f'<span><i style="background:{COLOURS[kind]}"></i>{escape(KIND_NAMES[kind])}</span>' for kind in kinds
    ]
    if panel.collectives:
        key.append(f'<span><i style="background:{COLLECTIVE}"></i>collective</span>')
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    title = escape(panel.title)
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{_STYLE}</style></head>
<body><h1>{title}</h1>
{"".join(f"<p>{escape(note)}</p>" for note in notes)}
<div class="key">{"".join(key)}</div>
<label>zoom <input id="zoom" type="range" min="1" max="12" step="0.5" value="1"></label>
<div id="what">Point at a bar to see what it is.</div>
<div class="picture">{_picture(panel)}</div>
<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>
<script>{_SCRIPT}</script></body></html>
"""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(page, encoding="utf-8")


def _picture(panel: Panel) -> str:
    scale = (_WIDTH - _LEFT) / panel.end
    height = _ROW * len(panel.devices) + _AXIS
    parts = [f'<svg viewBox="0 0 {_WIDTH:g} {height:g}" role="img" aria-label="{escape(panel.title)}">']
    for row, device in enumerate(panel.devices):
        top = row * _ROW + (_ROW - _BAR) / 2
        parts.append(f'<text x="0" y="{row * _ROW + _ROW / 2 + 4:g}">{escape(device)}</text>')
        parts.append(
            f'<rect class="idle" x="{_LEFT:g}" y="{top:g}" width="{_WIDTH - _LEFT:g}" height="{_BAR:g}"/>'
        )
    for timed in drawn_actions(panel.timeline):
        what = (
            f"{panel.devices[timed.stage]}: {_named(timed.action)}, {timed.start:.4g} to {timed.end:.4g} s "
            f"({(timed.end - timed.start) * 1e3:.4g} ms)"
        )
        parts.append(_bar(timed.stage, timed.start, timed.end, scale, COLOURS[timed.action.kind], what, 1.0))
    for row, start, end in panel.collectives:
        what = f"{panel.devices[row]}: collective, {start:.4g} to {end:.4g} s"
        parts.append(_bar(row, start, end, scale, COLLECTIVE, what, 0.5))
    base = _ROW * len(panel.devices)
    for number in range(9):
        at = _LEFT + number * (_WIDTH - _LEFT) / 8
        anchor = "end" if number == 8 else "middle"
        parts.append(f'<line class="tick" x1="{at:g}" x2="{at:g}" y1="{base:g}" y2="{base + 5:g}"/>')
        parts.append(
            f'<text x="{at:g}" y="{base + 19:g}" text-anchor="{anchor}">{number * panel.end / 8:.3g} s</text>'
        )
    return "".join([*parts, "</svg>"])


def _bar(row: int, start: float, end: float, scale: float, colour: str, what: str, share: float) -> str:
    height = _BAR * share
    return (
        f'<rect class="action" x="{_LEFT + start * scale:.3f}" y="{row * _ROW + (_ROW - height) / 2:g}" '
        f'width="{(end - start) * scale:.3f}" height="{height:g}" fill="{colour}" data-what="{escape(what)}"/>'
    )


def _named(action: Action) -> str:
    noun = "query" if action.count == 1 else "queries"
    query = f", {noun} {query_label(action)}" if query_label(action) else ""
    return f"{KIND_NAMES[action.kind]} of micro-batch {action.micro_batch}{query}"
