"""One number per step, decided on the device: the machinery under AGS, clipping and AdaScale.

    optimizer.step()
      pre-hook    n = norm of the averaged gradient        after all-reduce and accumulation
                  m = decide(n)                            a 0-d tensor, never read by the host
                  gradient mode: g <- m g                  update mode: learning rate x m
      torch's own step
      post-hook   the learning rate is put back

Nothing waits for the device. On a CPU a tensor can be read for nothing, so there the learning rate
is a float and a non-finite step hides the gradients from the optimizer, which skips it exactly. On
an accelerator a fused optimizer takes rate, loss scale and overflow flag as tensors, and skips as
exactly. Any other gets the same update by rescaling the step it took (one copy of the parameters),
and a non-finite step becomes a step with a zero gradient: parameters then move by momentum and
weight decay only. With a fused optimizer, on any device, scaling a gradient costs no pass over it.
"""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from mlflow_tula.errors import InvalidInputError, TrainingError
from mlflow_tula.methods.wrapper import OptimizerWrapper, parameters_with_gradients

Mode = Literal["gradient", "update"]
OnNonfinite = Literal["skip", "raise"]

_INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class StepScaling(OptimizerWrapper):
    """Multiplies each step's gradient or update by a number that a subclass decides.

    Hooks into the optimizer, so training loops, schedulers and GradScaler go on using either the
    optimizer or this wrapper. Its state travels in the optimizer's `state_dict()`. Every rank of a
    DistributedDataParallel job sees the same averaged gradient and so decides the same.
    """

    state_key = "tula_step_scaling"

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        mode: Mode = "gradient",
        max_norm: float | None = None,
        on_nonfinite: OnNonfinite = "skip",
    ) -> None:
        """Hook into the optimizer.

        Args:
            optimizer: any optimizer of torch's interface that steps without a closure.
            mode: multiply the gradient, or the update (the learning rate of this one step).
            max_norm: clip the gradient's norm to this before multiplying. A clip of your own before
                `step()` would be measured instead of the gradient (see `measure`), one after the
                multiplication would undo it.
            on_nonfinite: skip a step with a NaN or infinite gradient, or raise TrainingError.
                Raising reads one number from the device in every step.
        """
        super().__init__(optimizer)
        _check_choice("mode", mode, ("gradient", "update"))
        _check_choice("on_nonfinite", on_nonfinite, ("skip", "raise"))
        if max_norm is not None:
            check_number("max_norm", max_norm, above=0)
        refuse_closures(optimizer)
        self._refuse_second_measure(optimizer)
        if mode == "gradient":
            self._check_gradient_mode(optimizer)
        self.mode: Mode = mode
        self.max_norm = max_norm
        self.on_nonfinite: OnNonfinite = on_nonfinite
        self.gradient_norm: Tensor | None = None
        self._measured: Tensor | None = None
        self._hidden_gradients: list[tuple[torch.nn.Parameter, Tensor]] = []
        self._own_rates: list[Any] = []
        self._before_update: list[Tensor] = []
        self._update_factor: Tensor | None = None
        self._set_attributes: list[str] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_post_hook(self._save_state),
            optimizer.register_load_state_dict_pre_hook(self._load_state),
        ]

    @abstractmethod
    def decide(self, norm: Tensor, finite: Tensor) -> Tensor:
        """The multiplier of this step, 1 where the gradient is not `finite`.

        Args:
            norm: the norm of the unscaled gradient, a 0-d float tensor on the device.
            finite: a 0-d bool tensor.
        """

    @abstractmethod
    def scaling_state(self) -> dict[str, Any]:
        """What `load_scaling_state` needs to continue, as plain numbers."""

    @abstractmethod
    def load_scaling_state(self, state: dict[str, Any]) -> None:
        """Continue from `scaling_state()`."""

    def measure(self) -> None:
        """Take the norm now, for a loop that clips the gradient itself before `step()`.

        Under a GradScaler call `scaler.unscale_(optimizer)` first, as clipping needs it anyway.
        """
        gradients = [p.grad for p in parameters_with_gradients(self.optimizer)]
        self._measured = gradient_norm([g for g in gradients if g is not None])

    def remove(self) -> None:
        """Take the hooks out: the optimizer is as it was before."""
        self._undo()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _check_gradient_mode(self, optimizer: Optimizer) -> None:
        """Subclasses whose multiplier means nothing to some optimizers refuse them here."""

    def _refuse_second_measure(self, optimizer: Optimizer) -> None:
        """Two of these work together only when the first leaves the gradient as it is."""
        hooks = getattr(optimizer, "_optimizer_step_pre_hooks", None)
        if hooks is None:
            raise InvalidInputError(
                f"{type(optimizer).__name__} runs no step hooks: wrap the optimizer inside it"
            )
        for hook in hooks.values():
            other = getattr(hook, "__self__", None)
            if isinstance(other, StepScaling) and (
                other.mode == "gradient" or type(other) is type(self)
            ):
                raise InvalidInputError(
                    f"{type(other).__name__} already scales the steps of this optimizer, and "
                    f"{type(self).__name__} would measure what it leaves: call its remove() first "
                    "(to clip and scale, pass max_norm)"
                )

    def _before_step(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Any) -> None:
        self._undo()  # a step that raised never reached its post-hook
        if any(a is not None for a in (*args[1:], kwargs.get("closure"))):
            raise InvalidInputError(
                f"{type(self).__name__} measures the gradient before step(), where a closure has "
                "not computed it yet: call backward() first and step() without a closure"
            )
        parameters = parameters_with_gradients(optimizer)
        if not parameters:
            return
        gradients = [_dense(parameter) for parameter in parameters]
        loss_scale = getattr(optimizer, "grad_scale", None)
        found_inf = getattr(optimizer, "found_inf", None)
        norm = self._measured if self._measured is not None else gradient_norm(gradients)
        if loss_scale is not None and self._measured is None:
            norm = norm / loss_scale
        self._measured = None
        self.gradient_norm = norm
        finite = torch.isfinite(norm)
        if found_inf is not None:
            finite = finite & (found_inf == 0).to(finite.device)
        multiplier = self.decide(norm, finite)
        if not self._refuse_nonfinite(optimizer, parameters, gradients, finite, found_inf):
            return
        self._apply(optimizer, parameters, gradients, norm, multiplier)

    def _apply(
        self,
        optimizer: Optimizer,
        parameters: list[torch.nn.Parameter],
        gradients: list[Tensor],
        norm: Tensor,
        multiplier: Tensor,
    ) -> None:
        gradient_factor = clip_coefficient(norm, self.max_norm) if self.max_norm else None
        if self.mode == "gradient":
            gradient_factor = (
                multiplier if gradient_factor is None else gradient_factor * multiplier
            )
        if gradient_factor is not None:
            self._scale_gradients(optimizer, gradients, gradient_factor)
        if self.mode == "update":
            self._scale_update(optimizer, parameters, multiplier)

    def _refuse_nonfinite(
        self,
        optimizer: Optimizer,
        parameters: list[torch.nn.Parameter],
        gradients: list[Tensor],
        finite: Tensor,
        found_inf: Tensor | None,
    ) -> bool:
        """Keep a bad gradient out of the step; False when there is nothing left to scale."""
        on_host = finite.device.type == "cpu"
        if on_host or self.on_nonfinite == "raise":
            if bool(finite):
                return True
            if self.on_nonfinite == "raise" and found_inf is None:
                raise TrainingError(
                    "the gradient must be finite, but its norm is "
                    f"{float(self.gradient_norm if self.gradient_norm is not None else math.nan)}: "
                    "lower the learning rate, or pass on_nonfinite='skip'"
                )
            self._hidden_gradients = list(zip(parameters, gradients, strict=True))
            for parameter in parameters:
                parameter.grad = None
            return False
        if _is_fused(optimizer, parameters):
            self._set_for_kernel(optimizer, "found_inf", (~finite).to(torch.float32))
        elif found_inf is None:
            zero_where_(gradients, ~finite)
        return True

    def _scale_gradients(
        self, optimizer: Optimizer, gradients: list[Tensor], factor: Tensor
    ) -> None:
        if not _is_fused(optimizer, gradients):
            multiply_(gradients, factor)
            return
        # The kernel divides by the loss scale anyway: scaling costs no pass of its own there.
        loss_scale = getattr(optimizer, "grad_scale", None)
        scale = factor.reciprocal() if loss_scale is None else loss_scale / factor
        self._set_for_kernel(optimizer, "grad_scale", scale.to(torch.float32))

    def _set_for_kernel(self, optimizer: Optimizer, name: str, value: Tensor) -> None:
        """Hand a tensor to a fused kernel as GradScaler does, which takes its own ones back."""
        if not hasattr(optimizer, name):
            self._set_attributes.append(name)
        setattr(optimizer, name, value)

    def _scale_update(
        self, optimizer: Optimizer, parameters: list[torch.nn.Parameter], multiplier: Tensor
    ) -> None:
        devices = {parameter.device for parameter in parameters}
        if devices == {torch.device("cpu")}:
            self._own_rates = [group["lr"] for group in optimizer.param_groups]
            factor = float(multiplier)
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor
        elif _is_fused(optimizer, parameters):
            self._own_rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = multiplier * group["lr"]
        else:
            self._update_factor = multiplier
            tensors: list[Tensor] = [parameter.detach() for parameter in parameters]
            self._before_update = [tensor.clone() for tensor in tensors]

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._update_factor is not None:
            now: list[Tensor] = [p.detach() for p in parameters_with_gradients(optimizer)]
            move_further_(now, self._before_update, self._update_factor)
        self._undo()

    def _undo(self) -> None:
        """Put back what was changed for one step only."""
        for group, rate in zip(self.optimizer.param_groups, self._own_rates, strict=False):
            group["lr"] = rate
        for parameter, gradient in self._hidden_gradients:
            parameter.grad = gradient
        for name in self._set_attributes:
            delattr(self.optimizer, name)
        self._own_rates, self._hidden_gradients, self._before_update = [], [], []
        self._update_factor, self._set_attributes = None, []

    def _save_state(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, self.state_key: self.scaling_state()}

    def _load_state(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        if self.state_key in state_dict:
            self.load_scaling_state(state_dict[self.state_key])


def _is_fused(optimizer: Optimizer, tensors: Sequence[Tensor]) -> bool:
    """Whether a kernel takes loss scale, overflow flag and rate as tensors of one device."""
    one_device = len({tensor.device for tensor in tensors}) == 1
    return one_device and getattr(optimizer, "_step_supports_amp_scaling", False)


def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """The norm of all gradients as one vector, in at least single precision, on their device."""
    if any(g.dtype in (torch.float16, torch.bfloat16) for g in gradients):
        # In half precision the norm itself overflows at 65,504 while every gradient is finite.
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
        norm = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
    else:
        norm = torch.nn.utils.get_total_norm(gradients)
    # Sharded gradients (FSDP2) give a norm that is still spread over the ranks.
    return cast(Tensor, norm.full_tensor()) if hasattr(norm, "full_tensor") else norm


def clip_coefficient(norm: Tensor, max_norm: float | Tensor) -> Tensor:
    """`min(1, max_norm / (norm + 1e-6))`, as torch.nn.utils.clip_grad_norm_ has it."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def multiply_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply all tensors by one 0-d tensor, in one pass and without reading it on a device."""
    if factor.device.type == "cpu" and float(factor) == 1.0:
        return  # reading costs nothing here, the pass over the gradients does
    for (device, dtype), ([group], _) in _group_tensors_by_device_and_dtype([tensors]).items():  # type: ignore[list-item]
        torch._foreach_mul_(group, factor.to(device=device, dtype=dtype))  # type: ignore[arg-type]


def zero_where_(tensors: list[Tensor], bad: Tensor) -> None:
    """Set all tensors to zero where the 0-d `bad` is true, without reading it.

    Zero times NaN is NaN, so the bits are multiplied as integers, by one or by zero.
    """
    bits = [tensor.view(_INTEGER_OF_SIZE[tensor.element_size()]) for tensor in tensors]
    multiply_bits = [(~bad).to(device=b.device, dtype=b.dtype) for b in bits]
    torch._foreach_mul_(bits, multiply_bits)


def move_further_(now: list[Tensor], before: list[Tensor], factor: Tensor) -> None:
    """`now <- before + factor (now - before)`, exact where the factor is 1; destroys `before`."""
    torch._foreach_sub_(before, now)
    torch._foreach_mul_(before, [(1 - factor).to(b.device, b.dtype) for b in before])
    torch._foreach_add_(now, before)


def refuse_closures(optimizer: Optimizer) -> None:
    """Refuse an optimizer that cannot step without a closure, such as LBFGS."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    required = closure is not None and closure.default is inspect.Parameter.empty
    if isinstance(optimizer, torch.optim.LBFGS) or required:
        raise InvalidInputError(
            "the optimizer must step on gradients that are already there, but "
            f"{type(optimizer).__name__} evaluates a closure within step(): use SGD or Adam"
        )


def check_number(
    name: str,
    value: float,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> float:
    """A finite number within its range, or InvalidInputError naming the range."""
    bounds = [
        f"above {above:g}" if above is not None else "",
        f"at least {at_least:g}" if at_least is not None else "",
        f"at most {at_most:g}" if at_most is not None else "",
    ]
    rule = " and ".join(bound for bound in bounds if bound)
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    good = good and (above is None or value > above)
    good = good and (at_least is None or value >= at_least)
    if not good or (at_most is not None and value > at_most):
        raise InvalidInputError(f"{name} must be a finite number {rule}, not {value!r}".rstrip())
    return float(value)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidInputError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def _dense(parameter: torch.nn.Parameter) -> Tensor:
    gradient = parameter.grad
    if gradient is None or gradient.layout != torch.strided:
        raise InvalidInputError(
            f"gradients must be dense, but a parameter of shape {tuple(parameter.shape)} has a "
            "sparse one: use Embedding(sparse=False), or leave it to an optimizer of its own"
        )
    return gradient
