"""The default recipe: what happens between a gradient and the weights.

    recipe = build_recipe(optimizer, schedule, plan, total_steps=220, device=device)
    for step in range(220):
        recipe.begin_step(step)                    # the learning rate of this step
        loss = recipe.step(forward_and_backward)   # unscale, measure, clip, update

Learning rate by `Schedule`: scaled by the batch size, warmed up, cosine; the gradient's norm is
measured after all-reduce, accumulation and unscaling and before the clip, and its variability
followed. This is method `sqrt_clip`; the others are recipes of method.py, with the same face.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mlflow_tula.gradients import next_variability
from mlflow_tula.training.facts import BatchPlan, Schedule
from mlflow_tula.workloads.parallel import whole

VARIABILITY_SMOOTHING = 0.16
"""Weight of the newest change of the gradient norm (SelSync, arXiv 2307.07950)."""

_SLOWEST_BATCH_NORM = 0.1
_BATCH_NORM_WINDOWS = 10


class Recipe:
    """Steps an optimizer; `gradient_norm` and `gradient_variability` tell of the last step."""

    needs_closure: bool = False
    """Whether a step may run `forward_and_backward` twice, on the same batch."""
    after_backward: Callable[[], None] | None = None
    """To be called after every backward pass of an accumulation; None: nothing."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        schedule: Schedule,
        factor: float,
        total_steps: int,
        scaler: torch.amp.GradScaler,
        device: torch.device,
    ) -> None:
        """Keep the optimizer's learning rates as those of the reference batch size."""
        self.optimizer = optimizer
        self.scaler = scaler
        self.gradient_norm = torch.full((), math.nan, device=device)
        self.gradient_variability = torch.full((), math.nan, device=device)
        self._last_norm = torch.full((), math.nan, device=device)
        self._schedule = schedule
        self._factor = factor
        self._total_steps = total_steps
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]

    @property
    def learning_rate(self) -> float:
        """That of the first parameter group, as it is now."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def words(self) -> str:
        """How it steps, for people."""
        return f"peak learning rate {max(self._rates) * self._factor:.3g}"

    def attach(self, replica: nn.Module) -> None:
        """Called once with the model that is trained, distributed where it is."""

    def begin_step(self, step: int) -> None:
        """Set the learning rate of optimizer step `step`, counted from 0 over all epochs."""
        share = self._factor * schedule_factor(self._schedule, step, self._total_steps)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * share

    def step(self, forward_and_backward: Callable[[], Tensor]) -> Tensor:
        """One update; returns what `forward_and_backward` returned, the loss.

        A gradient that is not finite leaves the variability as it was; under a GradScaler it also
        leaves the weights alone.
        """
        loss = forward_and_backward()
        self.scaler.unscale_(self.optimizer)
        self.gradient_norm = self._clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self._follow(self.gradient_norm)
        return loss

    def _clip(self) -> Tensor:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = whole(torch.nn.utils.get_total_norm(gradients).detach())
        limit = self._schedule.clip_norm
        # On a CPU a look at the norm is free, and a pass over all gradients (times 1.0) is not.
        if limit > 0 and not (norm.device.type == "cpu" and norm.item() <= limit):
            torch.nn.utils.clip_grads_with_norm_(self._parameters, limit, norm)
        return norm

    def _follow(self, norm: Tensor) -> None:
        """Move the variability on, without the host having to wait for the device."""
        finite = norm.isfinite()
        moved = next_variability(
            self._last_norm, norm, self.gradient_variability, smoothing=VARIABILITY_SMOOTHING
        )
        self.gradient_variability = torch.where(finite, moved, self.gradient_variability)
        self._last_norm = torch.where(finite, norm, self._last_norm)

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed training needs to go on as if nothing had happened."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "last_norm": self._last_norm,
            "variability": self.gradient_variability,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        device = self._last_norm.device
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self._last_norm = state["last_norm"].to(device)
        self.gradient_variability = state["variability"].to(device)


def build_recipe(
    optimizer: Optimizer,
    schedule: Schedule,
    plan: BatchPlan,
    *,
    total_steps: int,
    device: torch.device,
    fp16: bool = False,
) -> Recipe:
    """The default recipe around an optimizer that carries the reference learning rate."""
    return Recipe(
        optimizer,
        schedule=schedule,
        factor=schedule.factor(plan.global_batch_size),
        total_steps=total_steps,
        scaler=torch.amp.GradScaler(device.type, enabled=fp16),
        device=device,
    )


def schedule_factor(schedule: Schedule, step: int, total_steps: int) -> float:
    """Learning rate of a step over the peak: linear warm-up, then half a cosine."""
    warmup = round(schedule.warmup_share * total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(total_steps - warmup, 1)
    wave = (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    return schedule.final_factor + (1 - schedule.final_factor) * wave


def shorten_batch_norm_memory(modules: Iterable[nn.Module], total_steps: int) -> float | None:
    """Let running statistics forget their start within a tenth of the training.

        momentum = max(momentum, min(0.1, 10 / total_steps))

    MobileNets and EfficientNets average over some 100 steps (momentum 0.01); in a training of 200
    steps their running statistics are then still those of the first random weights, and a model
    with a training loss of 0.02 tests like chance. Trainings of 1,000 steps and more, and models
    with torch's own 0.1, are left as they are.

    Returns:
        The momentum that was set, or None where nothing was changed.
    """
    momentum = min(_SLOWEST_BATCH_NORM, _BATCH_NORM_WINDOWS / max(total_steps, 1))
    changed = None
    for module in modules:
        if not isinstance(module, nn.modules.batchnorm._BatchNorm) or module.momentum is None:
            continue
        if module.momentum < momentum:
            module.momentum = changed = momentum
    return changed
