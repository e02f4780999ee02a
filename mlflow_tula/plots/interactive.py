"""The same curves as a page to point at: plotly, in one file that opens without a network."""

from __future__ import annotations

from collections.abc import Sequence
from math import log10
from pathlib import Path
from typing import Any

from mlflow_tula.plots.overlays import Overlay, overlays
from mlflow_tula.plots.panels import CHOICE_COLOR, byte_unit, color, time_unit
from mlflow_tula.predictors.bundle import PredictorBundle
from mlflow_tula.recommend.recommendation import Recommendation
from mlflow_tula.table import ProfileTable


def save_html(
    path: str | Path,
    table: ProfileTable,
    bundle: PredictorBundle,
    recommendation: Recommendation | None = None,
    *,
    memory_limit_bytes: float | None = None,
) -> None:
    """Write the page: epoch time, step time and memory, measured and predicted.

    The file holds plotly's whole script (4.5 MB), so that it opens offline and in the artifact
    view of MLflow, which shows a page without its neighbours.
    """
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=1, cols=3, subplot_titles=("epoch time", "step time", "memory of a rank")
    )
    lines = overlays(table, bundle, recommendation, dense=True)
    limit = memory_limit_bytes or float(bundle.hardware.device_memory_bytes)
    times = [value for line in lines for value in line.predicted["epoch_time_s"]]
    steps = [value for line in lines for value in line.predicted["step_time_s"]]
    panels = (
        ("epoch_time_s", "global_batch_size", *time_unit(times)),
        ("step_time_s", "global_batch_size", *time_unit(steps)),
        ("peak_memory_bytes", "local_batch_size", *byte_unit([limit])),
    )
    for column, (quantity, x, factor, unit) in enumerate(panels, start=1):
        _add_panel(figure, lines, quantity, x, factor, column)
        figure.update_xaxes(
            type="log", dtick="D1", title=x.replace("_", " "), row=1, col=column, **_ticks(lines, x)
        )
        figure.update_yaxes(title=unit, row=1, col=column, **_range(lines, quantity, factor, limit))
    figure.add_hline(
        y=limit * panels[2][2], line_dash="dash", annotation_text="limit", row=1, col=3
    )
    title = f"{table.workload.slug} on {table.hardware.device_name}"
    if recommendation is not None:
        title += f"<br><sub>{recommendation.headline}</sub>"
        for column in (1, 2):
            figure.add_vline(
                x=recommendation.global_batch_size, line_color=CHOICE_COLOR, row=1, col=column
            )
        figure.add_vline(x=recommendation.local_batch_size, line_color=CHOICE_COLOR, row=1, col=3)
    figure.update_layout(title=title, template="plotly_white", height=560, margin={"t": 110})
    figure.write_html(Path(path), include_plotlyjs=True, full_html=True)


def _range(lines: Sequence[Overlay], quantity: str, factor: float, limit: float) -> dict[str, Any]:
    """Room for the lines; a wide band may run out of the panel. Step time is logarithmic."""
    parts = [
        rows[quantity].astype(float) for line in lines for rows in (line.predicted, line.measured)
    ]
    values = [value * factor for part in parts for value in part if value == value]
    if quantity == "step_time_s":
        low, high = log10(min(values) / 1.5), log10(max(values) * 1.5)
        return {"type": "log", "range": [low, high], "dtick": "D2"}
    top = limit * factor if quantity == "peak_memory_bytes" else max(values)
    return {"range": [0.0, 1.15 * top]}


def _ticks(lines: Sequence[Overlay], x: str) -> dict[str, Any]:
    """Powers of two as the axis's numbers."""
    sizes = [int(size) for line in lines for size in line.predicted[x]]
    powers = [2**n for n in range(64) if min(sizes) <= 2**n <= max(sizes)]
    return {"tickmode": "array", "tickvals": powers, "ticktext": [f"{p:,}" for p in powers]}


def _add_panel(
    figure: Any, lines: Sequence[Overlay], quantity: str, x: str, factor: float, column: int
) -> None:
    """Band, line and measured points of every layout."""
    import plotly.graph_objects as go

    for number, line in enumerate(lines):
        shade, group = color(number), line.label
        rows = line.predicted
        common = {"legendgroup": group, "line": {"color": shade}}
        edge = {**common, "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
        joined = rows["extrapolated"].astype(bool)
        # The dashes start at the last solid point, so that the line has no gap.
        beyond = joined | joined.shift(-1, fill_value=False) | joined.shift(1, fill_value=False)
        upper, lower = rows[f"{quantity}_upper"] * factor, rows[f"{quantity}_lower"] * factor
        traces = [
            go.Scatter(x=rows[x], y=upper, **edge),
            go.Scatter(x=rows[x], y=lower, fill="tonexty", fillcolor=_faint(shade), **edge),
            go.Scatter(
                x=rows[x],
                y=rows[quantity].where(~joined) * factor,
                name=f"{group}, predicted",
                showlegend=column == 1,
                **common,
            ),
            go.Scatter(
                x=rows[x],
                y=rows[quantity].where(beyond) * factor,
                name=f"{group}, beyond what was measured",
                showlegend=False,
                legendgroup=group,
                line={"color": shade, "dash": "dash"},
            ),
            go.Scatter(
                x=line.measured[x],
                y=line.measured[quantity].astype(float) * factor,
                mode="markers",
                marker={"color": shade, "size": 9},
                name=f"{group}, measured",
                legendgroup=group,
                showlegend=column == 1,
            ),
        ]
        figure.add_traces(traces, rows=[1] * len(traces), cols=[column] * len(traces))


def _faint(shade: str) -> str:
    """A hex color at 15 % opacity, as plotly wants it."""
    red, green, blue = (int(shade[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"
