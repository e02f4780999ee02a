"""torch's fused SGD and Adam, where they can be used: one pass over gradients and weights a step.

A fused optimizer divides by a loss scale within its kernel, so a clip or a multiplier costs no pass
of its own (see `step_scaling`), and it takes an overflow flag, so a bad step is skipped without the
host knowing. torch's fused SGD fails when a parameter gets its first gradient later than the
others (a layer left out of the first step): its momentum buffer is missing. A hook adds it; with
a buffer of zeros the update is the one of plain SGD.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from mlflow_tula.methods.wrapper import parameters_with_gradients

_FUSED_DEVICES = ("cpu", "cuda")


def supports_fused(parameters: Iterable[torch.nn.Parameter]) -> bool:
    """Whether torch's fused kernels take these parameters: on one device of a kind, and real."""
    everything = list(parameters)
    devices = {parameter.device for parameter in everything}
    return (
        len(devices) == 1
        and next(iter(devices)).type in _FUSED_DEVICES
        and all(parameter.is_floating_point() for parameter in everything)
    )


def make_fused_where_possible(
    kind: Callable[..., Optimizer], parameters: Iterable[torch.nn.Parameter], **settings: Any
) -> Optimizer:
    """An SGD, Adam or AdamW, fused when its parameters allow it."""
    everything = list(parameters)
    if not supports_fused(everything):
        return kind(everything, **settings)
    optimizer = kind(everything, **settings, fused=True)
    if kind is torch.optim.SGD and settings.get("momentum"):
        optimizer.register_step_pre_hook(_add_missing_momentum)
    return optimizer


def _add_missing_momentum(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    stepping = parameters_with_gradients(optimizer)
    missing = [p for p in stepping if optimizer.state[p].get("momentum_buffer") is None]
    if missing and len(missing) < len(stepping):
        for parameter in missing:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
