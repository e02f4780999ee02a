"""What a large-batch method is: something that takes an optimizer and a plan and gives a run.

    plan = TrainingPlan(global_batch_size=1024, reference_batch_size=32, steps_per_epoch=59)
    run = method.wrap(optimizer, plan)
    for epoch in range(epochs):
        loader = make_loader(run.begin_epoch(epoch))      # with this epoch's global batch size
        for batch in loader:
            run.step(lambda: forward_and_backward(batch)) # zero_grad, forward, backward; the loss

The optimizer that goes in carries the *reference* learning rate (the one tuned for the reference
batch size), momentum and weight decay; a method scales the rate and leaves the other two alone.
Most methods also work without a run: their wrapper hooks into `optimizer.step()`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mlflow_tula.errors import InvalidInputError

Closure = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """The batch to train with, and the batch whose learning rate is known."""

    global_batch_size: int
    """Samples per optimizer step over all ranks and accumulation passes."""
    reference_batch_size: int
    """The batch size for which the optimizer's learning rate was tuned."""
    steps_per_epoch: int = 100
    """Optimizer steps in an epoch at `global_batch_size`; warm-up is given in epochs."""
    world_size: int = 1
    epochs: float | None = None
    """How long the training takes, where that is known: the default warm-up is a share of it."""

    def __post_init__(self) -> None:
        """Refuse a plan that is not a large-batch plan."""
        for name in ("global_batch_size", "reference_batch_size", "steps_per_epoch", "world_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidInputError(f"{name} must be a whole number of at least 1, not {value}")
        if self.epochs is not None and not (math.isfinite(self.epochs) and self.epochs > 0):
            raise InvalidInputError(f"epochs must be a finite number above 0, not {self.epochs}")
        if self.reference_batch_size > self.global_batch_size:
            raise InvalidInputError(
                f"the reference batch ({self.reference_batch_size}) must not be above the batch "
                f"({self.global_batch_size}): give the smaller batch, whose learning rate is known,"
                " as the reference"
            )

    @property
    def ratio(self) -> float:
        """Global batch size over reference batch size, at least 1."""
        return self.global_batch_size / self.reference_batch_size

    def warmup_steps(self, epochs: float | None) -> int:
        """Optimizer steps in so many epochs of warm-up.

        None takes a tenth of the training, and 5 epochs (Goyal et al.) where its length is unknown.
        """
        if epochs is None:
            epochs = 5.0 if self.epochs is None else min(self.epochs / 10, 5.0)
        return round(epochs * self.steps_per_epoch)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPhase:
    """From `start_epoch` on: this batch size, and this multiple of the optimizer's rate."""

    start_epoch: int
    global_batch_size: int
    learning_rate_factor: float = 1.0


@dataclass(kw_only=True, slots=True)
class MethodRun:
    """A method at work on one optimizer: what a training loop needs of it, and no more."""

    optimizer: Optimizer
    """Call `step()` and `zero_grad()` on this one, and save its `state_dict()`."""
    schedule: LRScheduler | None = None
    """Advanced once per optimizer step; `step()` below does it."""
    phases: Sequence[BatchPhase] = ()
    """Changes of the batch size by epoch; empty: the plan's batch size throughout."""
    global_batch_size: int = 0
    needs_closure: bool = False
    """The optimizer's own `step` evaluates the gradient at another point (SAM, extrapolation)."""
    after_backward: Callable[[], None] | None = None
    """To be called after every backward pass of an accumulation (AdaScale); None: nothing."""
    attach: Callable[[torch.nn.Module], None] | None = None
    """To be called once with the DistributedDataParallel model (AdaScale, post-local SGD)."""
    _base_rates: list[float] = field(default_factory=list)

    def begin_epoch(self, epoch: int) -> int:
        """Set the phase of this epoch; returns the global batch size to load with."""
        current = [phase for phase in self.phases if phase.start_epoch <= epoch]
        if not current:
            return self.global_batch_size
        if not self._base_rates:
            self._base_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        phase = current[-1]
        for group, rate in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = rate * phase.learning_rate_factor
        return phase.global_batch_size

    def step(self, closure: Closure, scaler: torch.amp.GradScaler | None = None) -> Tensor:
        """One optimizer step.

        Args:
            closure: clears the gradients, runs forward and backward (all passes of an
                accumulation, calling `after_backward` after each where it is set) and returns
                the loss. SAM calls it twice.
            scaler: a GradScaler whose scaled loss the closure ran backward on.

        Returns:
            The loss of the (first) call of the closure.
        """
        if self.needs_closure:
            if scaler is not None and scaler.is_enabled():
                raise InvalidInputError(
                    f"{type(self.optimizer).__name__} evaluates the gradient at a second point and "
                    "cannot run under a GradScaler: train in bf16 or fp32"
                )
            loss: Any = self.optimizer.step(closure)  # type: ignore[arg-type]
        else:
            loss = closure()
            if scaler is None:
                self.optimizer.step()
            else:
                scaler.step(self.optimizer)
                scaler.update()
        if self.schedule is not None:
            self.schedule.step()
        return cast(Tensor, loss)

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs besides the model's own state."""
        schedule = self.schedule.state_dict() if self.schedule is not None else None
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedule": schedule,
            "base_rates": list(self._base_rates),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict()` was taken."""
        self.optimizer.load_state_dict(state["optimizer"])
        if self.schedule is not None and state["schedule"] is not None:
            self.schedule.load_state_dict(state["schedule"])
        self._base_rates = list(state["base_rates"])


@runtime_checkable
class Method(Protocol):
    """A way to train with a large batch."""

    @property
    def name(self) -> str:
        """The name in tables and on the command line."""
        ...

    def wrap(self, optimizer: Optimizer, plan: TrainingPlan) -> MethodRun:
        """Bind to an optimizer that carries the reference learning rate."""
        ...
