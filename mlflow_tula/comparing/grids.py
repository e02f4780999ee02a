"""The settings each method is tried with on the validation split; the best there is its best.

Every rival is tuned over what its paper calls its own to tune; warm-up is given as a share of the
training, so that short and long trainings get the same grid. `auto` is not tuned: it is a rule.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlflow_tula.comparing.facts import Task, TaskOptimizer

Settings = Mapping[str, Any]

LEARNING_RATES: Mapping[TaskOptimizer, tuple[float, ...]] = {
    "sgd": (0.005, 0.01, 0.02, 0.05),
    "adam": (0.0005, 0.001, 0.002, 0.005),
}
"""Reference rates tried for the reference batch where none is given."""

SWEEP_FACTORS = (2.0, 4.0, 8.0, 16.0)
SWEEP_THRESHOLDS = (0.1, 0.25, 0.5, 1.0)
"""AGS's grid; the paper's figures 7 and 8 sweep the same two."""

DEFAULT_METHODS = (
    "plain",
    "constant_scaling",
    "sqrt_scaling",
    "linear_scaling",
    "scaling_clip",
    "scaling_autoclip",
    "lars",
    "lars_clip",
    "lamb",
    "static_scaling",
    "ags",
    "ags_shuffled",
    "ags_constant",
    "adascale",
    "post_local_sgd",
    "sam",
    "extrapolation",
    "batch_warmup",
    "batch_growth",
    "auto",
)

_BORROWED = {"ags_shuffled": "ags", "ags_constant": "ags"}
"""Controls run at the settings of the method they control."""


def settings_of(method: str, task: Task) -> list[Settings]:
    """What to try for a method; one empty entry where there is nothing to tune."""
    made = _GRIDS.get(method)
    return [{}] if made is None else list(made(task))


def tuned_as(method: str) -> str:
    """The method whose chosen settings this one takes: itself, but for AGS's controls."""
    return _BORROWED.get(method, method)


def _product(**choices: Sequence[Any]) -> list[Settings]:
    names = list(choices)
    return [
        dict(zip(names, values, strict=True)) for values in itertools.product(*choices.values())
    ]


def _epochs(task: Task, *shares: float) -> list[float]:
    return [round(share * task.epochs, 3) for share in shares]


def _whole_epochs(task: Task, *shares: float) -> list[int]:
    return sorted({max(1, round(share * task.epochs)) for share in shares})


def _growth(task: Task) -> list[Settings]:
    """The batch grows by r at 1/3 and 2/3, or at 1/5 and 2/5, of the training."""
    found: list[Settings] = []
    for marks, factor in itertools.product(((1 / 3, 2 / 3), (1 / 5, 2 / 5)), (0.25, 0.0625)):
        milestones = tuple((max(1, round(mark * task.epochs)), factor) for mark in marks)
        found.append({"epochs": max(1, round(task.epochs)), "milestones": milestones})
    return found


_GRIDS: dict[str, Callable[[Task], Sequence[Settings]]] = {
    "constant_scaling": lambda task: _product(factor=(2.0, 4.0, 8.0, 16.0, 32.0)),
    "sqrt_scaling": lambda task: _product(warmup_epochs=_epochs(task, 0.0, 0.1, 0.2)),
    "linear_scaling": lambda task: _product(warmup_epochs=_epochs(task, 0.1, 0.2, 0.4)),
    "scaling_clip": lambda task: _product(
        max_norm=(0.25, 0.5, 1.0, 2.0), warmup_epochs=_epochs(task, 0.1, 0.2)
    ),
    "scaling_autoclip": lambda task: _product(
        clip_percentile=(10.0, 50.0), warmup_epochs=_epochs(task, 0.1, 0.2)
    ),
    "lars": lambda task: _product(
        learning_rate=(1.0,),
        trust_coefficient=(0.01, 0.02, 0.03, 0.04),
        warmup_epochs=_epochs(task, 0.1, 0.2),
    ),
    "lars_clip": lambda task: _product(
        learning_rate=(1.0,),
        trust_coefficient=(0.02, 0.03, 0.04),
        vector_rule=("linear",),
        warmup_epochs=_epochs(task, 0.1, 0.2),
    ),
    "lamb": lambda task: _product(
        learning_rate=(0.005, 0.01, 0.02, 0.04, 0.08), warmup_epochs=_epochs(task, 0.1)
    ),
    "static_scaling": lambda task: _product(scaling_factor=SWEEP_FACTORS),
    "ags": lambda task: _product(scaling_factor=SWEEP_FACTORS, threshold=SWEEP_THRESHOLDS),
    "post_local_sgd": lambda task: _product(
        rule=("constant",),
        factor=(1.0, 2.0, 4.0, 8.0),
        start_epoch=_epochs(task, 0.3, 0.6),
        warmup_epochs=_epochs(task, 0.1),
    ),
    "sam": lambda task: _product(rho=(0.02, 0.05, 0.1), factor=(2.0, 4.0, 8.0)),
    "extrapolation": lambda task: _product(
        rule=("constant",), factor=(2.0, 4.0, 8.0, 16.0), warmup_epochs=_epochs(task, 0.1, 0.2)
    ),
    "batch_warmup": lambda task: _product(
        epochs=_whole_epochs(task, 0.05, 0.1, 0.2), rule=("sqrt", "linear")
    ),
    "batch_growth": _growth,
}
