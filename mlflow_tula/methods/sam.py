"""Sharpness-aware minimization (Foret et al. 2021, arXiv 2010.01412).

    e = rho g(w) / |g(w)|;   the step is taken from w with the gradient at w + e

pytorch-optimizer's SAM (PyPI, 4.1): maintained, foreach, keeps the base optimizer's state. torch
has none. A step costs two passes, so under equal wall time it trains half as long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.methods.protocol import MethodRun, TrainingPlan
from mlflow_tula.methods.scaling import ScalingRule, learning_rate_factor, scale_learning_rate
from mlflow_tula.methods.step_scaling import check_number, refuse_closures
from mlflow_tula.methods.wrapper import OptimizerWrapper


class SharpnessAware(OptimizerWrapper):
    """Steps `optimizer` with the gradient at the worst point within `rho`.

    Under DistributedDataParallel both passes see averaged gradients, so all ranks stay together.
    """

    def __init__(self, optimizer: Optimizer, rho: float = 0.05) -> None:
        """Wrap the optimizer that takes the step."""
        from pytorch_optimizer import SAM

        super().__init__(optimizer)
        refuse_closures(optimizer)
        self.rho = check_number("rho", rho, above=0)

        def same_optimizer(*args: Any, **kwargs: Any) -> Optimizer:
            return optimizer

        # SAM makes its base optimizer from a class; handing it the one there is keeps its state.
        base: Any = same_optimizer
        self._sam = SAM(optimizer.param_groups, base, rho=self.rho)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Gradient at w, gradient at w + e, step from w.

        Args:
            closure: clears the gradients, runs forward and backward, returns the loss; called
                twice.

        Returns:
            The loss at w.
        """
        if closure is None:
            raise InvalidInputError(
                "SAM needs the gradient at a second point: step(closure) with a closure that "
                "clears the gradients, runs forward and backward and returns the loss"
            )
        with torch.enable_grad():
            loss = closure()
        self._sam.step(closure)
        return loss


@dataclass(frozen=True, kw_only=True, slots=True)
class SharpnessAwareMethod:
    """SAM at the reference rate, scaled where asked for."""

    name: str = "sam"
    rho: float = 0.05
    rule: ScalingRule = "constant"
    factor: float = 1.0

    def wrap(self, optimizer: Optimizer, plan: TrainingPlan) -> MethodRun:
        """Wrap the optimizer."""
        scale_learning_rate(
            optimizer, learning_rate_factor(self.rule, plan.ratio, factor=self.factor)
        )
        return MethodRun(
            optimizer=SharpnessAware(optimizer, self.rho),
            global_batch_size=plan.global_batch_size,
            needs_closure=True,
        )
