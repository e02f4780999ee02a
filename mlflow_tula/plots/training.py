"""Figures of a training: loss, accuracy, gradient norm and variability, step time, by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow_tula.plots.pages import Chart, numbers, save_page, value_axis
from mlflow_tula.plots.panels import COLORS, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = Sequence[tuple[int, float]]
"""(step, value) in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCurves:
    """What a training measured, by optimizer step; times in seconds. Empty: not measured."""

    title: str
    train_loss: Curve = ()
    test_loss: Curve = ()
    test_accuracy: Curve = ()
    gradient_norm: Curve = ()
    gradient_variability: Curve = ()
    noise_scale: Curve = ()
    step_time_s: Curve = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Panel:
    heading: str
    unit: str
    curves: tuple[tuple[str, Curve], ...]
    note: str = ""
    factor: float = 1.0
    long: float = 30.0


def panels(curves: TrainingCurves) -> list[_Panel]:
    """What there is to draw, without the empty ones."""
    factor, unit = time_unit([value for _, value in curves.step_time_s])
    listed = [
        _Panel(
            heading="Loss",
            unit="loss",
            curves=(("training", curves.train_loss), ("test", curves.test_loss)),
        ),
        _Panel(
            heading="Test accuracy",
            unit="accuracy, %",
            curves=(("test", curves.test_accuracy),),
            factor=100.0,
        ),
        _Panel(
            heading="Gradient variability",
            unit="relative change",
            curves=(("gradient variability", curves.gradient_variability),),
            note="Relative change of the smoothed gradient norm from step to step: large where "
            "gradients still change much, small where a larger batch changes little.",
        ),
        _Panel(
            heading="Gradient norm",
            unit="norm",
            curves=(("gradient norm", curves.gradient_norm),),
        ),
        _Panel(
            heading="Noise scale",
            unit="samples",
            curves=(("noise scale", curves.noise_scale),),
            note="Batches well below it gain from being larger, batches well above it do not.",
        ),
        _Panel(
            heading="Step time",
            unit=unit,
            curves=(("step", curves.step_time_s),),
            factor=factor,
        ),
    ]
    return [panel for panel in listed if any(len(curve) for _, curve in panel.curves)]


def training(curves: TrainingCurves) -> Figure:
    """Every panel in one figure."""
    from mlflow_tula.plots.figures import new_figure

    shown = panels(curves)
    columns = min(len(shown), 3) or 1
    rows = max(1, -(-len(shown) // columns))
    figure = new_figure(rows, columns, width=5.0 * columns, height=3.7 * rows)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel, one in zip(axes, shown, strict=False):
        _draw(panel, one)
    for panel in axes[len(shown) :]:
        panel.set_visible(False)
    figure.suptitle(curves.title, fontsize=12)
    return figure


def variability(curves: TrainingCurves) -> Figure:
    """Gradient variability alone."""
    from mlflow_tula.plots.figures import new_figure

    figure = new_figure(1, 1, width=7.5, height=4.5)
    for panel in panels(curves):
        if panel.heading == "Gradient variability":
            _draw(figure.subplots(), panel)
    return figure


def save_training_page(path: str | Path, curves: TrainingCurves) -> None:
    """The same panels as a page that opens offline."""
    charts = []
    for panel in panels(curves):
        traces: list[dict[str, Any]] = [
            {
                "mode": "lines+markers" if len(curve) < 30 else "lines",
                "x": [step for step, _ in curve],
                "y": numbers((value for _, value in curve), panel.factor),
                "name": name,
                "line": {"color": COLORS[number], "width": 1.5},
                "showlegend": len(panel.curves) > 1,
            }
            for number, (name, curve) in enumerate(panel.curves)
            if curve
        ]
        every = [value for trace in traces for value in trace["y"]]
        charts.append(
            Chart(
                name=panel.heading.lower().replace(" ", "-"),
                heading=panel.heading,
                note=panel.note,
                traces=traces,
                x={"title": {"text": "optimizer step"}},
                y=value_axis(every, panel.unit, long=panel.long),
            )
        )
    save_page(path, curves.title, "", charts)


def _draw(axes: Axes, panel: _Panel) -> None:
    """Lines; with markers where there are few points."""
    values = []
    for number, (name, curve) in enumerate(panel.curves):
        if not curve:
            continue
        shown = [value * panel.factor for _, value in curve]
        values += [value for value in shown if value > 0]
        axes.plot(
            [step for step, _ in curve],
            shown,
            label=name,
            color=COLORS[number],
            linewidth=1.2,
            marker="o" if len(curve) < 30 else None,
            markersize=4,
        )
    if values and max(values) > panel.long * min(values):
        axes.set_yscale("log")
    axes.set_title(panel.heading)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(panel.unit)
    axes.grid(alpha=0.25)
    if sum(1 for _, curve in panel.curves if curve) > 1:
        axes.legend(fontsize=8)
