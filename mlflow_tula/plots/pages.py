"""A page of interactive charts in one file that opens without a network.

Charts are plain dicts in plotly's schema: its Python classes check every value and take ten times
as long. The file holds plotly's whole script once (4.5 MB), so that it opens offline and in the
artifact view of MLflow, which shows a page without its neighbours.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; margin: 1.2rem auto; max-width: 1100px;
       padding: 0 1rem; background: #fff; }
h1 { font-size: 1.3rem; margin: 0; } h2 { font-size: 1.05rem; margin: 1.6rem 0 0; }
p { margin: .3rem 0; color: #555; } nav a { margin-right: 1.1em; color: #0072B2; }
.chart { height: 420px; }
"""

_AXIS: dict[str, Any] = {
    "gridcolor": "#e6e6e6",
    "linecolor": "#999",
    "zerolinecolor": "#ccc",
    "showline": True,
}
_LAYOUT: dict[str, Any] = {
    "paper_bgcolor": "#fff",
    "plot_bgcolor": "#fff",
    "font": {"size": 13, "color": "#222"},
    "margin": {"l": 70, "r": 20, "t": 20, "b": 55},
    "legend": {"orientation": "h", "y": -0.22},
    "hovermode": "closest",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One chart: its heading, a line below it, and what plotly draws."""

    name: str
    heading: str
    note: str = ""
    traces: Sequence[dict[str, Any]] = ()
    x: dict[str, Any]
    y: dict[str, Any]
    shapes: Sequence[dict[str, Any]] = ()
    annotations: Sequence[dict[str, Any]] = ()


def save_page(path: str | Path, title: str, subtitle: str, charts: Sequence[Chart]) -> None:
    """Write the page."""
    from plotly.offline import get_plotlyjs

    links = "".join(f'<a href="#{one.name}">{html.escape(one.heading)}</a>' for one in charts)
    sections = "".join(_section(one) for one in charts)
    Path(path).write_text(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head><body><h1>{html.escape(title)}</h1>"
        f"<p>{html.escape(subtitle)}</p><nav>{links}</nav>{sections}</body></html>\n",
        encoding="utf-8",
    )


def _section(chart: Chart) -> str:
    """A heading and the chart below it."""
    layout = {
        **_LAYOUT,
        "xaxis": {**_AXIS, **chart.x},
        "yaxis": {**_AXIS, **chart.y},
        "shapes": list(chart.shapes),
        "annotations": list(chart.annotations),
    }
    options = {"responsive": True, "displaylogo": False}
    # "</" would end the script, whatever a name holds.
    words = ", ".join(_json(one) for one in (list(chart.traces), layout, options))
    return (
        f'<section id="{chart.name}"><h2>{html.escape(chart.heading)}</h2>'
        f'<p>{html.escape(chart.note)}</p><div class="chart" id="chart-{chart.name}"></div>'
        f'<script>Plotly.newPlot("chart-{chart.name}", {words})</script></section>'
    )


def _json(document: Any) -> str:
    return json.dumps(document, allow_nan=False).replace("</", "<\\/")


def numbers(values: Iterable[Any], factor: float = 1.0) -> list[float | None]:
    """Floats for plotly, with a gap where there is none; six digits are more than a screen has."""
    found: list[float | None] = []
    for value in values:
        number = math.nan if value is None else float(value) * factor
        found.append(float(f"{number:.6g}") if math.isfinite(number) else None)
    return found


def batch_axis(sizes: Sequence[int], title: str) -> dict[str, Any]:
    """A logarithmic axis with powers of two as its numbers."""
    powers = [2**n for n in range(64) if min(sizes) <= 2**n <= max(sizes)] if sizes else []
    step = max(1, -(-len(powers) // 12))
    shown = powers[::step]
    edge = [math.log10(min(sizes) / 1.2), math.log10(max(sizes) * 1.2)] if sizes else [0.0, 1.0]
    ticks = {"tickmode": "array", "tickvals": shown, "ticktext": [f"{size:,}" for size in shown]}
    return {"type": "log", "range": edge, "title": {"text": title}, **ticks}


def value_axis(shown: Sequence[float | None], title: str, *, long: float = 30.0) -> dict[str, Any]:
    """An axis from zero, or a logarithmic one where the values are far apart."""
    values = [value for value in shown if value is not None and value > 0]
    axis: dict[str, Any] = {"title": {"text": title}}
    if not values:
        return axis
    low, high = min(values), max(values)
    if high > long * low:
        return {
            **axis,
            "type": "log",
            "range": [math.log10(low / 1.5), math.log10(high * 1.5)],
            **_decimal_ticks(low / 1.5, high * 1.5),
        }
    return {**axis, "range": [0.0, 1.15 * high]}


def _decimal_ticks(low: float, high: float) -> dict[str, Any]:
    """1, 2, 5, 10, ... in full; plotly's own leave the tens out."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    step = max(1, (last - first) // 6)
    steps = (1, 2, 5) if last - first <= 4 else (1,)
    ticks = [lead * 10.0**power for power in range(first, last + 1, step) for lead in steps]
    shown = [tick for tick in ticks if low <= tick <= high]
    texts = [f"{tick:,.0f}" if tick >= 1 else f"{tick:g}" for tick in shown]
    return {"tickmode": "array", "tickvals": shown, "ticktext": texts}


def vertical(x: float, shade: str) -> dict[str, Any]:
    """A thin line over the whole height."""
    line = {"color": shade, "width": 1}
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line}
