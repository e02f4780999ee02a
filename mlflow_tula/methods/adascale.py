"""AdaScale SGD (Johnson et al. 2020, arXiv 2007.05105): the learning-rate factor that noise allows.

    sigma^2   variance of a reference batch's gradient, mu^2 the squared norm of its mean
    r = (sigma^2 + mu^2) / (sigma^2 / S + mu^2)          gain, between 1 and S = B / B0
    lr_t = r_t lr(tau_t);   tau_{t+1} = tau_t + r_t      scale-invariant steps

Estimated from the n shards g_i a step's gradient is the mean of (ranks or accumulation passes):

    v = n / (n - 1) (mean |g_i|^2 - |mean g_i|^2)        variance of one shard's gradient
    sigma^2 = v S / n;   mu^2 = |mean g_i|^2 - v / n     shards of B / n samples; n = S in the paper

each step's estimates cut off at 1e-6 and at 0; both averaged with weight theta = max(1 - S / 1000,
0) on the past, but by the plain mean of all steps while there are fewer than 1 / (1 - theta)
(appendix B.3, as fairscale documents and implements it; the paper's text was not at hand). Own
code, some lines of it: fairscale's is archived and adaptdl's has not been released since 2022.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.methods.protocol import MethodRun, TrainingPlan
from mlflow_tula.methods.step_scaling import (
    OnNonfinite,
    StepScaling,
    check_number,
    gradient_norm,
)
from mlflow_tula.methods.wrapper import parameters_with_gradients

_SMALLEST_VARIANCE = 1e-6


def adascale_gain(variance: Tensor, squared_mean: Tensor, scale: float) -> Tensor:
    """R for a reference batch's gradient variance and squared mean norm; 1 where both are 0."""
    variance, squared_mean = variance.clamp(min=0), squared_mean.clamp(min=0)
    gain = (variance + squared_mean) / (variance / scale + squared_mean)
    return torch.where(gain.isfinite(), gain, 1.0)


def shard_moments(
    mean_square: Tensor, squared_norm: Tensor, *, shards: int, scale: float
) -> tuple[Tensor, Tensor]:
    """sigma^2 and mu^2 of a reference batch's gradient from the shards of one step.

    Args:
        mean_square: mean over shards of |g_i|^2.
        squared_norm: |mean of g_i|^2.
        shards: n, at least 2.
        scale: S, batch over reference batch.
    """
    variance = (mean_square - squared_norm) * shards / (shards - 1)
    return variance * scale / shards, squared_norm - variance / shards


