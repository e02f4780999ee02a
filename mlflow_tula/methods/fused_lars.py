"""LARS on torch's fused SGD kernel: the layer-wise factor costs no pass over the gradients.

The kernel divides each gradient by a scale as it reads it; given 1 / lambda for every matrix, it
takes LARS's step in the pass that plain SGD takes. What is added are the norms of gradients and
weights. It also takes an overflow flag, so a step with a NaN or infinite gradient is skipped, on
every device and without asking it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.sgd import sgd

from mlflow_tula.errors import InvalidInputError


class FusedLars(Optimizer):
    """LARS without weight decay: v <- m v + eta |w| / |g| g;  w <- w - lr v.

    Scalars and vectors step by plain SGD. A matrix whose weights are all zero has no size to step
    by: `zero_factor` stands for eta |w| / |g| there.
    """

    # GradScaler then hands over loss scale and overflow flag instead of unscaling by itself.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        trust_coefficient: float = 0.001,
        zero_factor: float = 1.0,
    ) -> None:
        """Take parameters or groups that torch's fused SGD supports (`fused.supports_fused`)."""
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "trust_coefficient": trust_coefficient,
            "zero_factor": zero_factor,
            "weight_decay": 0.0,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; a non-finite gradient skips it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale: Tensor | None = getattr(self, "grad_scale", None)
        groups = [(group, self._stepping(group)) for group in self.param_groups]
        gradients = [p.grad for _, found in groups for p in found if p.grad is not None]
        if not gradients:
            return loss
        norms = _norms(gradients)
        bad = (~torch.stack(norms).isfinite().all()).to(torch.float32)
        overflow: Tensor | None = getattr(self, "found_inf", None)
        skip = bad if overflow is None else torch.maximum(bad, overflow.to(bad.device))
        done = 0
        for group, found in groups:
            self._step_group(group, found, norms[done : done + len(found)], scale, skip)
            done += len(found)
        return loss

    def _stepping(self, group: dict[str, Any]) -> list[torch.nn.Parameter]:
        found = [p for p in group["params"] if p.grad is not None]
        for parameter in found:
            if parameter.grad.is_sparse:
                raise InvalidInputError(
                    "LARS takes no sparse gradients: make the embedding with sparse=False"
                )
            if group["momentum"] and not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return found

    def _step_group(
        self,
        group: dict[str, Any],
        found: list[torch.nn.Parameter],
        norms: list[Tensor],
        scale: Tensor | None,
        skip: Tensor,
    ) -> None:
        vectors = [p for p in found if p.ndim <= 1]
        if vectors:
            self._kernel(group, vectors, scale, skip)
        matrices = [(p, norm) for p, norm in zip(found, norms, strict=True) if p.ndim > 1]
        if not matrices:
            return
        weights = torch.stack(_norms([p.detach() for p, _ in matrices])).float()
        gradients = torch.stack([norm for _, norm in matrices]).float()
        # what the kernel divides by: the loss scale drops out, unless the weights are zero
        inverse = gradients / (group["trust_coefficient"] * weights)
        plain = torch.full_like(inverse, 1 / group["zero_factor"])
        inverse = torch.where(weights > 0, inverse, plain if scale is None else plain * scale)
        inverse = torch.where(gradients > 0, inverse, 1.0)
        for (parameter, _), divisor in zip(matrices, inverse.unbind(), strict=True):
            self._kernel(group, [parameter], divisor, skip)

    def _kernel(
        self,
        group: dict[str, Any],
        parameters: list[torch.nn.Parameter],
        scale: Tensor | None,
        skip: Tensor,
    ) -> None:
        buffers = [self.state[p].get("momentum_buffer") for p in parameters]
        gradients = [p.grad for p in parameters if p.grad is not None]
        sgd(
            list(parameters),
            gradients,
            buffers,
            fused=True,
            grad_scale=scale,
            found_inf=skip,
            weight_decay=0.0,
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=group["nesterov"],
            maximize=False,
        )


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    if any(t.dtype in (torch.float16, torch.bfloat16) for t in tensors):
        # in half precision a norm overflows at 65,504 while every element is finite
        return list(torch._foreach_norm(tensors, 2, dtype=torch.float32))
    return list(torch._foreach_norm(tensors))
