"""The panels that figures are made of: each draws one relation into given axes.

Lines are predictions with their bands, markers are measurements, dashes lie beyond what was
measured, crosses at the bottom did not run, the star is the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mlflow_tula.plots.overlays import Overlay
from mlflow_tula.recommend.recommendation import Recommendation

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Okabe and Ito's palette, which people with colour-blindness can tell apart."""

CHOICE_COLOR = "#C00000"
MEDIAN_ERROR = 1.2533
"""Standard error of a median over that of a mean, for normal noise: the square root of pi / 2."""

_FAR_LIMIT = 4.0
_LONG_AXIS = {"step_time_s": 6.0, "epoch_time_s": 30.0}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def time_unit(seconds: Sequence[float]) -> tuple[float, str]:
    """Factor and name of the unit in which most of these times are plain numbers."""
    finite = [value for value in seconds if np.isfinite(value) and value > 0]
    middle = float(np.median(finite)) if finite else 1.0
    for limit, factor, name in (
        (1e-3, 1e6, "µs"),
        (0.5, 1e3, "ms"),
        (300.0, 1.0, "s"),
        (3 * 3600.0, 1 / 60.0, "min"),
    ):
        if middle < limit:
            return factor, name
    return 1 / 3600.0, "h"


def byte_unit(sizes: Sequence[float]) -> tuple[float, str]:
    """Factor and name of the unit in which the largest of these sizes is a plain number."""
    largest = max((value for value in sizes if np.isfinite(value)), default=0.0)
    return (1e-9, "GB") if largest >= 2e9 else (1e-6, "MB")


def color(number: int) -> str:
    """The color of a figure's n-th layout."""
    return COLORS[number % len(COLORS)]


def marker(number: int) -> str:
    """The marker of a figure's n-th layout."""
    return _MARKERS[number % len(_MARKERS)]


def draw_times(
    axes: Axes,
    lines: Sequence[Overlay],
    quantity: str,
    name: str,
    recommendation: Recommendation | None = None,
) -> None:
    """Measured medians with their standard error, predicted lines with their bands."""
    every = [value for line in lines for value in line.predicted[quantity]]
    factor, unit = time_unit(every)
    for number, line in enumerate(lines):
        _draw_line(axes, line.predicted, "global_batch_size", quantity, factor, color(number))
        rows = line.measured
        if len(rows):
            scale = (rows[quantity] / rows["step_time_s"]).astype(float)
            count = rows["num_steps"].astype(float).fillna(1.0).clip(lower=1.0)
            error = MEDIAN_ERROR * rows["step_time_std_s"].astype(float).fillna(0.0) / count**0.5
            spread = error * scale * factor
            axes.errorbar(
                rows["global_batch_size"],
                rows[quantity].astype(float) * factor,
                yerr=spread,
                linestyle="none",
                marker=marker(number),
                color=color(number),
                markersize=6,
                capsize=3,
                zorder=4,
            )
    _value_axis(axes, lines, quantity, factor)
    axes.set_ylabel(f"{name}, {unit}")
    axes.set_title(f"{name} by batch size")
    _mark_failed(axes, lines, "global_batch_size")
    batch_axis(axes, "global batch size, samples", all_sizes(lines, "global_batch_size"))
    mark_choice(axes, recommendation, "global_batch_size", quantity, factor)


def draw_throughput(
    axes: Axes, lines: Sequence[Overlay], recommendation: Recommendation | None
) -> None:
    """Samples per second, where no price makes a trade-off of time and cost."""
    for number, line in enumerate(lines):
        _draw_line(axes, line.predicted, "global_batch_size", "throughput", 1.0, color(number))
        rows = line.measured
        rate = rows["global_batch_size"].astype(float) / rows["step_time_s"].astype(float)
        axes.plot(
            rows["global_batch_size"],
            rate,
            linestyle="none",
            marker=marker(number),
            color=color(number),
            zorder=4,
        )
    most = max(value for line in lines for value in line.predicted["throughput"])
    axes.set_ylim(0.0, 1.5 * most)
    axes.set_ylabel("throughput, samples / s")
    axes.set_title("throughput by batch size")
    batch_axis(axes, "global batch size, samples", all_sizes(lines, "global_batch_size"))
    mark_choice(axes, recommendation, "global_batch_size", "throughput", 1.0)


