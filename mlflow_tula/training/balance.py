"""Uneven local batches that make ranks take equally long (dynamic batching, arXiv 2305.12213).

    b_r <- b_r * T / t_r,   T such that the sum stays the same

t_r is a rank's own time a step, taken as proportional to its samples; what it has of a floor is
made good by the next adjustment, since the rule rests only where all times are equal. Every rank
has the same times and so comes to the same split. Adjustments are spaced out (5, 10, 20, ...
steps), and a split whose times are within DEADBAND of each other is left alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

DEADBAND = 0.08
"""Slowest over fastest rank, less one, that is not worth an adjustment."""
MOST_TIMES_EVEN = 2.0
"""No rank takes more than so many times an even share: its memory was planned for one."""
_FIRST_STEPS = 5


def equalised(
    sizes: Sequence[int], times_s: Sequence[float], *, smallest: int = 1
) -> tuple[int, ...]:
    """Local batch sizes with the same sum under which ranks take equally long.

    Args:
        sizes: local batch size of every rank now.
        times_s: own seconds of every rank's step with them.
        smallest: samples a rank must keep.
    """
    if min(times_s) <= 0 or max(times_s) / min(times_s) - 1 < DEADBAND:
        return tuple(sizes)
    speeds = [size / seconds for size, seconds in zip(sizes, times_s, strict=True)]
    total = sum(sizes)
    most = max(int(MOST_TIMES_EVEN * total / len(sizes)), max(sizes))
    wanted = [speed * total / sum(speeds) for speed in speeds]
    floors = [min(max(int(size), smallest), most) for size in wanted]
    # The last samples go where the fraction that was cut off is largest.
    order = sorted(range(len(sizes)), key=lambda rank: int(wanted[rank]) - wanted[rank])
    missing, place = total - sum(floors), 0
    while missing:
        rank = order[place % len(order)]
        step = 1 if missing > 0 else -1
        if smallest <= floors[rank] + step <= most:
            floors[rank] += step
            missing -= step
        place += 1
    return tuple(floors)


class Balancer:
    """Follows the ranks' own times and says when the split is to change."""

    def __init__(self, *, smallest: int = 1) -> None:
        """Nothing was timed yet."""
        self._smallest = smallest
        self._seen: list[tuple[float, ...]] = []
        self._steps = 0
        self._wait = _FIRST_STEPS

    def add(
        self, sizes: Sequence[int], times_s: Sequence[float], num_steps: int
    ) -> tuple[int, ...] | None:
        """Take the medians of the latest steps; the new split, or None to go on as it is.

        Args:
            sizes: local batch size of every rank in those steps.
            times_s: own seconds of every rank.
            num_steps: how many steps they are medians of.
        """
        self._seen.append(tuple(times_s))
        self._steps += num_steps
        if self._steps < self._wait or len(self._seen) < 2:
            return None
        times = [statistics.median(column) for column in zip(*self._seen, strict=True)]
        self._seen, self._steps = [], 0
        self._wait *= 2
        split = equalised(sizes, times, smallest=self._smallest)
        return None if split == tuple(sizes) else split
