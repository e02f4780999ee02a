"""What a training run notes of its ranks: whose steps take longest, and how they share a batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlflow_tula.launch.slow import OwnTimes, slowest_rank
from mlflow_tula.training.balance import Balancer
from mlflow_tula.training.facts import BatchPlan
from mlflow_tula.training.peers import Peers
from mlflow_tula.training.progress import Tally

if TYPE_CHECKING:
    from mlflow_tula.training.loop import Setup

_ENOUGH_LOOKS, _MOST_LOOKS = 10, 40
"""Looks at the ranks' times (half a second apart) before one of them is named within an epoch, and
the latest that count."""
_ENOUGH_STEPS = 10
"""Steps that were timed before one is named at an epoch's end."""


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
        self._looks: deque[list[OwnTimes]] = deque(maxlen=_MOST_LOOKS)
        self._num_steps = 0
        self._begun = False
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
        """This rank's own times in their places among zeros: their sum tells all of them."""
        if self._peers.world_size == 1 or not self._timed:
            return []
        mine = OwnTimes.of([max(t - w, 0.0) for t, w in zip(times, waits, strict=True)])
        told = [0.0] * (3 * self._peers.world_size)
        first = 3 * self._peers.rank
        told[first : first + 3] = mine.low_s, mine.median_s, mine.high_s
        return told

    def take(self, tally: Tally, told: Sequence[float], num_steps: int) -> None:
        """Note all ranks' times; where they are to be balanced, move the split."""
        if not told:
            return
        ranks = [
            OwnTimes(low_s=low, median_s=middle, high_s=high)
            for low, middle, high in zip(told[::3], told[1::3], told[2::3], strict=True)
        ]
        times_s = [one.median_s for one in ranks]
        tally.rank_times.append(times_s)
        if self._begun:  # the first step of a process is like no other
            self._looks.append(ranks)
            self._num_steps += num_steps
        self._begun = True
        if len(self._looks) >= _ENOUGH_LOOKS:
            self._judge()
        if self._balancer is None:
            return
        split = self._balancer.add(self.plan.sizes, times_s, num_steps)
        if split is not None:
            self._split(split)
            tally.rank_times.clear()
            self._looks.clear()
            self._num_steps = 0
            self._moved = True
            self._news.append(f"local batch sizes are now {', '.join(map(str, split))}")

    def judge(self) -> None:
        """At an epoch's end: name a rank that was slow, once."""
        if self._num_steps >= _ENOUGH_STEPS:
            self._judge()

    def _judge(self) -> None:
        ranks = [OwnTimes.over(windows) for windows in zip(*self._looks, strict=True)]
        slowest = slowest_rank(ranks, self._hosts)
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
