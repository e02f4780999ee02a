"""What many outcomes say: best settings on validation, means on test, the gap that is recovered.

    gap        = accuracy(reference batch, plain) - accuracy(large batch, plain)
    recovered  = (accuracy(method) - accuracy(large batch, plain)) / gap

"Gap" here is a difference in test accuracy at equal budget, of which much is under-training; so
training loss stands beside it, and `at_equal_loss`: the accuracy of a method at the moment when its
training loss is what plain large-batch training ends with.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mlflow_tula.comparing.facts import Outcome, Trial

Settings = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodRow:
    """A method at a batch size, over its seeds."""

    method: str
    batch_size: int
    settings: Settings
    accuracies: tuple[float, ...]
    """By seed, as fractions."""
    train_loss: float | None
    """Mean over the runs that did not diverge."""
    at_equal_loss: float | None
    """Mean accuracy where the training loss is that of plain large-batch training at its end."""
    cpu_time_s: float
    steps: int
    diverged: int
    scaled_share: float | None = None
    recovered: float | None = None
    """Share of the gap; None where there is no gap to speak of."""
    recovered_error: float | None = None
    """One standard error of it, from the seeds of the method alone."""

    @property
    def mean(self) -> float:
        """Mean accuracy."""
        return statistics.fmean(self.accuracies)

    @property
    def std(self) -> float:
        """Standard deviation over seeds; 0 with one seed."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else 0.0

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return self.std / math.sqrt(len(self.accuracies))


def best_settings(outcomes: Iterable[Outcome]) -> Settings:
    """The settings with the best mean accuracy; the first of equals.

    A run that diverged counts with the accuracy it has, which is chance or less.
    """
    groups: dict[Settings, list[float]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.trial.settings].append(outcome.accuracy)
    return max(groups, key=lambda settings: statistics.fmean(groups[settings]))


def best_learning_rate(outcomes: Iterable[Outcome]) -> float:
    """The smallest rate whose mean accuracy is within one standard error of the best one's."""
    groups: dict[float, list[float]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.trial.task.learning_rate].append(outcome.accuracy)
    best = max(groups, key=lambda rate: statistics.fmean(groups[rate]))
    accuracies = groups[best]
    spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
    bound = statistics.fmean(accuracies) - spread / math.sqrt(len(accuracies))
    return min(rate for rate in groups if statistics.fmean(groups[rate]) >= bound)


def summarize(outcomes: Iterable[Outcome]) -> list[MethodRow]:
    """One row a method and batch size, the reference first, then as they come."""
    groups: dict[tuple[str, int], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.trial.method, outcome.trial.batch_size].append(outcome)
    plain = {size: found for (method, size), found in groups.items() if method == "plain"}
    any_trial = next(iter(groups.values()))[0].trial
    reference_size = any_trial.task.reference_batch_size
    rows = []
    for (method, size), found in groups.items():
        # the reference is held against the largest batch, each other one against its own
        against = max(plain) if size == reference_size and plain else size
        level = _mean(outcome.train_loss for outcome in plain.get(against, ()))
        rows.append(
            _row(method, size, found, level, plain.get(reference_size, ()), plain.get(size, ()))
        )
    return sorted(rows, key=lambda row: (row.batch_size, row.batch_size != reference_size))


def _row(
    method: str,
    size: int,
    found: Sequence[Outcome],
    level: float | None,
    reference: Sequence[Outcome],
    plain: Sequence[Outcome],
) -> MethodRow:
    found = sorted(found, key=lambda outcome: outcome.trial.seed)
    accuracies = tuple(outcome.accuracy for outcome in found)
    recovered = error = None
    if reference and plain and reference[0].trial.batch_size != size:
        low = statistics.fmean(outcome.accuracy for outcome in plain)
        gap = statistics.fmean(outcome.accuracy for outcome in reference) - low
        if gap > 0:
            recovered = (statistics.fmean(accuracies) - low) / gap
            spread = statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0
            error = spread / math.sqrt(len(accuracies)) / gap
    shares = [o.scaled_share for o in found if o.scaled_share is not None]
    at_level = None
    if level is not None:
        at_level = _mean(accuracy_at_loss(outcome.curve, level) for outcome in found)
    return MethodRow(
        method=method,
        batch_size=size,
        settings=found[0].trial.settings,
        accuracies=accuracies,
        train_loss=_mean(outcome.train_loss for outcome in found),
        at_equal_loss=at_level,
        cpu_time_s=statistics.fmean(outcome.cpu_time_s for outcome in found),
        steps=round(statistics.fmean(outcome.steps for outcome in found)),
        diverged=sum(outcome.diverged for outcome in found),
        scaled_share=statistics.fmean(shares) if shares else None,
        recovered=recovered,
        recovered_error=error,
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def accuracy_at_loss(curve: Sequence[tuple[float, float, float]], level: float) -> float | None:
    """Accuracy where the training loss first falls to `level`, linear in its logarithm.

    None where it never does, or did so before the first point.
    """
    for (_, before, earlier), (_, after, later) in itertools.pairwise(curve):
        if before >= level >= after and before > after > 0:
            share = math.log(before / level) / math.log(before / after)
            return earlier + share * (later - earlier)
    return None


def not_worse(row: MethodRow, rival: MethodRow) -> bool:
    """Whether a row's mean is at least the rival's less one standard error of the difference."""
    return row.mean >= rival.mean - math.hypot(row.error, rival.error)


def is_final(trial: Trial) -> bool:
    """Whether a trial is measured on the test split."""
    return trial.split == "test"