def draw_memory(
    axes: Axes, lines: Sequence[Overlay], limit: float, recommendation: Recommendation | None
) -> None:
    """Peak bytes of a rank, what failed, and the limit."""
    quantity = "peak_memory_bytes"
    every = [value for line in lines for value in line.predicted[f"{quantity}_upper"]]
    measured = [value for line in lines for value in line.measured[quantity].astype(float)]
    factor, unit = byte_unit([*every, *measured, limit])
    for number, line in enumerate(lines):
        _draw_line(axes, line.predicted, "local_batch_size", quantity, factor, color(number))
        axes.plot(
            line.measured["local_batch_size"],
            line.measured[quantity].astype(float) * factor,
            linestyle="none",
            marker=marker(number),
            color=color(number),
            zorder=4,
        )
    shown = [value * factor for value in (*every, *measured) if np.isfinite(value)]
    _draw_limit(axes, limit * factor, unit, max(shown, default=0.0))
    axes.set_ylabel(f"peak memory of a rank, {unit}")
    axes.set_title("memory by batch size")
    _mark_failed(axes, lines, "local_batch_size")
    batch_axis(axes, "local batch size, samples per rank", all_sizes(lines, "local_batch_size"))
    mark_choice(axes, recommendation, "local_batch_size", quantity, factor)


def _draw_limit(axes: Axes, limit: float, unit: str, highest: float) -> None:
    """The limit as a line; a far one as words alone, so that the curves keep their room."""
    far = limit > _FAR_LIMIT * highest > 0.0
    top = 1.6 * highest if far else 1.08 * max(limit, highest)
    axes.set_ylim(0.0, top)
    text = f"limit {limit:,.1f} {unit}"
    if far:
        text += f", {limit / highest:.0f} times the highest shown"
    else:
        axes.axhline(limit, color="0.15", linewidth=1.4, linestyle=(0, (6, 2)))
    axes.annotate(
        text,
        (0.01, top if far else limit),
        xycoords=("axes fraction", "data"),
        xytext=(2, -3),
        textcoords="offset points",
        verticalalignment="top",
        fontsize=9,
    )


def draw_residuals(axes: Axes, lines: Sequence[Overlay]) -> None:
    """Predicted over measured step time, less one, in percent."""
    axes.axhspan(-10, 10, color="0.93", zorder=0)
    axes.axhline(0.0, color="0.4", linewidth=0.8)
    for number, line in enumerate(lines):
        axes.plot(
            line.measured["global_batch_size"],
            100 * line.measured["error"].astype(float),
            linestyle="none",
            color=color(number),
            marker=marker(number),
        )
    axes.set_ylabel("predicted / measured - 1, %")
    axes.set_title("step time: what the fit leaves over (grey: within 10 %)")
    batch_axis(axes, "global batch size, samples", all_sizes(lines, "global_batch_size"))


