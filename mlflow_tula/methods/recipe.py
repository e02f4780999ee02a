"""`recipe`: method, learning rate, warm-up and clip for a large batch, in one line.

    optimizer, schedule = recipe(model, batch_size=1024, reference_batch_size=32,
                                 reference_learning_rate=0.05, steps_per_epoch=59)
    ...
    optimizer.step(); schedule.step()              # once per optimizer step

The rule is the table `RULES` below and nothing else. For SGD it is LARS without a rate to tune:
each matrix or kernel steps by 1.25 % x sqrt(B / B0) of its own norm, at most 5 %, and by
sqrt(16 / side) of that where its shorter side is above 16; vectors by the reference rate x
sqrt(B / B0); after a warm-up of a tenth of the training. Momentum is Nesterov's, with your own
coefficient (`nesterov=False` for the plain one): it damps what such long steps overshoot. All of it
was chosen on validation splits (docs/accuracy-generalization.md has the test splits, every rival at
its own best settings). It counts on a learning rate that goes down towards the end, as most
schedules do: pass `decay="linear"`, or put your own schedule on top. At a rate that stays constant
such steps are too long: take `method="scaling_clip"` there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, LinearLR, LRScheduler

from mlflow_tula.errors import InvalidInputError, UnknownNameError
from mlflow_tula.methods.catalogue import build_method, has_warmup
from mlflow_tula.methods.fused import make_fused_where_possible
from mlflow_tula.methods.protocol import Method, TrainingPlan
from mlflow_tula.methods.scale_invariance import ignores_gradient_scale
from mlflow_tula.methods.step_scaling import check_number

OptimizerName = Literal["sgd", "adam", "adamw"]
Family = Literal["sgd", "adaptive"]

Decay = Literal["none", "linear"]

WARMUP_STEPS_WITHOUT_EPOCHS = 200
"""Warm-up when the caller does not say how long an epoch is."""

_OPTIMIZERS: Mapping[str, type[Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeRule:
    """One row: for this kind of optimizer and batch ratios up to `largest_ratio`, this method."""

    family: Family
    largest_ratio: float
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    because: str


RULES: tuple[RecipeRule, ...] = (
    RecipeRule(
        family="sgd",
        largest_ratio=1.0,
        method="plain",
        because="the batch is the reference batch",
    ),
    RecipeRule(
        family="sgd",
        largest_ratio=float("inf"),
        method="lars",
        settings={"relative_step": 0.0125, "cap": 4.0, "rank_limit": 16.0, "nesterov": True},
        because="best on the validation splits of three datasets, with nothing left to tune",
    ),
    RecipeRule(
        family="adaptive",
        largest_ratio=1.0,
        method="plain",
        because="the batch is the reference batch",
    ),
    RecipeRule(
        family="adaptive",
        largest_ratio=float("inf"),
        method="scaling_clip",
        settings={"rule": "linear", "cap": 16.0, "max_norm": 1.0},
        because="ahead of the square-root rule (arXiv 2205.10287) on two validation splits",
    ),
)


WITHOUT_MATRICES = RecipeRule(
    family="sgd",
    largest_ratio=float("inf"),
    method="scaling_clip",
    settings={"rule": "linear", "cap": 16.0, "max_norm": 1.0},
    because="layer-wise steps need matrices; this came next on the validation splits",
)


def choose_method(family: Family, ratio: float) -> RecipeRule:
    """The first row of `RULES` that covers this optimizer family and batch ratio."""
    for rule in RULES:
        if rule.family == family and ratio <= rule.largest_ratio:
            return rule
    raise InvalidInputError(f"no recipe for {family} at {ratio:g} times the reference batch")


def recipe(
    model: torch.nn.Module | Iterable[torch.nn.Parameter] | Optimizer,
    *,
    batch_size: int,
    reference_batch_size: int,
    reference_learning_rate: float | None = None,
    steps_per_epoch: int | None = None,
    epochs: float | None = None,
    method: str | Method = "auto",
    decay: Decay = "none",
    optimizer: OptimizerName = "sgd",
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    **settings: Any,
) -> tuple[Optimizer, LRScheduler]:
    """An optimizer and a per-step schedule for training with a larger batch than the tuned one.

    Args:
        model: a model or its parameters, or an optimizer that carries the reference rate, whose
            momentum and weight decay stay as they are.
        batch_size: the global batch size: local x accumulation x world size.
        reference_batch_size: the batch whose learning rate is known, not above `batch_size`.
        reference_learning_rate: that rate; not needed when `model` is an optimizer.
        steps_per_epoch: at `batch_size`; without it warm-up takes 200 steps.
        epochs: of the whole training; warm-up is a tenth of it, at most (and without it) 5 epochs.
        method: "auto" for the rule, a name of the catalogue, or a method.
        decay: "linear" lets the schedule take the rate to zero at the end (needs `epochs` and
            `steps_per_epoch`); "none" leaves that to a schedule of yours.
        optimizer: made for `model` when that is not one itself; fused where torch can.
        momentum: of SGD.
        weight_decay: of the optimizer.
        **settings: of the method, in place of the rule's: `max_norm=0.5`, `warmup_epochs=2`.

    Returns:
        The optimizer to step and the schedule to advance after every step.

    Raises:
        InvalidInputError: a reference batch above the batch, or a method that needs more than
            `optimizer.step()` (SAM, extrapolation, AdaScale, batch schedules): those run through
            `build_method(name).wrap(optimizer, plan)`.
    """
    if decay not in ("none", "linear"):
        raise InvalidInputError(f"decay must be none or linear, not {decay!r}")
    if decay == "linear" and (epochs is None or steps_per_epoch is None):
        raise InvalidInputError("decay='linear' needs epochs and steps_per_epoch: give both")
    inner = _reference_optimizer(model, optimizer, reference_learning_rate, momentum, weight_decay)
    plan = TrainingPlan(
        global_batch_size=batch_size,
        reference_batch_size=reference_batch_size,
        steps_per_epoch=steps_per_epoch or 1,
        epochs=epochs if steps_per_epoch is not None else None,
    )
    chosen = _method(method, inner, plan, dict(settings), epochs_known=steps_per_epoch is not None)
    run = chosen.wrap(inner, plan)
    if run.needs_closure or run.phases or run.after_backward or run.attach:
        raise InvalidInputError(
            f"method {chosen.name!r} needs more of the loop than optimizer.step(): use "
            f"build_method({chosen.name!r}).wrap(optimizer, plan) and its run"
        )
    schedule = run.schedule or ConstantLR(inner, factor=1.0, total_iters=1)
    if decay == "linear":
        assert epochs is not None
        assert steps_per_epoch is not None
        steps = max(1, round(epochs * steps_per_epoch))
        down = LinearLR(run.optimizer, start_factor=1.0, end_factor=0.0, total_iters=steps)
        return run.optimizer, ChainedScheduler([schedule, down], optimizer=run.optimizer)
    return run.optimizer, schedule


def _reference_optimizer(
    model: torch.nn.Module | Iterable[torch.nn.Parameter] | Optimizer,
    name: str,
    learning_rate: float | None,
    momentum: float,
    weight_decay: float,
) -> Optimizer:
    if isinstance(model, Optimizer):
        if learning_rate is not None:
            for group in model.param_groups:
                group["lr"] = check_number("reference_learning_rate", learning_rate, above=0)
        return model
    if learning_rate is None:
        raise InvalidInputError(
            "reference_learning_rate is needed: the rate that was tuned at reference_batch_size"
        )
    if name not in _OPTIMIZERS:
        raise UnknownNameError("optimizer", name, _OPTIMIZERS)
    rate = check_number("reference_learning_rate", learning_rate, above=0)
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else model
    kwargs: dict[str, Any] = {"lr": rate, "weight_decay": weight_decay}
    if name == "sgd":
        kwargs["momentum"] = momentum
    return make_fused_where_possible(_OPTIMIZERS[name], parameters, **kwargs)


def automatic_method(optimizer: Optimizer, ratio: float, **settings: Any) -> Method:
    """What the rule takes for this optimizer at this batch ratio; `settings` replace the rule's."""
    name, whole = _automatic(optimizer, ratio, settings)
    return build_method(name, **whole)


