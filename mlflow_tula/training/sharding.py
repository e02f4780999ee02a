"""Which samples a rank sees in which pass: every decomposition of a batch sees the same batch.

    epoch e      one permutation of the training split, from (seed, e) alone
    step s       samples [s B, (s + 1) B) of it, B the global batch size
    rank r       the r-th contiguous part of those, cut into accumulation passes

So 64 samples on one rank, 2 x 32, and 32 with two accumulation passes take the same steps, a
training resumes in the middle of an epoch, and there is no partial accumulation but the last step
of an epoch without drop_last: that one is cut evenly, and each pass is weighted by its samples.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    pass (two with batch normalisation); a last step that cannot give them to every rank is left
    out.
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
        if plan.local_batch_size < smallest:
            raise InvalidInputError(
                "local_batch_size must be at least 2 for a model with batch normalisation, not 1: "
                "take a larger global batch size or fewer devices"
            )
        self._size = dataset_size
        self._plan = plan
        self._rank = rank
        self._seed = seed
        self._smallest = smallest
        self._epoch = self._first_step = 0
        remainder = 0 if drop_last else dataset_size % plan.global_batch_size
        # Batches of two cannot be cut evenly from an odd number without one of a single sample.
        unit = plan.world_size * (2 if smallest > 1 and plan.local_batch_size == 2 else 1)
        self._last = remainder // unit * unit if remainder >= plan.world_size * smallest else 0

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
        low, high = _part(samples, self._plan.world_size, self._rank)
        pieces = -(-(high - low) // self._plan.local_batch_size)
        parts = (_part(high - low, pieces, piece) for piece in range(pieces))
        passes = tuple((begin + low + first, begin + low + end) for first, end in parts)
        return StepShare(samples=samples, passes=passes)

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
    """Every sample of the test split on exactly one rank, in batches; nothing doubled or left."""

    def __init__(self, dataset_size: int, batch_size: int, *, rank: int, world_size: int) -> None:
        """A rank takes every `world_size`-th sample."""
        self._mine = range(rank, dataset_size, world_size)
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        """Batches in ascending order."""
        for start in range(0, len(self._mine), self._batch_size):
            yield list(self._mine[start : start + self._batch_size])

    def __len__(self) -> int:
        """Batches of this rank."""
        return -(-len(self._mine) // self._batch_size)


def epoch_order(dataset_size: int, seed: int, epoch: int) -> Tensor:
    """The order of an epoch's samples, on any machine the same."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(dataset_size, generator=generator)


def _part(total: int, parts: int, index: int) -> tuple[int, int]:
    """(first, last + 1) of the index-th of `parts` nearly equal parts of `total`."""
    return index * total // parts, (index + 1) * total // parts
