"""Batch sizes that change over training: small first, and growing instead of a decaying rate.

- Batch warm-up: the reference batch and rate for the first epochs, then the large batch. In the
  public logs of Accordion (Agarwal et al. 2021, arXiv 2010.16248, one seed) batch 512 for epochs
  0-19 of 300 and 4096 after closes 81-111 % of the gap.
- Batch growth (Smith et al. 2018, arXiv 1711.00489): where the schedule would divide the learning
  rate by r, multiply the batch by r instead, up to the largest; then the rate decays after all.

A training loop asks `MethodRun.begin_epoch(epoch)` for the batch size and loads with that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.optim import Optimizer

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.methods.protocol import BatchPhase, MethodRun, TrainingPlan
from mlflow_tula.methods.scaling import ScalingRule, learning_rate_factor
from mlflow_tula.methods.step_scaling import check_number

LearningRateSchedule = Callable[[int], float]
"""The learning rate of an epoch, in any unit: only ratios count."""


def warm_up_batch(
    plan: TrainingPlan,
    epochs: int,
    *,
    rule: ScalingRule = "sqrt",
    factor: float = 1.0,
    multiple: int = 1,
) -> tuple[BatchPhase, ...]:
    """The reference batch at the reference rate for `epochs`, then the large batch.

    Args:
        plan: both batch sizes.
        epochs: with the small batch; 0 begins with the large one.
        rule: how the rate grows with the batch.
        factor: for rule "constant".
        multiple: the small batch is rounded to a multiple of this (the world size).
    """
    if epochs < 0:
        raise InvalidInputError(f"epochs of batch warm-up must be at least 0, not {epochs}")
    small = _rounded(plan.reference_batch_size, multiple, plan.global_batch_size)
    large = BatchPhase(
        start_epoch=epochs,
        global_batch_size=plan.global_batch_size,
        learning_rate_factor=learning_rate_factor(rule, plan.ratio, factor=factor),
    )
    return (BatchPhase(start_epoch=0, global_batch_size=small), large) if epochs else (large,)


def grow_batch(
    plan: TrainingPlan, learning_rate: LearningRateSchedule, epochs: int, *, multiple: int = 1
) -> tuple[BatchPhase, ...]:
    """Grow from the reference batch to the plan's as the given schedule would decay the rate.

    In epoch e the schedule has divided the first rate by r = lr(0) / lr(e). The batch is then
    min(r B0, B), rounded to a multiple, and what rounding and the largest batch leave over of r
    divides the rate: batch over rate is that of the schedule in every epoch. Where the schedule
    rises (a warm-up) the rate follows it and the batch stays.

    Args:
        plan: begins at `reference_batch_size`, ends at `global_batch_size`.
        learning_rate: of each epoch, positive.
        epochs: how many.
        multiple: every batch is a multiple of this (the world size).
    """
    first = check_number("the schedule's first rate", learning_rate(0), above=0)
    phases: list[BatchPhase] = []
    for epoch in range(epochs):
        decay = first / check_number("the schedule's rate", learning_rate(epoch), above=0)
        wanted = max(decay, 1.0) * plan.reference_batch_size
        batch = _rounded(int(wanted), multiple, plan.global_batch_size)
        phase = BatchPhase(
            start_epoch=epoch,
            global_batch_size=batch,
            learning_rate_factor=batch / (decay * plan.reference_batch_size),
        )
        last = phases[-1] if phases else None
        if last is None or (last.global_batch_size, last.learning_rate_factor) != (
            phase.global_batch_size,
            phase.learning_rate_factor,
        ):
            phases.append(phase)
    return tuple(phases)


def step_decay(milestones: dict[int, float]) -> LearningRateSchedule:
    """The schedule that multiplies the rate by a number at given epochs: {30: 0.1, 60: 0.1}."""

    def learning_rate(epoch: int) -> float:
        rate = 1.0
        for milestone, factor in milestones.items():
            rate *= factor if epoch >= milestone else 1.0
        return rate

    return learning_rate


def _rounded(batch_size: int, multiple: int, largest: int) -> int:
    if multiple < 1:
        raise InvalidInputError(f"multiple must be at least 1, not {multiple}")
    return min(max(batch_size // multiple * multiple, multiple), largest)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchWarmupMethod:
    """Small batches for the first epochs, the large batch after."""

    name: str = "batch_warmup"
    epochs: int = 5
    rule: ScalingRule = "sqrt"
    factor: float = 1.0

    def wrap(self, optimizer: Optimizer, plan: TrainingPlan) -> MethodRun:
        """Set the phases; the optimizer stays as it is."""
        return MethodRun(
            optimizer=optimizer,
            phases=warm_up_batch(
                plan, self.epochs, rule=self.rule, factor=self.factor, multiple=plan.world_size
            ),
            global_batch_size=plan.global_batch_size,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchGrowthMethod:
    """The batch grows where a step schedule would decay the learning rate."""

    name: str = "batch_growth"
    epochs: int = 90
    milestones: tuple[tuple[int, float], ...] = ((30, 0.1), (60, 0.1), (80, 0.1))
    """Epoch and factor of each decay that is replaced."""

    def wrap(self, optimizer: Optimizer, plan: TrainingPlan) -> MethodRun:
        """Set the phases; the optimizer stays as it is."""
        schedule = step_decay(dict(self.milestones))
        return MethodRun(
            optimizer=optimizer,
            phases=grow_batch(plan, schedule, self.epochs, multiple=plan.world_size),
            global_batch_size=plan.global_batch_size,
        )
