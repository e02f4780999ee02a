"""Extrapolated SGD (Lin et al. 2020, arXiv 2006.05720): the gradient a look-ahead step away.

    w_{t+1/2} = w_t - lr_inner g_{t-1}         g_{t-1}: the previous step's own gradient, reused
    g_t = grad f(w_{t+1/2})
    w_{t+1}   = w_t - lr g_t                   the base optimizer's step, from w_t

The look-ahead smooths the loss along the trajectory and costs no extra pass, because the gradient
is the one at hand. In the first step there is none and nothing is extrapolated. With several ranks
the paper extrapolates each by its own local gradient; here by the averaged one that the optimizer
sees, which keeps DistributedDataParallel's replicas equal. No maintained package has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.methods.protocol import MethodRun, TrainingPlan
from mlflow_tula.methods.scaling import (
    ScalingRule,
    learning_rate_factor,
    scale_learning_rate,
    warm_up,
)
from mlflow_tula.methods.step_scaling import check_number, refuse_closures
from mlflow_tula.methods.wrapper import OptimizerWrapper

_STATE_KEY = "tula_extrapolation"


class Extrapolation(OptimizerWrapper):
    """Evaluates each gradient a look-ahead step away from the weights it is applied to."""

    def __init__(self, optimizer: Optimizer, inner_learning_rate: float) -> None:
        """Wrap the optimizer that takes the step.

        Args:
            optimizer: the base optimizer.
            inner_learning_rate: length of the look-ahead; the paper takes the small batch's rate.
        """
        super().__init__(optimizer)
        refuse_closures(optimizer)
        self.inner_learning_rate = check_number(
            "inner_learning_rate", inner_learning_rate, at_least=0
        )
        self._previous: dict[int, Tensor] = {}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Look ahead, take the gradient there, come back, step.

        Args:
            closure: clears the gradients, runs forward and backward, returns the loss.

        Returns:
            The loss at the look-ahead point.
        """
        if closure is None:
            raise InvalidInputError(
                "extrapolation takes the gradient at a look-ahead point: step(closure) with a "
                "closure that clears the gradients, runs forward and backward, returns the loss"
            )
        parameters = self._parameters()
        moved = [(parameters[i].detach(), g) for i, g in self._previous.items()]
        kept = [tensor.clone() for tensor, _ in moved]
        if moved:
            tensors, gradients = map(list, zip(*moved, strict=True))
            torch._foreach_add_(tensors, gradients, alpha=-self.inner_learning_rate)
        with torch.enable_grad():
            loss = closure()
        if moved:
            torch._foreach_copy_(tensors, kept)
        # Before the step: LARS and others overwrite the gradient in place.
        self._previous = {
            i: parameter.grad.detach().clone()
            for i, parameter in enumerate(parameters)
            if parameter.grad is not None
        }
        self.optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state and the previous gradient."""
        return {**self.optimizer.state_dict(), _STATE_KEY: dict(self._previous)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict()` was taken."""
        self.optimizer.load_state_dict(state_dict)
        parameters = self._parameters()
        self._previous = {
            int(i): gradient.to(parameters[int(i)].device)
            for i, gradient in state_dict.get(_STATE_KEY, {}).items()
        }

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtrapolationMethod:
    """A scaled rate for the step, the reference rate for the look-ahead."""

    name: str = "extrapolation"
    rule: ScalingRule = "linear"
    factor: float = 1.0
    warmup_epochs: float | None = None
    """None: a tenth of the training, at most 5 epochs."""

    def wrap(self, optimizer: Optimizer, plan: TrainingPlan) -> MethodRun:
        """Wrap the optimizer."""
        inner_rate = float(optimizer.param_groups[0]["lr"])
        factor = learning_rate_factor(self.rule, plan.ratio, factor=self.factor)
        scale_learning_rate(optimizer, factor)
        return MethodRun(
            optimizer=Extrapolation(optimizer, inner_rate),
            schedule=warm_up(optimizer, plan.warmup_steps(self.warmup_epochs), factor),
            global_batch_size=plan.global_batch_size,
            needs_closure=True,
        )
