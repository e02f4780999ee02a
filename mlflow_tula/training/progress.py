"""How far a training run is: position, the epoch's sums, the epochs so far.

Everything here is part of a checkpoint, so that an epoch that was interrupted in its middle is
recorded as if it had not been.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from mlflow_tula.errors import TrainingError
from mlflow_tula.launch.slow import OwnTimes, slowest_rank
from mlflow_tula.training.facts import EpochRecord, StepRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Pending:
    """A step whose numbers have not been read from the device yet."""

    loss: Tensor
    """This rank's part of the mean over the global batch: the sum over ranks is that mean."""
    norm: Tensor
    variability: Tensor
    learning_rate: float
    samples: int


@dataclass(kw_only=True, slots=True)
class Tally:
    """The epoch so far; `loss` and `norm` are sums, over samples and over steps."""

    loss: float = 0.0
    samples: int = 0
    norm: float = 0.0
    num_norms: int = 0
    skipped: int = 0
    variability: float | None = None
    step_times: list[float] = field(default_factory=list)
    rank_times: list[list[float]] = field(default_factory=list)
    """Every rank's own median seconds in the steps between two checks; of this split alone."""

    @property
    def median_step_time_s(self) -> float | None:
        """The median of this rank's steps; the first ones of a process are slow."""
        return statistics.median(self.step_times) if self.step_times else None

    @property
    def rank_times_s(self) -> tuple[float, ...]:
        """Every rank's own seconds a step: the median over the epoch, without the first steps."""
        rows = self.rank_times[1:] or self.rank_times
        return tuple(statistics.median(column) for column in zip(*rows, strict=True))

    @property
    def mean_loss(self) -> float:
        """Over the epoch's samples; NaN before the first."""
        return self.loss / self.samples if self.samples else math.nan


@dataclass(kw_only=True, slots=True)
class Progress:
    """Whole epochs done, steps done in this one, totals since the beginning, and the records."""

    epoch: int = 0
    step_in_epoch: int = 0
    step: int = 0
    samples: int = 0
    elapsed_s: float = 0.0
    learning_rate: float = 0.0
    tally: Tally = field(default_factory=Tally)
    history: list[EpochRecord] = field(default_factory=list)

    def add_step(self, samples: int, learning_rate: float) -> None:
        """One more optimizer step was taken."""
        self.step += 1
        self.step_in_epoch += 1
        self.samples += samples
        self.learning_rate = learning_rate

    def count(
        self, pending: Sequence[Pending], losses: Sequence[float], times: Sequence[float]
    ) -> tuple[StepRecord, ...]:
        """Add the latest steps, with their losses summed over ranks, to the epoch's sums.

        Raises:
            TrainingError: a loss is not finite; names the step and its learning rate.
        """
        norms = torch.stack([row.norm for row in pending]).tolist()
        changes = torch.stack([row.variability for row in pending]).tolist()
        first = self.step - len(pending) + 1
        records = []
        for number, row in enumerate(pending):
            if not math.isfinite(losses[number]):
                raise TrainingError(
                    f"the training loss is {losses[number]} at step {first + number} with learning "
                    f"rate {row.learning_rate:g}: take a smaller one, or a longer warm-up"
                )
            record = StepRecord(
                step=first + number,
                epoch=self.epoch + 1,
                train_loss=losses[number],
                learning_rate=row.learning_rate,
                gradient_norm=_finite(norms[number]),
                gradient_variability=_finite(changes[number]),
                step_time_s=times[number],
            )
            self._add(record, row.samples)
            records.append(record)
        return tuple(records)

    def _add(self, record: StepRecord, samples: int) -> None:
        tally = self.tally
        tally.loss += record.train_loss * samples
        tally.samples += samples
        tally.norm += record.gradient_norm or 0.0
        tally.num_norms += record.gradient_norm is not None
        tally.skipped += record.gradient_norm is None
        tally.variability = record.gradient_variability
        tally.step_times.append(record.step_time_s)

    def finish_epoch(
        self,
        *,
        test_loss: float,
        test_accuracy: float,
        step_time_s: float,
        evaluation_time_s: float,
        peak_memory_bytes: int,
        global_batch_size: int,
    ) -> EpochRecord:
        """Record the epoch and move on to the next."""
        tally = self.tally
        slowest = slowest_rank([OwnTimes.of([seconds]) for seconds in tally.rank_times_s])
        self.epoch, self.step_in_epoch, self.tally = self.epoch + 1, 0, Tally()
        record = EpochRecord(
            epoch=self.epoch,
            step=self.step,
            samples=self.samples,
            train_loss=tally.mean_loss,
            test_loss=test_loss,
            test_accuracy=test_accuracy,
            learning_rate=self.learning_rate,
            step_time_s=step_time_s,
            epoch_time_s=sum(tally.step_times),
            evaluation_time_s=evaluation_time_s,
            throughput=global_batch_size / step_time_s,
            peak_memory_bytes=peak_memory_bytes,
            gradient_norm=tally.norm / tally.num_norms if tally.num_norms else None,
            gradient_variability=tally.variability,
            skipped_steps=tally.skipped,
            rank_times_s=tally.rank_times_s,
            slowest_rank=None if slowest is None else slowest.rank,
            slowest_rank_ratio=None if slowest is None else slowest.ratio,
        )
        self.history.append(record)
        return record

    def epochs_to_target(self, target_accuracy: float | None) -> int | None:
        """The first epoch whose test accuracy reached the target."""
        if target_accuracy is None:
            return None
        reached = (row.epoch for row in self.history if row.test_accuracy >= target_accuracy)
        return next(reached, None)

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for a checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`."""
        values = dict(data)
        values["tally"] = Tally(**values["tally"])
        values["history"] = [EpochRecord.from_dict(row) for row in values["history"]]
        return cls(**values)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
