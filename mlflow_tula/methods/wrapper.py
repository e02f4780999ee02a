"""An optimizer that acts through another one, and that torch's tools accept as an optimizer.

Learning-rate schedulers ask for `isinstance(x, Optimizer)` and GradScaler sets attributes on what
it steps, so a plain delegating object would not do. torch's own PostLocalSGDOptimizer is made the
same way: a subclass that shares the inner optimizer's groups and never calls `super().__init__`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from mlflow_tula.errors import InvalidInputError


class OptimizerWrapper(Optimizer):
    """Shares parameter groups, state and hooks with `optimizer`, which does the stepping."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Wrap an optimizer of torch or with torch's interface."""
        if not isinstance(optimizer, Optimizer):
            raise InvalidInputError(
                f"the optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}"
            )
        self.optimizer = optimizer

    def __repr__(self) -> str:
        """The wrapper's name around the inner optimizer's."""
        return f"{type(self).__name__}({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Wrappers hold hooks; copying one would leave the copy's hooks on the original."""
        raise TypeError(f"{type(self).__name__} cannot be copied or pickled: save its state_dict()")

    def __getattr__(self, name: str) -> Any:
        """What GradScaler and loops ask of an optimizer and this class does not define."""
        if name == "optimizer":  # not yet set: without this, a failed __init__ would recurse
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """GradScaler hands loss scale and overflow flag to the optimizer that uses them."""
        if name in ("grad_scale", "found_inf"):
            setattr(self.optimizer, name, value)
        else:
            object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        """GradScaler takes both back after the step."""
        if name in ("grad_scale", "found_inf"):
            delattr(self.optimizer, name)
        else:
            object.__delattr__(self, name)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the inner optimizer."""
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, which holds the wrapper's too where it has any."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict()` was taken."""
        self.optimizer.load_state_dict(state_dict)

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Register on the optimizer that steps."""
        return self.optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """Register on the optimizer that steps."""
        return self.optimizer.register_step_post_hook(hook)


def parameters_with_gradients(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    """All parameters that the next step will move, over all groups."""
    return [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
