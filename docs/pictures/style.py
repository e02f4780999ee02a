"""One look for all pictures, and where the measurements lie."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from mlflow_tula.plots.panels import COLORS
from mlflow_tula.table import ProfileTable

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
BLUE, RED, GREEN, PINK, SKY, ORANGE, BLACK = COLORS
GREY = "#777777"

mpl.rcParams.update(
    {
        "svg.hashsalt": "tula",  # the same drawing gives the same file
        "svg.fonttype": "path",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#e6e6e6",
        "legend.frameon": False,
        "legend.fontsize": 8,
    }
)


def canvas(columns: int = 1, *, height: float = 3.2) -> tuple[Figure, list[Axes]]:
    """A figure of a page's width with so many panels side by side."""
    figure = Figure(figsize=(8.4, height), layout="constrained")
    panels = figure.subplots(1, columns, squeeze=False)[0]
    return figure, list(panels)


def batch_axis(panel: Axes, sizes: list[int], label: str = "local batch size") -> None:
    """Batch sizes on a logarithmic axis, each written as it is."""
    panel.set_xscale("log", base=2)
    panel.set_xticks(sizes)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlabel(label)


def log_values(panel: Axes, ticks: Sequence[float]) -> None:
    """A logarithmic vertical axis, each value written as it is."""
    panel.set_yscale("log")
    panel.set_yticks(list(ticks))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    panel.yaxis.set_minor_locator(NullLocator())


def save(figure: Figure, path: Path) -> None:
    """Write without a date, so that the same drawing is the same file."""
    figure.savefig(path, metadata={"Date": None, "Creator": None})


def table(path: str) -> ProfileTable:
    """A recorded profile below benchmarks/results."""
    data = json.loads((RESULTS / path).read_text(encoding="utf-8"))
    return ProfileTable.from_dict(data.get("table", data))


def module(path: str) -> ModuleType:
    """A script of benchmarks/ or tests/, for the figures or functions it holds."""
    file = ROOT / path
    name = f"pictures_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made
