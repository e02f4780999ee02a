"""A diagnosis -> figures and an MLflow run: the paper's figures 5 (updates) and 6 (gradients)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlflow_tula.plots.panels import color
from mlflow_tula.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from mlflow_tula.diagnose import Diagnosis, StepFacts

_LARGEST_POINTS = 1000


def log_diagnosis(run: Run, diagnoses: Sequence[Diagnosis]) -> None:
    """Log each batch size's curves, the figures and the numbers."""
    metrics: list[tuple[str, object, int]] = []
    for diagnosis in diagnoses:
        size = diagnosis.trial.batch_size
        every = max(1, -(-len(diagnosis.steps) // _LARGEST_POINTS))
        for facts in diagnosis.steps[::every]:
            for name in ("loss", "gradient_norm", "variability", "noise_scale"):
                metrics.append((f"{name}/batch_{size}", getattr(facts, name), facts.step))
        for look in diagnosis.snapshots:
            value = look.hessian_eigenvalue
            metrics.append((f"hessian_eigenvalue/batch_{size}", value, look.step))
        metrics.append((f"accuracy/batch_{size}", diagnosis.accuracy, 0))
    run.log(metrics=metrics)
    with tempfile.TemporaryDirectory(prefix="tula-") as scratch:
        folder = Path(scratch)
        write_diagnosis(folder, diagnoses)
        run.files(folder)


def write_diagnosis(folder: Path, diagnoses: Sequence[Diagnosis]) -> None:
    """diagnosis.json and two figures."""
    folder.mkdir(parents=True, exist_ok=True)
    documents = [diagnosis.to_dict() for diagnosis in diagnoses]
    (folder / "diagnosis.json").write_text(json.dumps(documents) + "\n", encoding="utf-8")
    gradient_figure(diagnoses).savefig(folder / "gradients.png", dpi=110)
    if any(diagnosis.snapshots for diagnosis in diagnoses):
        update_figure(diagnoses).savefig(folder / "updates.png", dpi=110)


def gradient_figure(diagnoses: Sequence[Diagnosis]) -> Figure:
    """Gradient norm, variability, noise scale and largest Hessian eigenvalue over epochs."""
    figure, axes = _figure(2, 2, 11.0, 7.5)
    panels: list[tuple[str, Callable[[StepFacts], float | None]]] = [
        ("gradient norm", lambda facts: facts.gradient_norm),
        ("gradient variability", lambda facts: facts.variability),
        ("noise scale [samples]", lambda facts: facts.noise_scale),
    ]
    for number, diagnosis in enumerate(diagnoses):
        label = f"batch {diagnosis.trial.batch_size}"
        for panel, (name, read) in zip(axes, panels, strict=False):
            points = [(facts.epoch, read(facts)) for facts in diagnosis.steps]
            known = [(epoch, value) for epoch, value in points if value]
            panel.plot(*_columns(known), label=label, color=color(number), linewidth=1)
            panel.set_ylabel(name)
            panel.set_yscale("log")
        epoch_of = {facts.step: facts.epoch for facts in diagnosis.steps}
        looks = [(epoch_of[look.step], look.hessian_eigenvalue) for look in diagnosis.snapshots]
        axes[3].plot(*_columns(looks), label=label, color=color(number), marker="o")
    axes[3].set_ylabel("largest Hessian eigenvalue")
    for panel in axes:
        panel.set_xlabel("epoch")
        panel.legend(fontsize=8)
    return figure


def update_figure(diagnoses: Sequence[Diagnosis]) -> Figure:
    """Densities of the weights' updates at each snapshot, a panel a batch size."""
    figure, axes = _figure(1, len(diagnoses), 5.0 * len(diagnoses), 4.0)
    for panel, diagnosis in zip(axes, diagnoses, strict=True):
        for number, look in enumerate(diagnosis.snapshots):
            label = f"step {look.step}"
            panel.plot(look.update_values, look.update_density, label=label, color=color(number))
        panel.set_title(f"batch {diagnosis.trial.batch_size}", fontsize=10)
        panel.set_xlabel("update of a weight")
        panel.set_ylabel("density")
        panel.set_yscale("log")
        panel.legend(fontsize=8)
    return figure


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _figure(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel in axes:
        panel.grid(alpha=0.3)
    return figure, axes
