"""Optimizers by name, or your own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RAdam, RMSprop

from mlflow_tula.errors import InvalidInputError, UnknownNameError
from mlflow_tula.workloads.job import Job, is_import_path
from mlflow_tula.workloads.resolve import call_with_known, resolve_callable

_OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": SGD,
    "rmsprop": RMSprop,
    "adagrad": Adagrad,
    "adam": Adam,
    "adamw": AdamW,
    "nadam": NAdam,
    "radam": RAdam,
}


def list_optimizers() -> list[str]:
    """Names of the built-in optimizers, sorted."""
    return sorted(_OPTIMIZERS)


def build_optimizer(job: Job, parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]]) -> Any:
    """The job's optimizer over `parameters`.

    `momentum` goes to sgd and rmsprop; the others have their own. Your own function is called
    with the parameters and, by name where it takes them, lr, momentum and weight_decay.

    Raises:
        UnknownNameError: no such optimizer.
    """
    settings: dict[str, float] = {
        "lr": job.resolved_learning_rate,
        "weight_decay": job.weight_decay,
    }
    if is_import_path(job.optimizer):
        return _build_own(job, parameters, {**settings, "momentum": job.momentum})
    name = job.optimizer
    if name not in _OPTIMIZERS:
        hint = "(your own: package.module:function)"
        raise UnknownNameError("optimizer", job.optimizer, _OPTIMIZERS, hint)
    if name in ("sgd", "rmsprop"):
        settings["momentum"] = job.momentum
    return _OPTIMIZERS[name](parameters, **settings)


def _build_own(job: Job, parameters: Any, settings: dict[str, float]) -> Optimizer:
    made = call_with_known(resolve_callable(job.optimizer), parameters, **settings)
    if not isinstance(made, Optimizer):
        raise InvalidInputError(
            f"optimizer {job.optimizer!r} must return a torch.optim.Optimizer, not "
            f"{type(made).__name__}"
        )
    return made
