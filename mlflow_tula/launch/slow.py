"""Which rank holds the others up: every step of data-parallel training waits for the slowest.

A rank's own time is its step less what it waits for the others' gradients after its own last one.
Steps scatter, most of all on a machine that does other work: a rank is called slow only where its
excess lies beyond that scatter.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from mlflow_tula.specs import Spec
from mlflow_tula.table import SLOW_RATIO


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnTimes(Spec):
    """A rank's own seconds a step: the median, and the quartiles between which half of them lie."""

    low_s: float
    median_s: float
    high_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self:
        """Of several steps, at least one."""
        middle = statistics.median(seconds)
        if len(seconds) == 1:
            return cls(low_s=middle, median_s=middle, high_s=middle)
        low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(low_s=low, median_s=middle, high_s=high)

    @classmethod
    def over(cls, windows: Iterable[OwnTimes]) -> Self:
        """Of several windows of steps: the wider of their usual scatter and that between them."""
        rows = list(windows)
        between = cls.of([row.median_s for row in rows])
        return cls(
            low_s=min(statistics.median(row.low_s for row in rows), between.low_s),
            median_s=between.median_s,
            high_s=max(statistics.median(row.high_s for row in rows), between.high_s),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowestRank(Spec):
    """The rank whose own steps take longest, and how many times the median of the others'.

    `apart` says whether three quarters of its steps take longer than three quarters of theirs.
    """

    rank: int
    host: str
    ratio: float
    apart: bool

    @property
    def is_slow(self) -> bool:
        """Whether it is worth a word: much slower, and not by the scatter of steps."""
        return self.ratio >= SLOW_RATIO and self.apart

    @property
    def text(self) -> str:
        """One line for a table or a warning."""
        where = f" on host {self.host}" if self.host else ""
        return (
            f"rank {self.rank}{where} takes {self.ratio:.1f} times the median of the others: "
            "every step waits for it"
        )


def slowest_rank(times: Sequence[OwnTimes], hosts: Sequence[str] = ()) -> SlowestRank | None:
    """The slowest rank by own seconds a step; None with one rank, or where nothing was timed."""
    if len(times) < 2 or min(one.median_s for one in times) <= 0:
        return None
    rank = max(range(len(times)), key=lambda place: times[place].median_s)
    others = [one for place, one in enumerate(times) if place != rank]
    return SlowestRank(
        rank=rank,
        host=hosts[rank] if len(hosts) == len(times) else "",
        ratio=times[rank].median_s / statistics.median(one.median_s for one in others),
        apart=times[rank].low_s > statistics.median(one.high_s for one in others),
    )
