"""Trainings on real data: one record file for figures 2, 7, 8 and Table I, and close looks at some.

All are `mlflow_tula.compare`'s: equal epochs, the same start and the same order of samples for
every method and batch size, a rate that goes to zero, one thread a training. The learning rate is
that of the reference batch, tuned on the validation split unless it was given.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlflow_tula.comparing.facts import Outcome, Task, Trial, freeze
from mlflow_tula.files import read_json, write_json
from reproduction.settings import Settings

SAY_EVERY_S = 10.0
TWO_ERRORS = 2.0
"""Standard errors of a difference from which on it is called one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Trainings that differ by their seed alone; accuracies are fractions."""

    outcomes: tuple[Outcome, ...]

    @property
    def accuracies(self) -> tuple[float, ...]:
        """By seed."""
        return tuple(outcome.accuracy for outcome in self.outcomes)

    @property
    def mean(self) -> float:
        """Mean accuracy."""
        return statistics.fmean(self.accuracies)

    @property
    def error(self) -> float:
        """Standard error of the mean; 0 with one seed."""
        return standard_error(self.accuracies)

    @property
    def train_loss(self) -> float:
        """Mean training loss of those that did not diverge; NaN where all did."""
        known = [o.train_loss for o in self.outcomes if o.train_loss is not None]
        return statistics.fmean(known) if known else float("nan")

    @property
    def scaled_share(self) -> float:
        """Of AGS: the share of steps that were scaled; NaN of other methods."""
        known = [o.scaled_share for o in self.outcomes if o.scaled_share is not None]
        return statistics.fmean(known) if known else float("nan")


def standard_error(values: Sequence[float]) -> float:
    """Of their mean; 0 of a single one."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def above(high: Sequence[float], low: Sequence[float]) -> bool:
    """Whether the first mean is more than two standard errors above the second.

    Trainings of one seed share start and order, so the differences are taken seed by seed.
    """
    differences = [a - b for a, b in zip(high, low, strict=True)]
    return statistics.fmean(differences) > TWO_ERRORS * standard_error(differences)


def task(settings: Settings) -> Task:
    """What is trained, with the learning rate of the reference batch."""
    from mlflow_tula.compare import Plan, compare

    base = Task(
        dataset=settings.learning_dataset,
        network=settings.network,
        data_dir=settings.data_dir,
        reference_batch_size=settings.reference_batch,
        learning_rate=settings.learning_rate or 0.01,
        epochs=settings.epochs,
        decay="linear",
    )
    if settings.learning_rate is not None:
        return base
    plan = Plan(
        task=base,
        methods=("plain",),
        batch_sizes=(settings.largest,),
        seeds=1,
        tune=False,
        tune_learning_rate=True,
    )
    return compare(
        plan, records(settings), workers=settings.workers, on_outcome=Progress()
    ).plan.task


def groups(
    settings: Settings, wanted: Mapping[str, tuple[str, Mapping[str, Any], int]]
) -> dict[str, Group]:
    """Train and group; `wanted` maps a name of yours to (method, its settings, batch size).

    Each is trained on all training data and measured on the test split, once a seed: what is shown
    is a whole sweep, and nothing is chosen by it.
    """
    from mlflow_tula.compare import run_trials

    base = task(settings)
    trials = {
        (name, seed): Trial(
            task=base, method=method, settings=freeze(given), batch_size=size, seed=seed
        )
        for name, (method, given, size) in wanted.items()
        for seed in range(settings.seeds)
    }
    outcomes = run_trials(
        list(trials.values()), records(settings), workers=settings.workers, on_outcome=Progress()
    )
    found = dict(zip(trials, outcomes, strict=True))
    return {
        name: Group(outcomes=tuple(found[name, seed] for seed in range(settings.seeds)))
        for name in wanted
    }


def records(settings: Settings) -> Path:
    """The record file; it begins with those on record where they were asked for."""
    path = settings.folder / "trainings" / f"{settings.learning_dataset.replace(':', '.')}.jsonl"
    if settings.records is not None and not path.exists():
        known = settings.records / "generalization" / f"{settings.learning_dataset}.jsonl"
        if known.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(known, path)
    return path


def look_closely(settings: Settings, trial: Trial, *, snapshots: int) -> dict[str, Any]:
    """`mlflow_tula.diagnose` of one training, kept in the folder."""
    from mlflow_tula.diagnose import diagnose

    asked = json.dumps([trial.to_dict(), snapshots], sort_keys=True)
    name = hashlib.sha256(asked.encode()).hexdigest()[:12]
    path = settings.folder / "trainings" / f"closely-{name}.json"
    if not path.exists():
        began = time.monotonic()
        found = diagnose(trial, snapshots=snapshots).to_dict()
        write_json(path, {**found, "wall_s": time.monotonic() - began})
    return read_json(path, made_by="examples/paper/run.py")


def first_trial(asked: Settings, size: int, **changes: Any) -> Trial:
    """The first seed's plain training at this batch size, with some fields changed."""
    return replace(Trial(task=task(asked), method="plain", batch_size=size, seed=0), **changes)


def data_note(settings: Settings) -> str:
    """What was trained."""
    return (
        f"Trained: {settings.learning_dataset}, network {settings.network}, "
        f"{settings.epochs:g} epochs at every batch size, {settings.seeds} seeds, learning rate "
        f"tuned at batch {settings.reference_batch}."
        if settings.learning_rate is None
        else f"Trained: {settings.learning_dataset}, network {settings.network}, "
        f"{settings.epochs:g} epochs at every batch size, {settings.seeds} seeds, learning rate "
        f"{settings.learning_rate:g} at batch {settings.reference_batch}."
    )


class Progress:
    """A line now and then, where trainings take their time."""

    def __init__(self) -> None:
        """Nothing was said yet."""
        self._said = time.monotonic()

    def __call__(self, outcome: Outcome, done: int, total: int) -> None:
        """Take an outcome of `compare`."""
        from mlflow_tula.cli.render import note

        if time.monotonic() - self._said > SAY_EVERY_S:
            self._said = time.monotonic()
            trial = outcome.trial
            note(f"trainings {done}/{total}: {trial.method} at batch {trial.batch_size}")


def seconds(settings: Settings, found: Iterable[Group]) -> float:
    """Wall time of these trainings, side by side as they ran."""
    together = sum(o.wall_time_s for group in found for o in group.outcomes)
    return together / (settings.workers or len(os.sched_getaffinity(0)))
