"""Step times of a loop, sorted by the batch they belong to; numbers only.

A loop has one batch size, and smaller ones where an epoch ends: the one with the most steps is the
loop's. Intervals in which an epoch began or an evaluation ran are kept apart, and serve only where
there are no others.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from mlflow_tula.integrations.facts import StepKey

MOST_KEPT = 10_000
"""Latest intervals of each batch size that are kept."""

MOST_SIZES = 200
_TO_SIGMA = 1.4826  # a normal distribution's standard deviation over its median absolute deviation


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSummary:
    """The loop's own batch and its times; `between_epochs`: no interval was without a pause."""

    key: StepKey | None
    step_time_s: float
    step_time_std_s: float
    num_steps: int
    between_epochs: bool


@dataclass(slots=True)
class _Intervals:
    """Seconds of one batch size, and how many there were in all."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_KEPT))
    count: int = 0


class StepTimes:
    """Collects intervals in the training thread; summaries may be asked for in another."""

    def __init__(self) -> None:
        """Start with none."""
        self._steady: dict[StepKey | None, _Intervals] = {}
        self._paused: dict[StepKey | None, _Intervals] = {}

    def add(self, seconds: float, key: StepKey | None, *, paused: bool) -> None:
        """Take one interval from the start of a step to the start of the next.

        Args:
            seconds: its length, without what the observer itself took.
            key: the batch, None where it was not seen.
            paused: an epoch began in it, or an evaluation ran.
        """
        where = self._paused if paused else self._steady
        kept = where.get(key)
        if kept is None:
            if len(where) >= MOST_SIZES:
                return
            kept = where[key] = _Intervals()
        kept.seconds.append(seconds)
        kept.count += 1

    def latest(self, count: int) -> float | None:
        """Median of the last `count` intervals of the loop's own batch."""
        found = _most(self._steady)
        values = list(found[1].seconds)[-count:] if found else []
        return float(np.median(values)) if values else None

    def summary(self) -> StepSummary | None:
        """Median and spread at the loop's own batch; None before the first interval."""
        found, between_epochs = _most(self._steady), False
        if found is None:
            found, between_epochs = _most(self._paused), True
        if found is None:
            return None
        key, kept = found
        values = np.array(kept.seconds, dtype=float)
        median = float(np.median(values))
        return StepSummary(
            key=key,
            step_time_s=median,
            step_time_std_s=_TO_SIGMA * float(np.median(np.abs(values - median))),
            num_steps=kept.count,
            between_epochs=between_epochs,
        )


def _most(intervals: dict[StepKey | None, _Intervals]) -> tuple[StepKey | None, _Intervals] | None:
    """The batch with the most steps; one that is known before one that is not."""
    entries = list(intervals.items())
    known = [entry for entry in entries if entry[0] is not None]
    return max(known or entries, key=lambda entry: entry[1].count, default=None)