class AdaScale(StepScaling):
    """Multiplies each step's learning rate by the gain.

    It must see the gradients a step averages, at least two of them. Either call `observe()` after
    every backward pass of an accumulation, or `attach(model)` once with the
    DistributedDataParallel model (one pass per step); not both.
    """

    state_key = "tula_adascale"

    def __init__(
        self,
        optimizer: Optimizer,
        scale: float,
        *,
        smoothing: float | None = None,
        on_nonfinite: OnNonfinite = "skip",
    ) -> None:
        """Hook into the optimizer.

        Args:
            optimizer: carries the reference learning rate. The paper is about SGD.
            scale: S, the batch over the reference batch, at least 1.
            smoothing: theta, the weight of the past; the paper's where not given.
            on_nonfinite: skip such a step or raise TrainingError.
        """
        self.scale = check_number("scale", scale, at_least=1)
        theta = max(1 - self.scale / 1000, 0.0) if smoothing is None else smoothing
        self.smoothing = check_number("smoothing", theta, at_least=0)
        if self.smoothing >= 1:
            raise InvalidInputError(f"smoothing must be below 1, not {smoothing}")
        self._averages: Tensor | None = None
        self._progress: Tensor | None = None
        self._count: Tensor | None = None
        self._saved = (0.0, 0.0, 0.0, 0.0)
        self._last_total: list[Tensor] = []
        self._squares: list[Tensor] = []
        self._total_squares: list[Tensor] = []
        self._shards = 0
        self._world_size = 1
        super().__init__(optimizer, mode="update", on_nonfinite=on_nonfinite)

    def observe(self) -> None:
        """Take note of one backward pass: the gradient it added to what was there."""
        gradients = [p.grad for p in parameters_with_gradients(self.optimizer)]
        total = [gradient.detach() for gradient in gradients if gradient is not None]
        if len(self._last_total) == len(total):
            added = list(torch._foreach_sub(total, self._last_total))
        else:
            added = total
        self._squares.append(gradient_norm(added).square())
        self._total_squares = [gradient_norm(total).square()]
        self._last_total = [gradient.clone() for gradient in total]
        self._shards += 1

    def attach(self, model: torch.nn.Module) -> None:
        """See every rank's gradient before DistributedDataParallel averages it."""
        if not isinstance(model, DistributedDataParallel):
            raise InvalidInputError(
                f"attach() needs a DistributedDataParallel model, not {type(model).__name__}: "
                "on one rank call observe() after every backward pass of an accumulation"
            )
        self._world_size = torch.distributed.get_world_size()
        model.register_comm_hook(self, _observing_all_reduce)

    def decide(self, norm: Tensor, finite: Tensor) -> Tensor:
        """The gain of this step."""
        shards = self._world_size if self._world_size > 1 else self._shards
        if shards < 2 or not self._squares or not self._total_squares:
            raise InvalidInputError(
                f"AdaScale needs at least 2 gradients in a step, not {shards}: call observe() "
                "after every backward pass of an accumulation, or attach() a distributed model"
            )
        squares = torch.stack(self._squares).sum().to(norm.device)
        total_square = torch.stack(self._total_squares).sum().to(norm.device)
        if self._world_size > 1:
            torch.distributed.all_reduce(squares)
        # Whatever scaled the raw gradients (a loss scale, sum or mean over passes) scaled the
        # shards and their total alike: the norm at hand gives the unit.
        squared_norm = norm.square()
        mean_square = shards * squares * squared_norm / total_square
        if self._averages is None or self._progress is None or self._count is None:
            self._averages = torch.tensor(self._saved[:2], device=norm.device, dtype=norm.dtype)
            self._progress = torch.tensor(self._saved[2], device=norm.device, dtype=norm.dtype)
            self._count = torch.tensor(self._saved[3], device=norm.device, dtype=norm.dtype)
        variance, mean = shard_moments(mean_square, squared_norm, shards=shards, scale=self.scale)
        moments = torch.stack((variance.clamp(min=_SMALLEST_VARIANCE), mean.clamp(min=0)))
        count = self._count + 1
        past = torch.where(count < 1 / (1 - self.smoothing), (count - 1) / count, self.smoothing)
        averages = past * self._averages + (1 - past) * moments
        good = finite & averages.isfinite().all()
        self._averages = torch.where(good, averages, self._averages)
        self._count = torch.where(good, count, self._count)
        gain = adascale_gain(self._averages[0], self._averages[1], self.scale)
        gain = torch.where(finite, gain, 1.0)
        self._progress = self._progress + torch.where(finite, gain, 0.0)
        self._last_total, self._squares, self._total_squares, self._shards = [], [], [], 0
        return gain

    @property
    def progress(self) -> float:
        """tau, the steps at the reference batch that were made so far. Waits for the device."""
        return float(self._progress) if self._progress is not None else self._saved[2]

    def scaling_state(self) -> dict[str, Any]:
        """The two averages, tau, and over how many steps the averages are."""
        if self._averages is None or self._progress is None or self._count is None:
            variance, squared_mean, progress, count = self._saved
        else:
            variance, squared_mean = self._averages.tolist()
            progress, count = float(self._progress), float(self._count)
        return {
            "variance": variance,
            "squared_mean": squared_mean,
            "progress": progress,
            "count": count,
        }

    def load_scaling_state(self, state: dict[str, Any]) -> None:
        """Continue with the saved averages."""
        self._saved = (
            state["variance"],
            state["squared_mean"],
            state["progress"],
            state.get("count", 0.0),
        )
        self._averages = self._progress = self._count = None


def _observing_all_reduce(state: AdaScale, bucket: Any) -> torch.futures.Future[Tensor]:
    """DDP communication hook: note the local gradient's square, then average as DDP would."""
    buffer = bucket.buffer().div_(state._world_size)
    if bucket.index() == 0:  # a step that was never taken must not count in the next
        state._squares, state._total_squares = [], []
    state._squares.append(_square(buffer))

    def note_average(future: torch.futures.Future[Any]) -> Tensor:
        average: Tensor = future.value()[0]
        state._total_squares.append(_square(average))
        return average

    work = torch.distributed.all_reduce(buffer, async_op=True)
    averaged: torch.futures.Future[Tensor] = work.get_future().then(note_average)
    return averaged


# DDP compares a hook's annotations with its own classes and refuses strings.
_observing_all_reduce.__annotations__.clear()


def _square(tensor: Tensor) -> Tensor:
    return gradient_norm([tensor.detach()]).square()


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaScaleMethod:
    """AdaScale with S the batch ratio; the loop must accumulate or be distributed."""

    name: str = "adascale"
    smoothing: float | None = None

    def wrap(self, optimizer: Optimizer, plan: TrainingPlan) -> MethodRun:
        """Hook into the optimizer."""
        adascale = AdaScale(optimizer, plan.ratio, smoothing=self.smoothing)
        attach: Callable[[torch.nn.Module], None] | None = None
        if plan.world_size > 1:
            attach = adascale.attach
        return MethodRun(
            optimizer=adascale,
            global_batch_size=plan.global_batch_size,
            after_backward=adascale.observe if attach is None else None,
            attach=attach,
        )
