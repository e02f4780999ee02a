"""`tula train --method`: a method of the catalogue at work in the training loop.

    recipe = make_recipe(request, optimizer, total_steps=220, steps_per_epoch=22, device=device)
    recipe.attach(replica)                         # AdaScale and extrapolation on several ranks
    for step in range(total_steps):
        recipe.begin_step(step)
        loss = recipe.step(forward_and_backward)

The method sets the peak rates, may replace the optimizer, and clips or scales by itself; warm-up
and decay are the training's `Schedule`, the same for every method. The rate that a job gives is the
one for `reference_batch_size`; below that batch it goes down with the square root of the ratio, and
the methods see a ratio of 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.methods.catalogue import build_method
from mlflow_tula.methods.protocol import Method, MethodRun, TrainingPlan
from mlflow_tula.methods.recipe import automatic_method
from mlflow_tula.training.facts import AUTO, CLASSIC_METHOD, BatchPlan, Schedule, TrainRequest
from mlflow_tula.training.recipe import Recipe, build_recipe


class MethodRecipe(Recipe):
    """Steps a method's optimizer; what the loop sees is a `Recipe`."""

    def __init__(self, run: MethodRun, name: str, *, device: torch.device, **settings: Any) -> None:
        """Take the run of the method of that name; its optimizer carries the peak rates."""
        # a warm-up of the method has already lowered the rate: `initial_lr` is where it ends
        for group in run.optimizer.param_groups:
            group["lr"] = group.pop("initial_lr", group["lr"])
        super().__init__(run.optimizer, factor=1.0, device=device, **settings)
        self._run, self._name = run, name
        self.needs_closure = run.needs_closure
        self.after_backward = run.after_backward

    @property
    def words(self) -> str:
        """The method, and the rate of the first parameter group (of LARS: the share of a step)."""
        return f"method {self._name}, {super().words}"

    def attach(self, replica: nn.Module) -> None:
        """Hand the distributed model to a method that looks at the ranks' own gradients."""
        if self._run.attach is not None:
            self._run.attach(replica)

    def step(self, forward_and_backward: Callable[[], Tensor]) -> Tensor:
        """One update; the gradient's norm is that at the weights where the step begins."""
        if not self._run.needs_closure:
            loss = forward_and_backward()
            self.scaler.unscale_(self.optimizer)
            self._measure()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            measured = False

            def closure() -> Tensor:
                nonlocal measured
                self.optimizer.zero_grad(set_to_none=True)
                loss = forward_and_backward()
                if not measured:
                    self._measure()
                    measured = True
                return loss

            loss = self._run.step(closure)
        self.optimizer.zero_grad(set_to_none=True)
        self._follow(self.gradient_norm)
        return loss

    def _measure(self) -> None:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        self.gradient_norm = torch.nn.utils.get_total_norm(gradients).detach()


def make_recipe(
    request: TrainRequest,
    optimizer: Optimizer,
    *,
    total_steps: int,
    steps_per_epoch: int,
    device: torch.device,
) -> Recipe:
    """The recipe of a request: the plain loop's own for `sqrt_clip`, else a method's.

    `auto` stands for `sqrt_clip` where there is no larger batch to scale to (its clip is a guard
    there), and under FSDP, since its clip knows of sharded gradients.
    """
    method, settings = request.schedule.method, request.schedule.method_settings
    small = request.plan.global_batch_size <= request.schedule.reference_batch_size
    if method == AUTO and (small or request.job.strategy == "fsdp") and not settings:
        method = CLASSIC_METHOD
    build: Callable[..., Recipe] = build_method_recipe
    more: dict[str, Any] = {"steps_per_epoch": steps_per_epoch}
    if method == CLASSIC_METHOD and not settings:
        build, more = build_recipe, {}
    return build(
        optimizer,
        request.schedule,
        request.plan,
        total_steps=total_steps,
        device=device,
        fp16=request.job.precision == "fp16",
        **more,
    )


def build_method_recipe(
    optimizer: Optimizer,
    schedule: Schedule,
    plan: BatchPlan,
    *,
    total_steps: int,
    steps_per_epoch: int,
    device: torch.device,
    fp16: bool = False,
) -> MethodRecipe:
    """The schedule's method around an optimizer that carries the reference learning rate.

    Raises:
        InvalidInputError: a method that this loop cannot run (see `check_method`), an unknown one,
            or settings that it does not have.
    """
    method = resolve_method(schedule, plan.global_batch_size, optimizer)
    reference = min(schedule.reference_batch_size, plan.global_batch_size)
    for group in optimizer.param_groups:
        group["lr"] *= schedule.factor(min(plan.global_batch_size, schedule.reference_batch_size))
    run = method.wrap(
        optimizer,
        TrainingPlan(
            global_batch_size=plan.global_batch_size,
            reference_batch_size=reference,
            steps_per_epoch=steps_per_epoch,
            world_size=plan.world_size,
            epochs=total_steps / steps_per_epoch,
        ),
    )
    if run.needs_closure and fp16:
        raise InvalidInputError(
            f"method {method.name} takes a gradient at a second point, which a GradScaler cannot "
            "follow: train in bf16 or fp32 (--precision)"
        )
    return MethodRecipe(
        run,
        method.name,
        schedule=_with_warmup(schedule, steps_per_epoch / total_steps),
        total_steps=total_steps,
        scaler=torch.amp.GradScaler(device.type, enabled=fp16),
        device=device,
    )


def _with_warmup(schedule: Schedule, epoch: float) -> Schedule:
    """The schedule with `warmup_epochs` where that was set; `epoch` is the share of one."""
    epochs = schedule.method_settings.get("warmup_epochs")
    if epochs is None:
        return schedule
    return replace(schedule, warmup_share=min(float(epochs) * epoch, 0.99))


def resolve_method(schedule: Schedule, batch_size: int, optimizer: Optimizer) -> Method:
    """The schedule's method; `auto` is the recipe's rule."""
    settings: Mapping[str, Any] = schedule.method_settings
    ratio = max(1.0, batch_size / schedule.reference_batch_size)
    if schedule.method == AUTO:
        return automatic_method(optimizer, ratio, **settings)
    return build_method(schedule.method, **settings)


def check_method(schedule: Schedule, *, optimizer: str = "sgd") -> None:
    """Refuse settings that the method does not have, before anything is started.

    Raises:
        InvalidInputError: names the settings that it has, or the range of a value.
    """
    parameter = nn.Parameter(torch.zeros(2, 2))
    kind = torch.optim.Adam if optimizer.startswith("adam") else SGD
    resolve_method(schedule, 2 * schedule.reference_batch_size, kind([parameter], lr=0.1)).wrap(
        kind([parameter], lr=0.1),
        TrainingPlan(
            global_batch_size=2 * schedule.reference_batch_size,
            reference_batch_size=schedule.reference_batch_size,
        ),
    )
