"""Extrapolated SGD (Lin et al. 2020, arXiv 2006.05720): gradients a local look-ahead step away.

    w^k      = w_t - lr_inner g^k_{t-1}        g^k_{t-1}: worker k's own gradient of the last step
    g^k_t    = grad f^k(w^k)                   each worker looks ahead along its own small batch
    w_{t+1}  = w_t - lr mean_k g^k_t           the base optimizer's step, from w_t

The look-ahead smooths the loss along the trajectory and costs no extra pass, because the gradient
is the one at hand. Workers are the ranks (`attach`) or the passes of an accumulation (`observe`);
without either there is one worker, the whole batch. In the first step nothing is extrapolated. The
extrapolated point is a local one by the paper's abstract and summaries; its full text could not be
consulted, so how it combines with momentum (here: the base optimizer's, from w_t) and the length of
the look-ahead (the small batch's rate) are this package's reading. No maintained package has it.
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
from mlflow_tula.methods.scaling import (
    ScalingRule,
    learning_rate_factor,
    scale_learning_rate,
    warm_up,
)
from mlflow_tula.methods.step_scaling import check_number, refuse_closures
from mlflow_tula.methods.wrapper import OptimizerWrapper

_STATE_KEY = "tula_extrapolation"

_Gradients = dict[int, Tensor]
"""By the parameter's place in the optimizer's groups."""


class Extrapolation(OptimizerWrapper):
    """Evaluates each worker's gradient a look-ahead step away from the weights that it moves."""

    def __init__(self, optimizer: Optimizer, inner_learning_rate: float) -> None:
        """Wrap the optimizer that takes the step.

        Args:
            optimizer: the base optimizer.
            inner_learning_rate: length of the look-ahead: the small batch's rate.
        """
        super().__init__(optimizer)
        refuse_closures(optimizer)
        self.inner_learning_rate = check_number(
            "inner_learning_rate", inner_learning_rate, at_least=0
        )
        self._previous: list[_Gradients] = []
        self._home: list[Tensor] | None = None
        self._total: _Gradients = {}
        self._observed: list[_Gradients] = []
        self._local: dict[torch.nn.Parameter, Tensor] | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Look ahead, take the gradient there, come back, step.

        Args:
            closure: clears the gradients, runs forward and backward, returns the loss. With several
                passes it calls `observe()` after each, and their gradients must add up to their
                mean.

        Returns:
            The loss at the look-ahead point.
        """
        if closure is None:
            raise InvalidInputError(
                "extrapolation takes the gradient at a look-ahead point: step(closure) with a "
                "closure that clears the gradients, runs forward and backward, returns the loss"
            )
        self._observed, self._total = [], {}
        self._home = [p.detach().clone() for p in self._parameters()]
        try:
            self._look_ahead(0)
            with torch.enable_grad():
                loss = closure()
        finally:
            self._return()
            self._home = None
        # Before the step: LARS and others overwrite the gradient in place.
        self._previous = self._gradients_of_workers()
        self._observed, self._total = [], {}
        self.optimizer.step()
        return loss

    def observe(self) -> None:
        """Note the gradient that a backward pass added, and look ahead for the next pass."""
        total = {i: g.clone() for i, g in self._gradients().items()}
        self._observed.append(
            {i: g - self._total[i] if i in self._total else g for i, g in total.items()}
        )
        self._total = total
        if self._home is not None:
            self._return()
            self._look_ahead(len(self._observed))

    def attach(self, model: torch.nn.Module) -> None:
        """Let every rank look ahead by its own gradient, before DistributedDataParallel's mean.

        Own gradients are not part of `state_dict()`: the first step after a resume looks nowhere,
        on every rank.
        """
        if not isinstance(model, DistributedDataParallel):
            raise InvalidInputError(
                f"attach() needs a DistributedDataParallel model, not {type(model).__name__}: "
                "on one rank call observe() after every backward pass of an accumulation"
            )
        self._local = {}
        model.register_comm_hook(self, _keeping_all_reduce)

    def _gradients_of_workers(self) -> list[_Gradients]:
        """Each worker's own gradient of this step, as if it were the mean."""
        if self._local is not None:
            own, self._local = self._local, {}
            known = ((i, own.get(p)) for i, p in enumerate(self._parameters()))
            return [{i: gradient for i, gradient in known if gradient is not None}]
        if not self._observed:
            return [{i: gradient.clone() for i, gradient in self._gradients().items()}]
        count = len(self._observed)
        return [{i: g * count for i, g in added.items()} for added in self._observed]

    def _look_ahead(self, worker: int) -> None:
        if worker >= len(self._previous) or not self._previous[worker]:
            return
        parameters = self._parameters()
        found = self._previous[worker]
        tensors = [parameters[i].detach() for i in found]
        torch._foreach_add_(tensors, list(found.values()), alpha=-self.inner_learning_rate)

    def _return(self) -> None:
        if self._home is not None:
            torch._foreach_copy_([p.detach() for p in self._parameters()], self._home)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state and the previous gradients."""
        previous = [] if self._local is not None else [dict(worker) for worker in self._previous]
        return {**self.optimizer.state_dict(), _STATE_KEY: previous}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict()` was taken."""
        self.optimizer.load_state_dict(state_dict)
        parameters = self._parameters()
        self._previous = [
            {int(i): gradient.to(parameters[int(i)].device) for i, gradient in worker.items()}
            for worker in state_dict.get(_STATE_KEY, [])
        ]

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _gradients(self) -> _Gradients:
        return {i: p.grad.detach() for i, p in enumerate(self._parameters()) if p.grad is not None}


def _keeping_all_reduce(state: Extrapolation, bucket: Any) -> torch.futures.Future[Tensor]:
    """DDP communication hook: keep this rank's own gradients, then average as DDP would."""
    local = state._local
    assert local is not None
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        local[parameter] = gradient.clone()
    buffer = bucket.buffer().div_(torch.distributed.get_world_size())
    work = torch.distributed.all_reduce(buffer, async_op=True)
    averaged: torch.futures.Future[Tensor] = work.get_future().then(lambda f: f.value()[0])
    return averaged


# DDP compares a hook's annotations with its own classes and refuses strings.
_keeping_all_reduce.__annotations__.clear()


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
        extrapolation = Extrapolation(optimizer, inner_rate)
        distributed = plan.world_size > 1
        return MethodRun(
            optimizer=extrapolation,
            schedule=warm_up(optimizer, plan.warmup_steps(self.warmup_epochs), factor),
            global_batch_size=plan.global_batch_size,
            needs_closure=True,
            after_backward=None if distributed else extrapolation.observe,
            attach=extrapolation.attach if distributed else None,
        )