def _automatic(
    optimizer: Optimizer, ratio: float, settings: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    family: Family = "adaptive" if ignores_gradient_scale(optimizer) else "sgd"
    rule = _rule(family, ratio, optimizer)
    if settings and rule.method == "plain":
        # settings such as a clip hold at the reference batch too, where the rule is plain
        return "scaling_clip", {"max_norm": None, **settings}
    return rule.method, {**rule.settings, **settings}


def _rule(family: Family, ratio: float, optimizer: Optimizer) -> RecipeRule:
    """LARS takes SGD's place, where there are matrices; any other optimizer keeps its own."""
    rule = choose_method(family, ratio)
    shapes = {p.ndim for group in optimizer.param_groups for p in group["params"]}
    replaceable = isinstance(optimizer, torch.optim.SGD) and max(shapes, default=0) > 1
    return WITHOUT_MATRICES if rule.method == "lars" and not replaceable else rule


def _method(
    method: str | Method,
    optimizer: Optimizer,
    plan: TrainingPlan,
    settings: dict[str, Any],
    *,
    epochs_known: bool,
) -> Method:
    if not isinstance(method, str):
        return method
    if not epochs_known and (settings.get("warmup_epochs") or 0) > 0:
        raise InvalidInputError(
            f"warmup_epochs={settings['warmup_epochs']:g} says nothing without steps_per_epoch: "
            "give both"
        )
    if method == "auto":
        method, settings = _automatic(optimizer, plan.ratio, settings)
    if not epochs_known and has_warmup(method):
        settings.setdefault("warmup_epochs", float(WARMUP_STEPS_WITHOUT_EPOCHS))  # of one step each
    return build_method(method, **settings)
