"""Losses by name, or your own: `loss(output, target) -> scalar`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from mlflow_tula.errors import InvalidInputError, UnknownNameError
from mlflow_tula.workloads.job import Job, is_import_path
from mlflow_tula.workloads.resolve import resolve_callable

Loss = Callable[[Any, Tensor], Tensor]


class OneHotMSELoss(nn.Module):
    """Mean squared error between logits and the one-hot target."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean over samples and classes."""
        wanted = one_hot(target, logits.shape[-1]).to(logits.dtype)
        return nn.functional.mse_loss(logits, wanted)


_LOSSES: dict[str, Callable[[], nn.Module]] = {
    "cross_entropy": nn.CrossEntropyLoss,
    "label_smoothing": lambda: nn.CrossEntropyLoss(label_smoothing=0.1),
    "multi_margin": nn.MultiMarginLoss,
    "mse": OneHotMSELoss,
}


def list_losses() -> list[str]:
    """Names of the built-in losses, sorted."""
    return sorted(_LOSSES)


def build_loss(job: Job) -> Loss:
    """The job's loss, the mean over a batch.

    A built-in loss takes the model's logits: of an output with several parts, the first
    (`main_output`). Your own gets the model's output as it is; if `package.module:function` names
    a class, an instance of it is made.

    Raises:
        UnknownNameError: no such loss.
    """
    if is_import_path(job.loss):
        found = resolve_callable(job.loss)
        made: Any = found() if inspect.isclass(found) else found
        return cast(Loss, made)
    if job.loss not in _LOSSES:
        hint = "(your own: package.module:function)"
        raise UnknownNameError("loss", job.loss, _LOSSES, hint)
    criterion = _LOSSES[job.loss]()

    def loss(output: Any, target: Tensor) -> Tensor:
        return criterion(main_output(output), target)  # type: ignore[no-any-return]

    return loss


def main_output(output: Any) -> Tensor:
    """The logits of a model's output: itself, its `logits`, or the first of several."""
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if logits is None and isinstance(output, Mapping):
        logits = output.get("logits", next(iter(output.values()), None))
    if logits is None and isinstance(output, (tuple, list)) and output:
        logits = output[0]
    if not isinstance(logits, Tensor):
        raise InvalidInputError(
            f"the model must return logits, or a tuple that starts with them, not "
            f"{type(output).__name__}"
        )
    return logits


def num_correct(output: Any, target: Tensor) -> Tensor:
    """How many of a batch are classified right, as a whole-number tensor on the same device."""
    with torch.no_grad():
        return (main_output(output).argmax(dim=-1) == target).sum()
