"""Which steps count, and when enough were measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from mlflow_tula.probing.settings import ProbeSettings

SLOW_START = 1.3
"""A leading step this many times slower than the later ones is still warm-up."""
HARD_LIMIT = 2.0
"""Noise does not count against the time limit, up to this multiple of it."""


def median_interval(values: Sequence[float], *, miss: float = 0.05) -> tuple[float, float] | None:
    """Distribution-free interval of the median from order statistics; None below six values.

    The k-th smallest and k-th largest of n values hold the median with probability
    1 - 2 P(Binomial(n, 1/2) < k); k is the largest for which that is at least 1 - `miss`.
    """
    ordered, n = sorted(values), len(values)
    below, k = 0.0, 0
    while k < n // 2:
        below += math.comb(n, k) * 0.5**n
        if 2 * below > miss:
            break
        k += 1
    return None if k == 0 else (ordered[k - 1], ordered[n - k])


class StepSeries:
    """All steps of a probe in order: a growing warm-up, then the timed ones.

    The first `warmup_steps` never count. Later leading steps slower than SLOW_START times the
    median of the second half are moved to the warm-up, up to `max_warmup_steps` (ten-fold slow
    first steps otherwise bend the median of a short series). The median takes care of single
    outliers. The time limit counts every step as the fastest one, so that slow first steps and
    outliers do not end a series before it is steady, and the slowest step never.
    """

    def __init__(self, settings: ProbeSettings) -> None:
        """Start empty."""
        self.settings = settings
        self.seconds: list[float] = []
        self.reason = ""

    def add(self, seconds: float) -> bool:
        """Take one more step's time; True when no further step is needed."""
        self.seconds.append(seconds)
        self.reason = self._why_done()
        return bool(self.reason)

    @property
    def num_warmup(self) -> int:
        """Steps that do not count."""
        first = self.settings.warmup_steps
        if len(self.seconds) <= first:
            return len(self.seconds)
        typical = statistics.median(self.seconds[len(self.seconds) // 2 :])
        while (
            first < min(self.settings.max_warmup_steps, len(self.seconds) - 1)
            and self.seconds[first] > SLOW_START * typical
        ):
            first += 1
        # A step that looked slow may not look so any more: then it would be one too many.
        return max(first, len(self.seconds) - self.settings.max_steps)

    @property
    def timed(self) -> list[float]:
        """The steps that count."""
        return self.seconds[self.num_warmup :]

    def _why_done(self) -> str:
        timed = self.timed
        if len(timed) < self.settings.min_steps:
            return ""
        middle = statistics.median(timed)
        interval = median_interval(timed)
        if interval is not None:
            width = max(middle - interval[0], interval[1] - middle)
            if width <= self.settings.tolerance * middle:
                return f"median known within {self.settings.tolerance:.0%}"
        if len(timed) >= self.settings.max_steps:
            return "step limit"
        limit = self.settings.time_limit_s
        if len(timed) * min(timed) >= limit or sum(timed) - max(timed) >= HARD_LIMIT * limit:
            return "time limit"
        return ""
