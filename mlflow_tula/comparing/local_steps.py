"""Post-local SGD's ranks, one after the other in one process: the same numbers, no processes.

    t < t_0      one step with the gradient of the whole batch
    t >= t_0     each of R replicas steps with the gradient of its own share of the batch, and
                 weights are averaged every H steps (momentum stays with its replica)

as torch's PostLocalSGDOptimizer and post_localSGD_hook do over R ranks (counted as torch's
PeriodicModelAverager counts); the tests compare with steps written out by hand.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from mlflow_tula.comparing.data import shards
from mlflow_tula.methods.averaging import PostLocalMethod
from mlflow_tula.methods.protocol import MethodRun, TrainingPlan
from mlflow_tula.methods.scaling import learning_rate_factor, scale_learning_rate, warm_up

LARGEST_RANKS = 8
"""Replicas: one a reference batch, up to this many (each is a pass of its own on one core)."""


class LocalSteps:
    """Trains a model as post-local SGD over several ranks would."""

    def __init__(
        self, method: PostLocalMethod, model: nn.Module, optimizer: Optimizer, plan: TrainingPlan
    ) -> None:
        """Scale the rate and set the step at which ranks part."""
        factor = learning_rate_factor(method.rule, plan.ratio, factor=method.factor)
        scale_learning_rate(optimizer, factor)
        self.model, self.optimizer = model, optimizer
        self.schedule = warm_up(optimizer, plan.warmup_steps(method.warmup_epochs), factor)
        self.start_step = plan.warmup_steps(method.start_epoch)
        self.period = method.period
        self.ranks = max(2, min(LARGEST_RANKS, int(plan.ratio)))
        self.run = MethodRun(optimizer=optimizer, global_batch_size=plan.global_batch_size)
        self._replicas: list[tuple[nn.Module, Optimizer]] = []
        self._steps = 0

    def step(self, inputs: Tensor, labels: Tensor) -> float:
        """One step of all ranks; the mean loss."""
        if self._steps < self.start_step:
            loss = _step(self.model, self.optimizer, inputs, labels)
        else:
            if not self._replicas:
                self._part()
            losses = []
            pieces = shards(self.ranks, inputs, labels)
            for (model, optimizer), (x, y) in zip(self._replicas, pieces, strict=True):
                for group, whole in zip(
                    optimizer.param_groups, self.optimizer.param_groups, strict=True
                ):
                    group["lr"] = whole["lr"]
                losses.append(_step(model, optimizer, x, y))
            loss = sum(losses) / len(losses)
            # as torch's PeriodicModelAverager counts: from its warm-up steps on
            if (self._steps - self.start_step) % self.period == 0:
                self.finish()
        self._steps += 1
        self.schedule.step()
        return loss

    def averaged(self) -> nn.Module:
        """A model with the mean of the replicas' weights."""
        if not self._replicas:
            return self.model
        mean = copy.deepcopy(self.model)
        _average([model for model, _ in self._replicas], [mean])
        return mean

    def finish(self) -> None:
        """Average the weights into the model and into every replica."""
        if self._replicas:
            models = [model for model, _ in self._replicas]
            _average(models, [self.model, *models])

    def _part(self) -> None:
        for _ in range(self.ranks):
            model = copy.deepcopy(self.model)
            optimizer = type(self.optimizer)(model.parameters(), **self.optimizer.defaults)
            optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
            self._replicas.append((model, optimizer))


@torch.no_grad()
def _average(models: list[nn.Module], into: list[nn.Module]) -> None:
    means = [
        torch.stack(tensors).mean(0) if tensors[0].is_floating_point() else tensors[0].clone()
        for tensors in zip(*(model.state_dict().values() for model in models), strict=True)
    ]
    for model in into:
        for tensor, mean in zip(model.state_dict().values(), means, strict=True):
            tensor.copy_(mean)


def _step(model: nn.Module, optimizer: Optimizer, inputs: Tensor, labels: Tensor) -> float:
    optimizer.zero_grad()
    loss = cross_entropy(model(inputs), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return float(loss.detach())
