"""Panels as a PNG and as a page of interactive charts, with the palette of `mlflow_tula.plots`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow_tula.plots import pages, panels
from mlflow_tula.plots.figures import new_figure, save_png
from reproduction.facts import CHOICE, Panel, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PLOTLY = {
    "line": {"mode": "lines"},
    "dashed": {"mode": "lines"},
    "points": {"mode": "markers"},
    "both": {"mode": "lines+markers"},
    "star": {"mode": "markers"},
    "diamond": {"mode": "markers"},
}


def draw(folder: Path, title: str, subtitle: str, shown: Sequence[Panel]) -> None:
    """Write figure.png and figure.html."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = 1 if len(shown) == 1 else 2 if len(shown) in (2, 4) else 3
    rows = -(-len(shown) // columns)
    width = {1: 9.5, 2: 11.5, 3: 15.0}[columns]
    figure = new_figure(rows, columns, width=width, height=1.2 + 3.9 * rows)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for one, panel in zip(axes, shown, strict=False):
        _draw_panel(one, panel)
    for one in axes[len(shown) :]:
        one.set_visible(False)
    figure.suptitle(f"{title}\n{_wrapped(subtitle, int(10.5 * width))}", fontsize=11)
    save_png(figure, folder / "figure.png")
    pages.save_page(folder / "figure.html", title, subtitle, [_chart(panel) for panel in shown])


def _wrapped(text: str, width: int) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width))


def _draw_panel(axes: Axes, panel: Panel) -> None:
    """One relation with matplotlib."""
    for series in panel.series:
        _draw_series(axes, series)
    axes.set_title(panel.title, fontsize=10)
    axes.set_ylabel(panel.y_label)
    axes.grid(alpha=0.25)
    if panel.log_y:
        axes.set_yscale("log")
        panels.plain_numbers(axes.yaxis)
    if panel.level is not None:
        height, words = panel.level
        axes.axhline(height, color="0.45", linewidth=1.0, linestyle=(0, (6, 2)))
        axes.annotate(words, (0.01, height), xycoords=("axes fraction", "data"), fontsize=8,
                      xytext=(2, 3), textcoords="offset points", color="0.3")  # fmt: skip
    if panel.from_zero:
        top = max((*[v for s in panel.series for v in s.y], (panel.level or (0.0, ""))[0]))
        axes.set_ylim(0.0, 1.15 * top)
    if panel.batch_axis:
        sizes = sorted({int(value) for series in panel.series for value in series.x})
        panels.batch_axis(axes, panel.x_label, sizes)
    else:
        axes.set_xlabel(panel.x_label)
        if panel.log_x:
            axes.set_xscale("log")
            panels.plain_numbers(axes.xaxis)
    if any(series.name for series in panel.series):
        axes.legend(fontsize=8, markerscale=0.7)


def _draw_series(axes: Axes, series: Series) -> None:
    """Lines thin, points on top, stars and diamonds above all."""
    shade = _shade(series)
    kind: dict[str, Any] = {
        "line": {"linewidth": 1.4},
        "dashed": {"linewidth": 1.4, "linestyle": "--"},
        "points": {"linestyle": "none", "marker": panels.marker(series.color), "markersize": 5},
        "both": {"marker": panels.marker(series.color), "markersize": 5, "linewidth": 1.4},
        "star": {"linestyle": "none", "marker": "*", "markersize": 15, "zorder": 6},
        "diamond": {"linestyle": "none", "marker": "D", "markersize": 9, "zorder": 5,
                    "markerfacecolor": "none", "markeredgewidth": 2},
    }[series.style]  # fmt: skip
    label = series.name or None
    if series.spread is None:
        axes.plot(series.x, series.y, color=shade, label=label, **kind)
    else:
        axes.errorbar(
            series.x, series.y, yerr=series.spread, color=shade, label=label, capsize=3, **kind
        )


def _shade(series: Series) -> str:
    """A color of the palette, or that of choices."""
    return panels.CHOICE_COLOR if series.color == CHOICE else panels.color(series.color)


def _chart(panel: Panel) -> pages.Chart:
    """The same relation as a chart of the page."""
    traces: list[dict[str, Any]] = []
    for series in panel.series:
        shade = _shade(series)
        trace: dict[str, Any] = {
            **_PLOTLY[series.style],
            "x": pages.numbers(series.x),
            "y": pages.numbers(series.y),
            "name": series.name,
            "showlegend": bool(series.name),
            "line": {"color": shade, "dash": "dash" if series.style == "dashed" else "solid"},
            "marker": {"color": shade, "size": 8},
        }
        if series.style in ("star", "diamond"):
            trace["marker"] |= {"symbol": series.style, "size": 15}
        if series.spread is not None:
            trace["error_y"] = {"type": "data", "array": pages.numbers(series.spread)}
        traces.append(trace)
    sizes = [int(value) for series in panel.series for value in series.x]
    x: dict[str, Any] = {"title": {"text": panel.x_label}}
    y: dict[str, Any] = {"title": {"text": panel.y_label}}
    shown = [value for trace in traces for value in trace["y"]]
    if panel.batch_axis:
        x = pages.batch_axis(sizes, panel.x_label)
    elif panel.log_x:
        x["type"] = "log"
    if panel.log_y:
        y = pages.value_axis(shown, panel.y_label, long=1.0)
    elif panel.from_zero:
        y["rangemode"] = "tozero"
    shapes, notes = [], []
    if panel.level is not None:
        height, words = panel.level
        line = {"dash": "dash", "color": "#777"}
        shapes.append({"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": height,
                       "y1": height, "line": line})  # fmt: skip
        notes.append({"xref": "paper", "x": 0.01, "y": height, "text": words, "showarrow": False,
                      "xanchor": "left", "yanchor": "bottom"})  # fmt: skip
    return pages.Chart(
        name=re.sub(r"[^a-z0-9]+", "-", panel.title.lower()).strip("-"),
        heading=panel.title,
        traces=traces,
        x=x,
        y=y,
        shapes=shapes,
        annotations=notes,
    )
