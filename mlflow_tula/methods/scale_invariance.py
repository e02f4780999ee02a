"""Does a scaled gradient change an optimizer's steps at all? Asked of the optimizer itself."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.optim import Optimizer

_logger = logging.getLogger(__name__)

_FACTOR = 4.0
# RAdam steps like SGD until its sixth step, so the first ten do not count.
_STEPS = 14
_STEPS_BEFORE = 10


def ignores_gradient_scale(optimizer: Optimizer) -> bool:
    """Whether gradients four times as large move the weights by as much as before.

    True for Adam, AdamW, RMSprop, Adagrad, Lion, LARS, LAMB and whatever else divides by the
    gradient's size. Takes a few steps of a fresh optimizer of the same class and settings on one
    small matrix, so it also answers for optimizers this package has never heard of. One that
    cannot be made that way (its constructor wants more) counts as sensitive to scale.
    """
    inner = optimizer
    while hasattr(inner, "optimizer") and isinstance(inner.optimizer, Optimizer):
        inner = inner.optimizer
    try:
        with torch.random.fork_rng(devices=[]):
            plain, scaled = _movement(inner, 1.0), _movement(inner, _FACTOR)
    except Exception as error:  # any optimizer's constructor may ask for what we do not know
        _logger.debug("cannot try %s on a small matrix: %s", type(inner).__name__, error)
        return False
    return bool(torch.linalg.vector_norm(scaled) < 1.01 * torch.linalg.vector_norm(plain))


def _movement(optimizer: Optimizer, factor: float) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.tensor([[1.0, -2.0], [0.5, 3.0]]))
    before = parameter.detach().clone()
    settings: dict[str, Any] = {
        name: value
        for name, value in optimizer.defaults.items()
        if name not in ("weight_decay", "fused", "capturable", "decoupled_weight_decay")
    }
    settings["lr"] = 1e-3  # the current rate may be 0 at the start of a warm-up
    trial = type(optimizer)([parameter], **settings)
    for step in range(_STEPS):
        if step == _STEPS_BEFORE:
            before = parameter.detach().clone()
        parameter.grad = factor * torch.tensor([[0.3, -0.1], [0.2, 0.4 + 0.01 * step]])
        trial.step()
    return parameter.detach() - before
