"""The same curves as a page to point at: time, cost, memory, Pareto front and residuals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlflow_tula.plots.overlays import Overlay, overlays
from mlflow_tula.plots.pages import Chart, batch_axis, numbers, save_page, value_axis, vertical
from mlflow_tula.plots.panels import CHOICE_COLOR, COLORS, byte_unit, color, time_unit
from mlflow_tula.plots.tradeoffs import costs, layout_curves
from mlflow_tula.predictors.bundle import PredictorBundle
from mlflow_tula.recommend.recommendation import CurvePoint, Recommendation
from mlflow_tula.table import ProfileTable

_HOW = "Lines are predictions with their intervals, points are measurements; dashes lie beyond."
_FAR_LIMIT = 4.0


def save_html(
    path: str | Path,
    table: ProfileTable,
    bundle: PredictorBundle,
    recommendation: Recommendation | None = None,
    *,
    memory_limit_bytes: float | None = None,
) -> None:
    """Write the page; cost and the Pareto front need a recommendation."""
    lines = overlays(table, bundle, recommendation, dense=True)
    limit = memory_limit_bytes or float(bundle.hardware.device_memory_bytes)
    charts = [
        _times(lines, "epoch_time_s", "Epoch time", recommendation),
        _times(lines, "step_time_s", "Step time", recommendation),
        _memory(lines, limit, recommendation),
    ]
    if recommendation is not None:
        charts += [_cost(lines, recommendation), _pareto(recommendation)]
    charts.append(_residuals(lines))
    title = f"{table.workload.slug} on {table.hardware.device_name}"
    headline = "" if recommendation is None else recommendation.headline
    save_page(path, title, headline, charts)


def _times(
    lines: Sequence[Overlay], quantity: str, name: str, recommendation: Recommendation | None
) -> Chart:
    """A time by the global batch size."""
    factor, unit = time_unit([value for line in lines for value in line.predicted[quantity]])
    x = "global_batch_size"
    return _curves(lines, quantity, x, name, factor, unit, _choice_at(recommendation, x))


def _memory(lines: Sequence[Overlay], limit: float, recommendation: Recommendation | None) -> Chart:
    """Peak bytes of a rank by the local batch size, and the limit."""
    quantity, x = "peak_memory_bytes", "local_batch_size"
    parts = [rows[quantity] for line in lines for rows in (line.predicted, line.measured)]
    shown = [value for part in parts for value in numbers(part) if value is not None]
    highest = max(shown, default=0.0)
    factor, unit = byte_unit([highest, limit])
    chart = _curves(
        lines, quantity, x, "Memory of a device", factor, unit, _choice_at(recommendation, x)
    )
    words = f"limit {limit * factor:,.1f} {unit}"
    far = limit > _FAR_LIMIT * highest > 0
    top = 1.2 * highest if far else 1.1 * max(limit, highest)
    if far:
        words += f", {limit / highest:.0f} times the highest shown"
    height = top if far else limit
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "line": {"dash": "dash"}}
    shapes = [] if far else [{**line, "y0": limit * factor, "y1": limit * factor}]
    note = {"xref": "paper", "x": 0.01, "y": height * factor, "showarrow": False, "text": words}
    return Chart(
        name="memory",
        heading=chart.heading,
        note=chart.note,
        traces=chart.traces,
        x=chart.x,
        y={"title": {"text": f"peak memory, {unit}"}, "range": [0.0, top * factor]},
        shapes=[*chart.shapes, *shapes],
        annotations=[{**note, "xanchor": "left", "yanchor": "bottom" if not far else "top"}],
    )


def _choice_at(recommendation: Recommendation | None, x: str) -> float | None:
    return None if recommendation is None else float(getattr(recommendation, x))


def _curves(
    lines: Sequence[Overlay],
    quantity: str,
    x: str,
    name: str,
    factor: float,
    unit: str,
    choice: float | None,
) -> Chart:
    """Band, line and measured points of every layout."""
    traces: list[dict[str, Any]] = []
    shown: list[float | None] = []
    for number, line in enumerate(lines):
        traces += _line(line, quantity, x, factor, number)
        shown += numbers(line.predicted[quantity], factor)
        shown += numbers(line.measured[quantity], factor)
    sizes = [int(size) for line in lines for size in line.predicted[x]]
    return Chart(
        name=name.lower().replace(" ", "-"),
        heading=name,
        note=_HOW + ("" if choice is None else " The red line is the choice."),
        traces=traces,
        x=batch_axis(sizes, x.replace("_", " ") + ", samples"),
        y=value_axis(
            shown, f"{name.lower()}, {unit}", long=6.0 if quantity == "step_time_s" else 30.0
        ),
        shapes=[] if choice is None else [vertical(choice, CHOICE_COLOR)],
    )


def _line(line: Overlay, quantity: str, x: str, factor: float, number: int) -> list[dict[str, Any]]:
    """One layout."""
    shade, group, rows = color(number), line.label, line.predicted
    sizes = [int(size) for size in rows[x]]
    beyond = [bool(value) for value in rows["extrapolated"]]
    middle = numbers(rows[quantity], factor)
    # The dashes start at the last solid point, so that the line has no gap.
    dashed = [any(beyond[max(0, i - 1) : i + 2]) for i in range(len(beyond))]
    common = {"legendgroup": group, "mode": "lines"}
    edge = {**common, "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip", "x": sizes}
    solid = [None if far else value for value, far in zip(middle, beyond, strict=True)]
    broken = [value if far else None for value, far in zip(middle, dashed, strict=True)]
    fill = {"fill": "tonexty", "fillcolor": _faint(shade)}
    return [
        {**edge, "y": numbers(rows[f"{quantity}_upper"], factor)},
        {**edge, "y": numbers(rows[f"{quantity}_lower"], factor), **fill},
        {**common, "x": sizes, "y": solid, "name": f"{group}, predicted", "line": {"color": shade}},
        {
            **common,
            "x": sizes,
            "y": broken,
            "name": f"{group}, beyond what was measured",
            "showlegend": False,
            "line": {"color": shade, "dash": "dash"},
        },
        {
            "legendgroup": group,
            "mode": "markers",
            "x": [int(size) for size in line.measured[x]],
            "y": numbers(line.measured[quantity], factor),
            "name": f"{group}, measured",
            "marker": {"color": shade, "size": 9},
        },
    ]


def _cost(lines: Sequence[Overlay], recommendation: Recommendation) -> Chart:
    """Cost of every candidate; open markers where it is not sure, or not fit."""
    price = costs(recommendation)
    traces, shown, sizes = [], [], []
    for number, label, points in layout_curves(recommendation, lines):
        values = numbers(price.of(point) for point in points)
        shown += values
        sizes += [point.global_batch_size for point in points]
        traces.append(
            {
                "mode": "lines+markers",
                "x": [point.global_batch_size for point in points],
                "y": values,
                "text": [_words(point) for point in points],
                "name": label,
                "line": {"color": color(number)},
                "marker": {"size": 9, "symbol": [_symbol(point) for point in points]},
            }
        )
    return Chart(
        name="cost",
        heading="Cost",
        note=f"For {recommendation.basis}. Open: beyond what was measured, or does not fit.",
        traces=traces,
        x=batch_axis(sizes, "global batch size, samples"),
        y=value_axis(shown, price.label, long=6.0),
        shapes=[vertical(float(recommendation.global_batch_size), CHOICE_COLOR)],
    )


def _pareto(recommendation: Recommendation) -> Chart:
    """Cost against time of every candidate, the front joined by a line."""
    price = costs(recommendation)
    points = [p for p in recommendation.curve if p.time_s is not None and price.of(p) is not None]
    factor, unit = time_unit([p.time_s for p in points if p.time_s is not None])
    front = sorted((p for p in points if p.on_pareto), key=lambda p: p.time_s or 0.0)
    chosen = [p for p in points if p == recommendation.choice]

    def trace(some: Sequence[CurvePoint], **more: Any) -> dict[str, Any]:
        return {
            "x": numbers((p.time_s for p in some), factor),
            "y": numbers(price.of(p) for p in some),
            "text": [_words(p) for p in some],
            **more,
        }

    symbols = [_symbol(p) for p in points]
    traces = [
        trace(front, mode="lines", line={"color": COLORS[0]}, name="front", hoverinfo="skip"),
        trace(
            points,
            mode="markers",
            name="candidates",
            marker={"color": "#555", "size": 9, "symbol": symbols},
        ),
        trace(
            chosen,
            mode="markers",
            name="the choice",
            marker={"color": CHOICE_COLOR, "size": 17, "symbol": "star"},
        ),
    ]
    return Chart(
        name="pareto",
        heading="Cost against time",
        note="No candidate beats one of the front in both. Open: beyond what was measured, or "
        "does not fit.",
        traces=traces,
        x=value_axis(
            numbers((p.time_s for p in points), factor), _time_title(recommendation, unit)
        ),
        y=value_axis(numbers(price.of(p) for p in points), price.label),
    )


def _time_title(recommendation: Recommendation, unit: str) -> str:
    return f"time ({recommendation.basis}), {unit}"


def _residuals(lines: Sequence[Overlay]) -> Chart:
    """Predicted over measured step time, less one, in percent."""
    traces = [
        {
            "mode": "markers",
            "x": [int(size) for size in line.measured["global_batch_size"]],
            "y": numbers(line.measured["error"], 100.0),
            "name": line.label,
            "marker": {"color": color(number), "size": 9},
        }
        for number, line in enumerate(lines)
    ]
    sizes = [int(size) for line in lines for size in line.measured["global_batch_size"]]
    return Chart(
        name="residuals",
        heading="Residuals",
        note="What the fit leaves over: predicted over measured step time, less one.",
        traces=traces,
        x=batch_axis(sizes, "global batch size, samples"),
        y={"title": {"text": "predicted / measured - 1, %"}, "zeroline": True},
    )


def _words(point: CurvePoint) -> str:
    """What the pointer says of a candidate."""
    devices = f"{point.world_size} device{'s' if point.world_size > 1 else ''}"
    text = f"batch {point.global_batch_size:,} on {devices}"
    if point.accumulation_steps > 1:
        text += f", {point.accumulation_steps} passes"
    return text if point.fits else f"{text}: {point.fits_reason or 'does not fit'}"


def _symbol(point: CurvePoint) -> str:
    return "circle" if point.fits and not point.extrapolated else "circle-open"


def _faint(shade: str) -> str:
    """A hex color at 15 % opacity, as plotly wants it."""
    red, green, blue = (int(shade[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"
