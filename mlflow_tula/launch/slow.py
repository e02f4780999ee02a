"""Which rank holds the others up: every step of data-parallel training waits for the slowest.

A rank's own time is its step less what it waits for the others' gradients after its own last one.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from mlflow_tula.specs import Spec
from mlflow_tula.table import SLOW_RATIO


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowestRank(Spec):
    """The rank whose own steps take longest, and how many times the median of the others'."""

    rank: int
    host: str
    ratio: float

    @property
    def is_slow(self) -> bool:
        """Whether it is worth a word."""
        return self.ratio >= SLOW_RATIO

    @property
    def text(self) -> str:
        """One line for a table or a warning."""
        where = f" on host {self.host}" if self.host else ""
        return (
            f"rank {self.rank}{where} takes {self.ratio:.1f} times the median of the others: "
            "every step waits for it"
        )


def slowest_rank(times_s: Sequence[float], hosts: Sequence[str] = ()) -> SlowestRank | None:
    """The slowest rank by own seconds a step; None with one rank, or where nothing was timed."""
    if len(times_s) < 2 or min(times_s) <= 0:
        return None
    rank = max(range(len(times_s)), key=lambda place: times_s[place])
    others = [seconds for place, seconds in enumerate(times_s) if place != rank]
    return SlowestRank(
        rank=rank,
        host=hosts[rank] if len(hosts) == len(times_s) else "",
        ratio=times_s[rank] / statistics.median(others),
    )
