"""LARS on torch's fused SGD kernel: the layer-wise factor costs no pass over the gradients.

The kernel divides each gradient by a scale as it reads it; given 1 / lambda for every matrix, it
takes LARS's step in the pass that plain SGD takes. What is added are the norms of gradients and
weights. It also takes an overflow flag, so a step with a NaN or infinite gradient is skipped, on
every device and without asking it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

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
        found = [(group, p) for group in self.param_groups for p in self._stepping(group)]
        gradients = [p.grad for _, p in found if p.grad is not None]
        if not gradients:
            return loss
        norms = _norms(gradients)
        stacked = torch.stack(norms)
        bad = (~stacked.isfinite().all()).to(torch.float32)
        overflow: Tensor | None = getattr(self, "found_inf", None)
        skip = bad if overflow is None else torch.maximum(bad, overflow.to(bad.device))
        if scale is not None:
            scale = scale.to(bad.device)
        for group in self.param_groups:
            vectors = [p for g, p in found if g is group and p.ndim <= 1]
            if vectors:
                _kernel(self.state, group, vectors, scale, skip)
        at = [i for i, (_, p) in enumerate(found) if p.ndim > 1]
        if at:
            matrices = [found[i] for i in at]
            find = _divisors_one_by_one if _on_host(stacked) else _divisors
            divisors = find(matrices, stacked[at].float(), scale)
            for (group, matrix), divisor in zip(matrices, divisors, strict=True):
                _kernel(self.state, group, [matrix], divisor, skip)
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


def _divisors(
    matrices: list[tuple[dict[str, Any], torch.nn.Parameter]], norms: Tensor, scale: Tensor | None
) -> tuple[Tensor, ...]:
    """What the kernel divides each gradient by; the loss scale drops out, unless weights are zero.

    For all groups at once: twenty small operations on every group would cost as much as a pass.
    """
    place, kind = norms.device, norms.dtype
    trust = [g["trust_coefficient"] for g, _ in matrices]
    coefficients = torch.tensor(trust, device=place, dtype=kind)
    plain = torch.tensor([1 / g["zero_factor"] for g, _ in matrices], device=place, dtype=kind)
    weights = torch.stack(_norms([p.detach() for _, p in matrices])).float()
    inverse = norms / (coefficients * weights)
    inverse = torch.where(weights > 0, inverse, plain if scale is None else plain * scale)
    return torch.where(norms > 0, inverse, 1.0).unbind()


def _divisors_one_by_one(
    matrices: list[tuple[dict[str, Any], torch.nn.Parameter]], norms: Tensor, scale: Tensor | None
) -> Iterator[Tensor]:
    """`_divisors` of the same values for a CPU, where a number can be read for nothing.

    Each is made just before its kernel runs, which then finds the weights in the cache: of the pass
    over the weights, two thirds are saved.
    """
    for (group, matrix), norm in zip(matrices, norms.tolist(), strict=True):
        weight = float(_norms([matrix.detach()])[0])
        divisor = 1.0
        if norm > 0 and weight > 0:
            divisor = norm / (group["trust_coefficient"] * weight)
        elif norm > 0:
            divisor = (1.0 if scale is None else float(scale)) / group["zero_factor"]
        yield torch.tensor(divisor, dtype=torch.float32)


def _on_host(tensor: Tensor) -> bool:
    """Whether a CPU holds all of the values; sharded ones (FSDP2) are spread over ranks."""
    return tensor.device.type == "cpu" and type(tensor) is Tensor


def _kernel(
    state: Any,
    group: dict[str, Any],
    parameters: list[torch.nn.Parameter],
    scale: Tensor | None,
    skip: Tensor,
) -> None:
    """The call that torch's own fused SGD makes, without its sorting by device and type."""
    momentum = group["momentum"]
    torch._fused_sgd_(
        list[Tensor](parameters),
        [p.grad for p in parameters if p.grad is not None],
        [state[p]["momentum_buffer"] for p in parameters] if momentum else [],
        weight_decay=0.0,
        momentum=momentum,
        lr=group["lr"],
        dampening=0.0,
        nesterov=group["nesterov"],
        maximize=False,
        is_first_step=False,
        grad_scale=scale,
        found_inf=skip,
    )


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    if any(t.dtype in (torch.float16, torch.bfloat16) for t in tensors):
        # in half precision a norm overflows at 65,504 while every element is finite
        return list(torch._foreach_norm(tensors, 2, dtype=torch.float32))
    return list(torch._foreach_norm(tensors))
