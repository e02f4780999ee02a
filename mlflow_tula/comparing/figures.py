"""Figures of a comparison: accuracy against batch size, the gap recovered, AGS's two sweeps."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlflow_tula.comparing.facts import Outcome
from mlflow_tula.comparing.summary import MethodRow
from mlflow_tula.plots.panels import color, marker

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_AGS = "ags"


def draw_all(
    folder: str | Path, title: str, rows: Sequence[MethodRow], tuning: Sequence[Outcome]
) -> list[Path]:
    """Write every figure there is data for as PNG; returns the files."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    figures = {"accuracy_vs_batch": accuracy_against_batch(rows, title)}
    if any(row.recovered is not None for row in rows):
        figures["gap_recovered"] = gap_recovered(rows, title)
    sweep = [outcome for outcome in tuning if outcome.trial.method == _AGS]
    if sweep:
        figures["ags_scaling_factor"] = sweep_of(
            sweep, "scaling_factor", "threshold", title, log=True
        )
        figures["ags_threshold"] = sweep_of(sweep, "threshold", "scaling_factor", title)
    files = []
    for name, figure in figures.items():
        files.append(target / f"{name}.png")
        figure.savefig(files[-1], dpi=110)
    return files


def accuracy_against_batch(rows: Sequence[MethodRow], title: str) -> Figure:
    """Test accuracy of each method over the batch size, with one standard deviation."""
    figure, axes = _figure(8.0, 5.5)
    reference = rows[0]
    lines: dict[str, list[MethodRow]] = defaultdict(list)
    for row in rows[1:]:
        lines[row.method].append(row)
    for number, (method, points) in enumerate(lines.items()):
        points.sort(key=lambda row: row.batch_size)
        axes.errorbar(
            [point.batch_size for point in points],
            [100 * point.mean for point in points],
            yerr=[100 * point.std for point in points],
            label=method,
            color=color(number),
            marker=marker(number // 7 + number),
            linestyle=("-", "--", ":")[number // 7 % 3],
            capsize=2,
        )
    axes.axhline(100 * reference.mean, color="grey", linewidth=1)
    axes.annotate(f"batch {reference.batch_size}", (0.01, 100 * reference.mean), fontsize=8,
                  xycoords=("axes fraction", "data"), va="bottom")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xlabel("global batch size")
    axes.set_ylabel("test accuracy [%]")
    axes.set_title(title, fontsize=11)
    axes.legend(fontsize=7, ncols=2)
    return figure


def gap_recovered(rows: Sequence[MethodRow], title: str) -> Figure:
    """Share of the gap each method recovers at the largest batch, with one standard error."""
    largest = max(row.batch_size for row in rows)
    bars = [row for row in rows if row.batch_size == largest and row.recovered is not None]
    bars.sort(key=lambda row: row.recovered or 0.0)
    figure, axes = _figure(7.5, 0.8 + 0.3 * len(bars))
    for at, row in enumerate(bars):
        # a method that fails badly would squeeze all others into a corner
        shown = max(row.recovered or 0.0, -0.5)
        axes.barh(
            at,
            100 * shown,
            xerr=100 * (row.recovered_error or 0.0) if shown == row.recovered else None,
            color=color(1) if row.method == "auto" else color(0),
        )
    axes.set_yticks(range(len(bars)), [row.method for row in bars], fontsize=8)
    axes.axvline(90, color="grey", linewidth=1, linestyle="--")
    axes.set_xlabel(f"gap recovered at batch {largest} [%]")
    axes.set_title(title, fontsize=11)
    return figure


def sweep_of(
    outcomes: Iterable[Outcome], swept: str, other: str, title: str, *, log: bool = False
) -> Figure:
    """Validation accuracy over one setting of a method, a line for each value of another one."""
    groups: dict[tuple[float, float], list[float]] = defaultdict(list)
    found = list(outcomes)
    largest = max(outcome.trial.batch_size for outcome in found)
    for outcome in found:
        if outcome.trial.batch_size == largest:
            settings = dict(outcome.trial.settings)
            groups[settings[other], settings[swept]].append(outcome.accuracy)
    figure, axes = _figure(7.0, 4.5)
    for number, level in enumerate(sorted({level for level, _ in groups})):
        at = sorted(value for line, value in groups if line == level)
        axes.plot(
            at,
            [100 * statistics.fmean(groups[level, value]) for value in at],
            label=f"{other.replace('_', ' ')} {level:g}",
            color=color(number),
            marker=marker(number),
        )
    if log:
        axes.set_xscale("log", base=2)
    axes.set_xlabel(swept.replace("_", " "))
    axes.set_ylabel("validation accuracy [%]")
    axes.set_title(f"{title}, batch {largest}", fontsize=11)
    axes.legend(fontsize=8)
    return figure


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    return figure, axes
