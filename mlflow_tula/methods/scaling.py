"""Learning-rate scaling: a larger batch takes larger steps, after a warm-up, perhaps clipped.

    linear  lr = B / B0 * lr0          Goyal et al. 2017, arXiv 1706.02677, with gradual warm-up:
    sqrt    lr = sqrt(B / B0) * lr0    lr0 to lr in equal increments over the first epochs
                                       Krizhevsky 2014, arXiv 1404.5997; for Adam Malladi et al.
                                       2022, arXiv 2205.10287

Warm-up is torch's own LinearLR, clipping this package's hook with torch's coefficient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.methods.clipping import NormClipping, PercentileClipping
from mlflow_tula.methods.protocol import MethodRun, TrainingPlan
from mlflow_tula.methods.step_scaling import check_number

ScalingRule = Literal["linear", "sqrt", "constant"]


def learning_rate_factor(
    rule: ScalingRule, ratio: float, *, factor: float = 1.0, cap: float | None = None
) -> float:
    """By how much a batch `ratio` times the reference scales the learning rate.

    Args:
        rule: linear or sqrt in the ratio, or a constant of your own.
        ratio: batch over reference batch, at least 1.
        factor: the constant for rule "constant".
        cap: the largest factor allowed.
    """
    check_number("the batch ratio", ratio, at_least=1)
    if rule == "linear":
        scaled = ratio
    elif rule == "sqrt":
        scaled = math.sqrt(ratio)
    elif rule == "constant":
        scaled = check_number("the learning-rate factor", factor, above=0)
    else:
        raise InvalidInputError(f"the rule must be linear, sqrt or constant, not {rule!r}")
    return scaled if cap is None else min(scaled, check_number("cap", cap, above=0))


def scale_learning_rate(optimizer: Optimizer, factor: float) -> None:
    """Multiply every group's learning rate, and the one that schedulers start from."""
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
        if "initial_lr" in group:
            group["initial_lr"] = group["initial_lr"] * factor


def warm_up(optimizer: Optimizer, steps: int, factor: float) -> LRScheduler:
    """Gradual warm-up from the reference rate to `factor` times it, in `steps` optimizer steps.

    The optimizer already carries the scaled rate. With no steps or a factor of at most 1 the
    schedule does nothing: there is nothing to warm up to.
    """
    start = 1.0 / factor if factor > 1 and steps > 0 else 1.0
    return LinearLR(optimizer, start_factor=start, end_factor=1.0, total_iters=max(steps, 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainMethod:
    """The reference learning rate, whatever the batch: the baseline."""

    name: str = "plain"

    def wrap(self, optimizer: Optimizer, plan: TrainingPlan) -> MethodRun:
        """Leave everything as it is."""
        return MethodRun(optimizer=optimizer, global_batch_size=plan.global_batch_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingMethod:
    """A scaled learning rate with warm-up, and clipping where asked for."""

    name: str = "scaling"
    rule: ScalingRule = "linear"
    factor: float = 1.0
    """For rule "constant"."""
    cap: float | None = None
    warmup_epochs: float | None = None
    """None: a tenth of the training, at most 5 epochs (see `TrainingPlan.warmup_steps`)."""
    max_norm: float | None = None
    clip_percentile: float | None = None
    """Clip at this percentile of past norms (AutoClip) instead of at a fixed norm."""

    def __post_init__(self) -> None:
        """Refuse two clips at once."""
        if self.max_norm is not None and self.clip_percentile is not None:
            raise InvalidInputError("clip at max_norm or at clip_percentile, not at both")
        if self.warmup_epochs is not None:
            check_number("warmup_epochs", self.warmup_epochs, at_least=0)

    def wrap(self, optimizer: Optimizer, plan: TrainingPlan) -> MethodRun:
        """Scale the rate, warm up to it, clip."""
        factor = learning_rate_factor(self.rule, plan.ratio, factor=self.factor, cap=self.cap)
        scale_learning_rate(optimizer, factor)
        schedule = warm_up(optimizer, plan.warmup_steps(self.warmup_epochs), factor)
        stepping: Optimizer = optimizer
        if self.max_norm is not None:
            stepping = NormClipping(optimizer, self.max_norm)
        elif self.clip_percentile is not None:
            stepping = PercentileClipping(optimizer, self.clip_percentile)
        return MethodRun(
            optimizer=stepping, schedule=schedule, global_batch_size=plan.global_batch_size
        )
