"""A training's page: the decision and the outcome in words, the curves as figures."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mlflow_tula.plots import save_png
from mlflow_tula.plots.training import (
    Curve,
    TrainingCurves,
    save_training_page,
    training,
    variability,
)
from mlflow_tula.registry.words import table_row, time_words
from mlflow_tula.runs import Run
from mlflow_tula.training.facts import BatchPlan, EpochRecord, StepRecord, TrainResult

_MOST_POINTS = 2000


class StepKeeper:
    """Keeps the steps of a training for its figures, thinned out evenly when they are many.

    Passes every TrainEvent on; use as `train(..., on_event=StepKeeper(logger))`.
    """

    def __init__(self, then: Callable[[Any], None]) -> None:
        """Pass on to `then`."""
        self.then = then
        self.steps: list[StepRecord] = []
        self._every = 1

    def __call__(self, event: Any) -> None:
        """Take a TrainEvent."""
        self.then(event)
        self.steps += [one for one in getattr(event, "steps", ()) if one.step % self._every == 0]
        while len(self.steps) > _MOST_POINTS:
            self._every *= 2
            self.steps = [one for one in self.steps if one.step % self._every == 0]


def log_training_page(
    run: Run, workload_slug: str, result: TrainResult, steps: Iterable[StepRecord] = ()
) -> None:
    """Log the figures and the description; called once, when the training is over."""
    curves = training_curves(workload_slug, result, steps)
    with tempfile.TemporaryDirectory(prefix="tula-") as scratch:
        write_training_figures(Path(scratch) / "figures", curves)
        run.files(scratch)
    run.describe(describe_training(workload_slug, result))


def write_training_figures(folder: Path, curves: TrainingCurves) -> None:
    """training.png, gradient_variability.png where it was measured, and the page."""
    folder.mkdir(parents=True)
    save_png(training(curves), folder / "training.png")
    if curves.gradient_variability:
        save_png(variability(curves), folder / "gradient_variability.png")
    save_training_page(folder / "training.html", curves)


def training_curves(
    workload_slug: str, result: TrainResult, steps: Iterable[StepRecord]
) -> TrainingCurves:
    """Step by step where steps were seen, else epoch by epoch."""
    seen, epochs = list(steps), result.history
    rows: list[Any] = [*seen] or [*epochs]
    batch = result.plan.global_batch_size
    return TrainingCurves(
        title=f"{workload_slug} at global batch size {batch:,}",
        train_loss=_curve(rows, "train_loss"),
        test_loss=_curve(epochs, "test_loss"),
        test_accuracy=_curve(epochs, "test_accuracy"),
        gradient_norm=_curve(rows, "gradient_norm"),
        gradient_variability=_curve(rows, "gradient_variability"),
        noise_scale=_curve(rows, "noise_scale"),
        step_time_s=_curve(rows, "step_time_s"),
    )


def _curve(rows: Iterable[StepRecord | EpochRecord], name: str) -> Curve:
    values = ((row.step, getattr(row, name, None)) for row in rows)
    return [(step, float(value)) for step, value in values if value is not None]


def describe_training(workload_slug: str, result: TrainResult) -> str:
    """What was decided and what came of it in the first line; epochs and next steps below."""
    plan = result.plan
    lines = [
        f"**{_decision(plan)}**: test accuracy {result.test_accuracy:.1%} "
        f"(best {result.best_test_accuracy:.1%}) after {result.epochs} "
        f"epoch{'s' if result.epochs != 1 else ''} in {time_words(result.wall_time_s)}.",
        "",
        f"Workload `{workload_slug}`; the decision is that of {_source(plan)}.",
        "",
        table_row(("epoch", "train loss", "test loss", "test accuracy", "step", "epoch time")),
        f"|{'---:|' * 6}",
    ]
    lines += [_row(record) for record in _some(result.history)]
    lines += [
        "",
        f"- stopped: {result.stop_reason.replace('_', ' ')}, after {result.steps:,} steps and "
        f"{result.samples:,} samples",
        f"- largest memory of a rank: {result.peak_memory_bytes / 1e9:.2f} GB",
    ]
    if result.resumed_from_step:
        lines.append(f"- resumed from step {result.resumed_from_step:,}")
    lines += ["", "**Next**", "", "- compare with what was predicted: `tula monitor <this run>`"]
    return "\n".join(lines)


def _decision(plan: BatchPlan) -> str:
    ranks = f"{plan.world_size} device{'s' if plan.world_size > 1 else ''}"
    text = f"Global batch size {plan.global_batch_size:,} on {ranks}"
    pieces = f"{plan.local_batch_size} per device"
    if plan.accumulation_steps > 1:
        pieces += f" x {plan.accumulation_steps} passes"
    return f"{text} ({pieces})"


def _source(plan: BatchPlan) -> str:
    return "the person who started it" if plan.source == "explicit" else f"`{plan.source}`"


def _row(record: EpochRecord) -> str:
    cells = [
        str(record.epoch),
        f"{record.train_loss:.4f}",
        f"{record.test_loss:.4f}",
        f"{record.test_accuracy:.1%}",
        time_words(record.step_time_s),
        time_words(record.epoch_time_s),
    ]
    return table_row(cells)


def _some(history: tuple[EpochRecord, ...], most: int = 12) -> list[EpochRecord]:
    """The epochs, or as many of them as a page has room for, the last among them."""
    every = max(1, -(-len(history) // most))
    return list(history[::-1][::every][::-1])