def key(
    figure: Figure,
    lines: Sequence[Overlay],
    recommendation: Recommendation | None,
    *,
    band: bool = True,
) -> None:
    """One legend for the whole figure, below it."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Line2D | Patch] = [
        Line2D([], [], color=color(n), marker=marker(n), label=line.label)
        for n, line in enumerate(lines)
    ]
    if band:
        handles += [
            Patch(color="0.5", alpha=0.25, label="90 % interval"),
            Line2D([], [], color="0.3", linestyle="--", label="beyond what was measured"),
        ]
    if band and any(line.failed for line in lines):
        handles.append(
            Line2D([], [], color="0.2", linestyle="none", marker="x", label="did not run")
        )
    if recommendation is not None:
        star = {"marker": "*", "markersize": 13, "linestyle": "none"}
        handles.append(Line2D([], [], color=CHOICE_COLOR, label="the choice", **star))  # type: ignore[arg-type]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6))


def _draw_line(
    axes: Axes, rows: pd.DataFrame, x: str, quantity: str, factor: float, shade: str
) -> None:
    """A predicted line with its band: solid where it was measured around, dashed beyond."""
    sizes = rows[x].to_numpy(float)
    middle, lower, upper = (
        rows[name].to_numpy(float) * factor
        for name in (quantity, f"{quantity}_lower", f"{quantity}_upper")
    )
    beyond = rows["extrapolated"].to_numpy(bool)
    axes.fill_between(sizes, lower, upper, color=shade, alpha=0.15, linewidth=0)
    axes.plot(sizes, np.where(beyond, np.nan, middle), color=shade, linewidth=1.6)
    # The dashes start at the last solid point, so that the line has no gap.
    joined = beyond | np.append(beyond[1:], False) | np.append(False, beyond[:-1])
    axes.plot(sizes, np.where(joined, middle, np.nan), color=shade, linewidth=1.6, linestyle="--")


def _mark_failed(axes: Axes, lines: Sequence[Overlay], x: str) -> None:
    """Crosses on the axis where a trial did not run."""
    for number, line in enumerate(lines):
        for row in line.failed:
            axes.plot(
                [getattr(row, x)],
                [0.03],
                transform=axes.get_xaxis_transform(),
                marker="x",
                markersize=8,
                markeredgewidth=2,
                color=color(number),
                clip_on=False,
            )


def mark_choice(
    axes: Axes,
    recommendation: Recommendation | None,
    x: str,
    quantity: str,
    factor: float,
) -> None:
    """The star, and a thin line down to the axis."""
    if recommendation is None:
        return
    size, value = getattr(recommendation, x), getattr(recommendation.choice, quantity)
    axes.axvline(size, color=CHOICE_COLOR, linewidth=0.9, alpha=0.6, zorder=1)
    if value is not None:
        axes.plot([size], [value * factor], marker="*", markersize=17, color=CHOICE_COLOR, zorder=6)


def all_sizes(lines: Sequence[Overlay], x: str) -> list[int]:
    """Every batch size that is drawn."""
    return sorted({int(size) for line in lines for size in line.predicted[x]})


def batch_axis(axes: Axes, label: str, sizes: Sequence[int]) -> None:
    """A log2 axis with plain numbers at powers of two, at most a dozen of them."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    first, last = int(np.floor(np.log2(sizes[0]))), int(np.ceil(np.log2(sizes[-1])))
    axes.set_xlim(sizes[0] / 1.2, sizes[-1] * 1.2)
    step = max(1, -(-(last - first) // 11))
    ticks = [2**n for n in range(first, last + 1, step) if 2**n <= sizes[-1] * 1.2]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)
    axes.grid(alpha=0.25)


def _value_axis(axes: Axes, lines: Sequence[Overlay], quantity: str, factor: float) -> None:
    """Room for points and lines (a wide band may run out of the panel); logarithmic when long."""
    parts = [line.predicted[quantity].astype(float) for line in lines]
    parts += [line.measured[quantity].astype(float) for line in lines]
    shown = [value * factor for part in parts for value in part if np.isfinite(value) and value > 0]
    if not shown:
        return
    low, high = min(shown), max(shown)
    if high <= _LONG_AXIS[quantity] * low:
        axes.set_ylim(0.0, 1.2 * high)
        return
    axes.set_yscale("log")
    axes.set_ylim(low / 1.5, high * 1.5)
    plain_numbers(axes.yaxis)


def plain_numbers(axis: Axis) -> None:
    """1, 2, 5, 10, ... in place of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
