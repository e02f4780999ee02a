"""What a training run notes of its ranks: whose steps take longest, and how they share a batch."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlflow_tula.launch.slow import slowest_rank
from mlflow_tula.training.balance import Balancer
from mlflow_tula.training.facts import BatchPlan, EpochRecord
from mlflow_tula.training.peers import Peers
from mlflow_tula.training.progress import Tally

if TYPE_CHECKING:
    from mlflow_tula.training.loop import Setup

_ENOUGH_CHECKS = 10
"""Looks at the ranks' times (half a second apart) before one of them is named within an epoch."""


class RankWatch:
    """Every rank's own step times, alike on all of them, and what follows from them."""

    def __init__(self, setup: Setup, peers: Peers) -> None:
        """Learn the ranks' hosts, once."""
        self._setup, self._peers = setup, peers
        self.plan = setup.plan
        self.cut_before = ""
        self.warnings: list[str] = []
        self._news: list[str] = []
        self._named: set[int] = set()
        self._moved = False
        self._hosts = peers.hosts()
        self._timed = setup.times_ranks
        balanced = self.plan.balance and self._timed and peers.world_size > 1
        self._balancer = Balancer(smallest=setup.batches.smallest) if balanced else None

    def resume(self, saved: Mapping[str, Any] | None) -> None:
        """Go on with the split of a checkpoint, where there are as many ranks as then."""
        if not saved:
            return
        plan = BatchPlan.from_dict(saved)
        if plan.world_size == self.plan.world_size and self._balancer is not None:
            self._split(plan.sizes)
        elif plan.words != self.plan.words:
            self.cut_before = f" (cut as {plan.words} before)"

    def own_times(self, times: Sequence[float], waits: Sequence[float]) -> list[float]:
        """This rank's median own time in its place among zeros: their sum tells all of them."""
        if self._peers.world_size == 1 or not self._timed:
            return []
        own = [0.0] * self._peers.world_size
        pairs = zip(times, waits, strict=True)
        own[self._peers.rank] = max(statistics.median(t - w for t, w in pairs), 0.0)
        return own

    def take(self, tally: Tally, times_s: Sequence[float], num_steps: int) -> None:
        """Note all ranks' times; where they are to be balanced, move the split."""
        if not times_s:
            return
        tally.rank_times.append(list(times_s))
        if len(tally.rank_times) >= _ENOUGH_CHECKS:
            self._judge(tally.rank_times_s)
        if self._balancer is None:
            return
        split = self._balancer.add(self.plan.sizes, times_s, num_steps)
        if split is not None:
            self._split(split)
            tally.rank_times.clear()
            self._moved = True
            self._news.append(f"local batch sizes are now {', '.join(map(str, split))}")

    def judge(self, record: EpochRecord) -> None:
        """Name a rank that was slow through an epoch, once."""
        self._judge(record.rank_times_s)

    def _judge(self, times_s: Sequence[float]) -> None:
        slowest = slowest_rank(times_s, self._hosts)
        if slowest is not None and slowest.is_slow and slowest.rank not in self._named:
            self._named.add(slowest.rank)
            self.warnings.append(slowest.text)
            self._news.append(slowest.text)

    def moved(self) -> bool:
        """Whether the split has changed since the last look."""
        moved, self._moved = self._moved, False
        return moved

    def news(self) -> Iterator[str]:
        """What is to be told, once."""
        news, self._news = self._news, []
        yield from news

    def _split(self, sizes: Sequence[int]) -> None:
        self._setup.batches.resize(sizes)
        self.plan = self.plan.with_sizes(sizes)
