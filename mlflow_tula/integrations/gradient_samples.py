"""Norm and variability from the gradients of two steps in a row, now and then.

    D = (1 - alpha) D + alpha |n_2 - n_1| / n_1          n: norms of the two gradients

Gradients are as the optimizer gets them: averaged over ranks, unscaled, clipped where one clips.
Results stay on the device; nothing here waits for it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from mlflow_tula.gradients import DEFAULT_SMOOTHING, next_variability
from mlflow_tula.integrations.facts import WARMUP_STEPS


class GradientSampler:
    """Reads the gradients of the steps that are due: two in a row every `every`."""

    def __init__(self, *, every: int) -> None:
        """Read two steps in a row every `every` steps; 0 reads none."""
        self._every = every
        self._last_step = -1
        self._last_norm: Tensor | None = None
        self.norm: Tensor | None = None
        self.variability: Tensor | None = None

    def due(self, step: int) -> bool:
        """Whether this step's gradients are to be read; the first pair comes after the warm-up."""
        if self._every == 0 or step <= WARMUP_STEPS:
            return False
        return (step - WARMUP_STEPS - 1) % self._every in (0, 1)

    def begins(self, step: int) -> bool:
        """Whether this step is the first of a pair that is read."""
        return self.due(step) and (step - WARMUP_STEPS - 1) % self._every == 0

    def stop(self) -> None:
        """Read no more: these gradients cannot be read on one rank."""
        self._every = 0

    @torch.no_grad()
    def take(self, optimizer: Optimizer, step: int) -> None:
        """Read the gradients of a step, if this rank holds them whole."""
        gradients = whole_gradients(optimizer)
        if not gradients:
            return
        norm = torch.nn.utils.get_total_norm(gradients).float()
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None:  # a fused optimizer that divides by the loss scale itself
            norm = norm / scale
        if step == self._last_step + 1 and self._last_norm is not None:
            before = self.variability
            if before is None:
                before = torch.full_like(norm, math.nan)
            after = next_variability(self._last_norm, norm, before, smoothing=DEFAULT_SMOOTHING)
            self.variability = torch.where(after.isfinite(), after, before)
        self._last_step, self._last_norm, self.norm = step, norm, norm


def whole_gradients(optimizer: Optimizer) -> list[Tensor]:
    """The gradients; none where one is sparse, of a class of its own, or on another device.

    A sharded tensor's norm would wait for the other ranks, which do not ask for it.
    """
    found: list[Tensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            if type(gradient) is not Tensor or gradient.layout is not torch.strided:
                return []
            found.append(gradient)
    return found if len({gradient.device for gradient in found}) == 1 else []
