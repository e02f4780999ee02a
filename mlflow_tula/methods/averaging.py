"""Post-local SGD (Lin et al. 2020, arXiv 1808.07217): local steps late in training.

    t < t_0      every rank steps with the averaged gradient (large-batch SGD)
    t >= t_0     every rank steps with its own gradient (a small batch each), and the weights are
                 averaged over all ranks every H steps

torch has it: PostLocalSGDOptimizer with PeriodicModelAverager averages the weights, and the
communication hook post_localSGD_hook stops averaging gradients at t_0. Both are used as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
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


def post_local_sgd(optimizer: Optimizer, *, start_step: int, period: int) -> Optimizer:
    """Torch's PostLocalSGDOptimizer around the optimizer.

    Args:
        optimizer: steps on every rank.
        start_step: t_0, the first step with local gradients.
        period: H, steps between two averages of the weights.
    """
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise InvalidInputError(
            "post-local SGD needs several ranks, and torch.distributed is not initialized: start "
            "the training with torchrun, or choose another method"
        )
    if start_step < 0 or period < 2:
        raise InvalidInputError(
            f"start_step must be at least 0 and period at least 2 (1 is plain data parallelism), "
            f"not {start_step} and {period}"
        )
    averager = PeriodicModelAverager(period=period, warmup_steps=start_step)
    return PostLocalSGDOptimizer(optimizer, averager)


def stop_averaging_gradients(model: torch.nn.Module, *, start_step: int) -> None:
    """Let each rank keep its own gradient from `start_step` on (same number as the optimizer's)."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
        PostLocalSGDState,
        post_localSGD_hook,
    )

    if not isinstance(model, DistributedDataParallel):
        raise InvalidInputError(
            f"post-local SGD needs a DistributedDataParallel model, not {type(model).__name__}"
        )
    state = PostLocalSGDState(  # type: ignore[no-untyped-call]
        process_group=None,
        subgroup=None,
        start_localSGD_iter=start_step,
        # torch's default would go on averaging within a node; the paper's ranks step alone
        post_local_gradient_allreduce=False,
    )
    model.register_comm_hook(state, post_localSGD_hook)


@dataclass(frozen=True, kw_only=True, slots=True)
class PostLocalMethod:
    """Scaled rate and warm-up, then local steps from `start_epoch` on."""

    name: str = "post_local_sgd"
    start_epoch: float = 10.0
    period: int = 4
    rule: ScalingRule = "linear"
    factor: float = 1.0
    warmup_epochs: float | None = None
    """None: a tenth of the training, at most 5 epochs."""

    def wrap(self, optimizer: Optimizer, plan: TrainingPlan) -> MethodRun:
        """Wrap the optimizer; call the run's `attach` with the distributed model."""
        start_step = plan.warmup_steps(self.start_epoch)
        stepping = post_local_sgd(optimizer, start_step=start_step, period=self.period)
        factor = learning_rate_factor(self.rule, plan.ratio, factor=self.factor)
        scale_learning_rate(optimizer, factor)

        def attach(model: torch.nn.Module) -> None:
            stop_averaging_gradients(model, start_step=start_step)

        return MethodRun(
            optimizer=stepping,
            schedule=warm_up(optimizer, plan.warmup_steps(self.warmup_epochs), factor),
            global_batch_size=plan.global_batch_size,
            attach=attach,
        )
