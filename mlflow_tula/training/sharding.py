"""Which samples a rank sees in which pass: every decomposition of a batch sees the same batch.

    epoch e      one permutation of the training split, from (seed, e) alone
    step s       samples [s B, (s + 1) B) of it, B the global batch size
    rank r       the r-th contiguous part of those, cut into accumulation passes

So 64 samples on one rank, 2 x 32, 24 + 40, and 32 with two accumulation passes take the same
steps, a training resumes in the middle of an epoch, and there is no partial accumulation but the
last step of an epoch without drop_last. Ranks' parts are even, or in proportion to their local
batch sizes; each pass is weighted by its samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Sampler

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.training.facts import BatchPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShare:
    """A rank's part of one optimizer step."""

    samples: int
    """Of the whole step, over all ranks."""
    passes: tuple[tuple[int, int], ...]
    """(first, last + 1) of each pass, as places in the epoch's permutation."""


class ShardedBatches(Sampler[list[int]]):
    """A batch sampler for one rank: yields the samples of one pass at a time.

    `start(epoch, step)` sets where the next iteration begins. `smallest` samples must be in every
    pass (two with batch normalisation); what a last step cannot give to every rank so is left
    out. Every rank takes as many passes a step as the others.
    """

    def __init__(
        self,
        dataset_size: int,
        plan: BatchPlan,
        *,
        rank: int = 0,
        seed: int = 0,
        drop_last: bool = True,
        smallest: int = 1,
    ) -> None:
        """Refuse a batch larger than the dataset."""
        if plan.global_batch_size > dataset_size:
            raise InvalidInputError(
                f"global_batch_size must be at most the dataset's {dataset_size} training samples, "
                f"not {plan.global_batch_size}"
            )
        if min(plan.sizes) < smallest:
            raise InvalidInputError(
                "local_batch_size must be at least 2 for a model with batch normalisation, not 1: "
                "take a larger global batch size or fewer devices"
            )
        self.smallest = smallest
        self._size = dataset_size
        self._plan = plan
        self._rank = rank
        self._seed = seed
        self._epoch = self._first_step = 0
        remainder = 0 if drop_last else dataset_size % plan.global_batch_size
        # How many come out does not depend on the split: that may change while training goes on.
        self._last = next(
            (n for n in range(remainder, 0, -1) if self._num_passes(n) is not None), 0
        )
        self._sizes = plan.sizes
        self._known: dict[int, tuple[int, list[int]]] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Local batch size of every rank, as it is now."""
        return self._sizes

    def resize(self, sizes: Sequence[int]) -> None:
        """Split every step from now on so; an iteration that has begun is not to be used again."""
        self._sizes = self._plan.with_sizes(sizes).sizes
        self._known.clear()

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a whole epoch."""
        return self._size // self._plan.global_batch_size + (self._last > 0)

    @property
    def samples_per_epoch(self) -> int:
        """Samples of a whole epoch, over all ranks."""
        return (
            self._size // self._plan.global_batch_size * self._plan.global_batch_size + self._last
        )

    def share(self, step: int) -> StepShare:
        """This rank's part of step `step` of any epoch."""
        begin = step * self._plan.global_batch_size
        full = self._size // self._plan.global_batch_size
        samples = self._plan.global_batch_size if step < full else self._last
        pieces, counts = self._counts(samples)
        low, mine = begin + sum(counts[: self._rank]), counts[self._rank]
        parts = (_part(mine, pieces, piece) for piece in range(pieces))
        return StepShare(
            samples=samples, passes=tuple((low + first, low + end) for first, end in parts)
        )

    def _counts(self, samples: int) -> tuple[int, list[int]]:
        """Passes of a step of so many samples, and every rank's part of it."""
        if samples not in self._known:
            pieces = self._num_passes(samples)
            assert pieces is not None, "the last step was cut to what can be shared"
            counts = shared_out(samples, self._sizes, pieces=pieces, smallest=self.smallest)
            self._known[samples] = pieces, counts
        return self._known[samples]

    def _num_passes(self, samples: int) -> int | None:
        """Passes in which every rank can take its part of so many samples; None: in none."""
        least = self._plan.world_size * self.smallest
        most = self._plan.local_batch_size * self._plan.world_size
        pieces = -(-samples // most)
        return pieces if pieces * least <= samples else None

    def start(self, epoch: int, step: int = 0) -> None:
        """Begin the next iteration at this step of this epoch, both counted from 0."""
        self._epoch, self._first_step = epoch, step

    def __iter__(self) -> Iterator[list[int]]:
        """The passes of the rest of the epoch."""
        order = epoch_order(self._size, self._seed, self._epoch)
        for step in range(self._first_step, self.steps_per_epoch):
            for first, end in self.share(step).passes:
                yield order[first:end].tolist()

    def __len__(self) -> int:
        """Passes of the rest of the epoch."""
        return sum(
            len(self.share(step).passes) for step in range(self._first_step, self.steps_per_epoch)
        )


class EvaluationBatches(Sampler[list[int]]):
    """Every sample of the test split on exactly one rank, in batches; nothing doubled or left.

    With `equal` each rank yields as many batches as the others, for models whose forward pass
    needs all ranks: those past `num_real` repeat a sample, and are not to be counted.
    """

    def __init__(
        self, dataset_size: int, batch_size: int, *, rank: int, world_size: int, equal: bool = False
    ) -> None:
        """A rank takes every `world_size`-th sample."""
        self._mine = range(rank, dataset_size, world_size)
        self._batch_size = batch_size
        self.num_real = -(-len(self._mine) // batch_size)
        most = -(-len(range(0, dataset_size, world_size)) // batch_size)
        self._num_repeats = most - self.num_real if equal else 0

    def __iter__(self) -> Iterator[list[int]]:
        """Batches in ascending order."""
        for start in range(0, len(self._mine), self._batch_size):
            yield list(self._mine[start : start + self._batch_size])
        for _ in range(self._num_repeats):
            yield [0]

    def __len__(self) -> int:
        """Batches of this rank."""
        return self.num_real + self._num_repeats


def epoch_order(dataset_size: int, seed: int, epoch: int) -> Tensor:
    """The order of an epoch's samples, on any machine the same."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(dataset_size, generator=generator)


def _part(total: int, parts: int, index: int) -> tuple[int, int]:
    """(first, last + 1) of the index-th of `parts` nearly equal parts of `total`."""
    return index * total // parts, (index + 1) * total // parts


def shared_out(
    samples: int, sizes: Sequence[int], *, pieces: int = 1, smallest: int = 1
) -> list[int]:
    """Parts of `samples` in proportion to `sizes`: whole numbers that add up to it exactly.

    Each part can be cut into `pieces` of at least `smallest` and at most its size; `pieces` is one
    that makes that possible (`pieces * smallest * len(sizes) <= samples <= pieces * sum(sizes)`).
    """
    total = sum(sizes)
    ends = [end * samples // total for end in itertools.accumulate(sizes)]
    wanted = [end - start for start, end in itertools.pairwise([0, *ends])]
    lows = [pieces * smallest] * len(sizes)
    highs = [pieces * size for size in sizes]
    counts = [
        min(max(count, low), high) for count, low, high in zip(wanted, lows, highs, strict=True)
    ]
    missing = samples - sum(counts)
    for rank in range(len(sizes)):
        moved = min(missing, highs[rank] - counts[rank]) if missing > 0 else 0
        moved = max(missing, lows[rank] - counts[rank]) if missing < 0 else moved
        counts[rank] += moved
        missing -= moved
    return counts
