"""Figures from core types: what was measured, what is predicted, and where the choice lies.

Each function takes core types and gives a matplotlib Figure of its own (no pyplot, so nothing
global is left behind); `save_png` writes one. Lines are predictions, markers are measurements,
dashes lie beyond what was measured, the star is the choice.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mlflow_tula.plots.overlays import overlays
from mlflow_tula.plots.panels import (
    draw_memory,
    draw_residuals,
    draw_throughput,
    draw_times,
    key,
)
from mlflow_tula.plots.tradeoffs import draw_certainty, draw_cost, draw_pareto, has_cost
from mlflow_tula.predictors.bundle import PredictorBundle
from mlflow_tula.recommend.recommendation import Recommendation
from mlflow_tula.table import ProfileTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def overview(
    table: ProfileTable,
    bundle: PredictorBundle,
    recommendation: Recommendation | None = None,
    *,
    memory_limit_bytes: float | None = None,
) -> Figure:
    """The figure of a run: step time, epoch time with the choice, memory with its limit, trade-off.

    Args:
        table: what was measured.
        bundle: what was fitted to it.
        recommendation: the choice to mark; none is marked when None.
        memory_limit_bytes: the limit to draw; the device's memory when None.
    """
    figure = new_figure(2, 2, width=13.0, height=9.0)
    axes = figure.subplots(2, 2)
    lines = overlays(table, bundle, recommendation, dense=True)
    limit = memory_limit_bytes or float(bundle.hardware.device_memory_bytes)
    draw_times(axes[0, 0], lines, "step_time_s", "step time", recommendation)
    draw_times(axes[0, 1], lines, "epoch_time_s", "epoch time", recommendation)
    draw_memory(axes[1, 0], lines, limit, recommendation)
    if recommendation is not None and has_cost(recommendation):
        draw_pareto(axes[1, 1], recommendation)
    else:
        draw_throughput(axes[1, 1], lines, recommendation)
    key(figure, lines, recommendation)
    figure.suptitle(_title(table, recommendation), fontsize=12)
    return figure


def step_time(
    table: ProfileTable, bundle: PredictorBundle, recommendation: Recommendation | None = None
) -> Figure:
    """Step time against the global batch size, with the choice."""
    return _one(table, bundle, "step_time_s", "step time", recommendation)


def epoch_time(
    table: ProfileTable, bundle: PredictorBundle, recommendation: Recommendation | None = None
) -> Figure:
    """Time of an epoch against the global batch size, with the choice."""
    return _one(table, bundle, "epoch_time_s", "epoch time", recommendation)


def memory(
    table: ProfileTable,
    bundle: PredictorBundle,
    recommendation: Recommendation | None = None,
    *,
    memory_limit_bytes: float | None = None,
) -> Figure:
    """Peak memory of a rank against the local batch size, with the limit."""
    figure = new_figure(1, 1, width=7.5, height=5.0)
    lines = overlays(table, bundle, recommendation, dense=True)
    limit = memory_limit_bytes or float(bundle.hardware.device_memory_bytes)
    draw_memory(figure.subplots(), lines, limit, recommendation)
    key(figure, lines, recommendation)
    return figure


def cost(table: ProfileTable, bundle: PredictorBundle, recommendation: Recommendation) -> Figure:
    """Cost of every candidate against the global batch size; device-hours without a price."""
    figure = new_figure(1, 1, width=7.5, height=5.0)
    lines = overlays(table, bundle, recommendation)
    draw_cost(figure.subplots(), lines, recommendation)
    key(figure, lines, recommendation, band=False)
    return figure


def pareto(recommendation: Recommendation) -> Figure:
    """Cost against time of every candidate, with the front; device-hours without a price."""
    figure = new_figure(1, 1, width=7.5, height=5.0)
    draw_pareto(figure.subplots(), recommendation)
    draw_certainty(figure)
    return figure


def residuals(table: ProfileTable, bundle: PredictorBundle) -> Figure:
    """Predicted over measured step time, less one, in percent, against the global batch size."""
    figure = new_figure(1, 1, width=7.5, height=4.5)
    lines = overlays(table, bundle)
    draw_residuals(figure.subplots(), lines)
    key(figure, lines, None, band=False)
    return figure


def save_png(figure: Figure, path: str | Path) -> None:
    """Write a figure as PNG."""
    figure.savefig(Path(path), dpi=110)


def new_figure(rows: int, columns: int, *, width: float, height: float) -> Figure:
    """A figure with a canvas of its own."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _one(
    table: ProfileTable,
    bundle: PredictorBundle,
    quantity: str,
    name: str,
    recommendation: Recommendation | None,
) -> Figure:
    """One time panel as a figure."""
    figure = new_figure(1, 1, width=7.5, height=5.0)
    lines = overlays(table, bundle, recommendation, dense=True)
    draw_times(figure.subplots(), lines, quantity, name, recommendation)
    key(figure, lines, recommendation)
    return figure


def _title(table: ProfileTable, recommendation: Recommendation | None) -> str:
    """Workload, hardware, and the choice where there is one."""
    text = f"{table.workload.slug} on {table.hardware.device_name}"
    return text if recommendation is None else f"{text}\n{recommendation.headline}"
