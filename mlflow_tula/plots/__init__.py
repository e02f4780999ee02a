"""Figures from core types: matplotlib for files, plotly for an offline page."""

from mlflow_tula.plots.figures import (
    cost,
    epoch_time,
    memory,
    overview,
    pareto,
    residuals,
    save_png,
    step_time,
)

__all__ = [
    "cost",
    "epoch_time",
    "memory",
    "overview",
    "pareto",
    "residuals",
    "save_png",
    "step_time",
]
