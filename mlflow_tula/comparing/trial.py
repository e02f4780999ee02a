"""One training run of a comparison: same data order, same start and same budget for every method.

Protocol: weights from `torch.manual_seed(seed)`; batches cut from one seeded stream of permutations
(`SampleStream`), so methods and batch sizes see the same samples in the same order; constant
reference learning rate, which the method scales, warms up or replaces; the budget is a number of
samples (epochs x dataset) or of process seconds on one thread; the split is measured along the way
only to be recorded, never to stop or choose.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from mlflow_tula.comparing.data import ArrayData, SampleStream, load, shards
from mlflow_tula.comparing.facts import Outcome, Task, Trial
from mlflow_tula.comparing.local_steps import LocalSteps
from mlflow_tula.comparing.networks import build_network, wants_rgb
from mlflow_tula.methods.ags import (
    AdaptiveGradientScaling,
    AdaptiveScalingMethod,
    ReplayedScaling,
    constant_mean,
    shuffled,
)
from mlflow_tula.methods.averaging import PostLocalMethod
from mlflow_tula.methods.catalogue import build_method
from mlflow_tula.methods.fused import make_fused_where_possible
from mlflow_tula.methods.protocol import Method, MethodRun, TrainingPlan
from mlflow_tula.methods.recipe import Family, choose_method

CONTROLS = ("ags_shuffled", "ags_constant")
"""AGS's own multipliers of the same seed: at other times, and their mean in every step."""
AUTO = "auto"
"""What `recipe` takes by its rule."""

CURVE_AT = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75)
"""Shares of the budget at which training loss and accuracy are recorded, besides the end."""
LARGEST_TRAIN_EVALUATION = 5000
SHARDS = 8
"""Passes that stand for the workers of AdaScale and extrapolation, as for post-local SGD's."""
EVALUATION_BATCH = 2000


def run_trial(trial: Trial) -> Outcome:
    """Train and measure; divergence is an outcome, not an error."""
    if trial.method in CONTROLS:
        return _run_control(trial)
    return _Training(trial).run()


def right_images(trial: Trial) -> Tensor:
    """Train, and say of each image of the measured split whether it is classified right.

    Returns:
        A bool tensor of as many entries as the split has images, in their order.
    """
    training = _Training(trial)
    training.run()
    training.model.eval()
    with torch.no_grad():
        images = torch.split(training.data.eval_x, EVALUATION_BATCH)
        found = torch.cat([training.model(x).argmax(1) for x in images])
    return found == training.data.eval_y


def resolve_method(trial: Trial) -> Method:
    """The method that a trial names, with its settings."""
    name, settings = trial.method, dict(trial.settings)
    if name == AUTO:
        settings = {**auto_settings(trial.task, trial.batch_size), **settings}
        name = settings.pop("method")
    return build_method(name, **settings)


def auto_settings(task: Task, batch_size: int) -> dict[str, Any]:
    """What `recipe` chooses by its rule, spelled out, so that a record says which rule it was."""
    family: Family = "sgd" if task.optimizer == "sgd" else "adaptive"
    rule = choose_method(family, batch_size / task.reference_batch_size)
    return {"method": rule.method, **rule.settings}


def _run_control(trial: Trial) -> Outcome:
    """Train with AGS to learn its multipliers, then again from the start with the control's."""
    with_ags = replace(trial, method="ags")
    first = _Training(with_ags, record=True)
    first.run()
    scaling = first.run_of.optimizer
    assert isinstance(scaling, AdaptiveGradientScaling)
    multipliers = scaling.multipliers
    control = (
        shuffled(multipliers, trial.seed)
        if trial.method == "ags_shuffled"
        else constant_mean(multipliers)
    )
    return _Training(trial, wrap=_Replay(control, scaling)).run()


@dataclass(frozen=True, slots=True)
class _Replay:
    """A method that replays multipliers the way the scaling that made them applied its own."""

    multipliers: list[float]
    like: AdaptiveGradientScaling
    name: str = "replay"

    def wrap(self, optimizer: Optimizer, plan: TrainingPlan) -> MethodRun:
        replayed = ReplayedScaling(optimizer, self.multipliers, mode=self.like.mode)
        return MethodRun(optimizer=replayed, global_batch_size=plan.global_batch_size)


@contextmanager
def _decayed(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Every rate times `factor` for the block, which may change the rates as well.

    Around the step and not in hooks of it: hooks that put a rate back run in the order in which
    they were made, so a method's own would not undo what it had done.
    """
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    yield
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] / factor


@dataclass(slots=True)
class _Clock:
    """Seconds of training alone: evaluation is not counted."""

    cpu: float = 0.0
    wall: float = 0.0
    _since: tuple[float, float] | None = field(default=None)

    def start(self) -> None:
        self._since = (time.process_time(), time.perf_counter())

    def stop(self) -> None:
        assert self._since is not None
        self.cpu += time.process_time() - self._since[0]
        self.wall += time.perf_counter() - self._since[1]
        self._since = None

    def now(self) -> float:
        assert self._since is not None
        return self.cpu + time.process_time() - self._since[0]


class _Training:
    """Model, method and data of one trial."""

    def __init__(self, trial: Trial, *, record: bool = False, wrap: Method | None = None) -> None:
        task = trial.task
        self.trial = trial
        self.data = load(task.dataset, trial.split, task.data_dir, wants_rgb(task.network))
        self.method = wrap or resolve_method(trial)
        if record and isinstance(self.method, AdaptiveScalingMethod):
            self.method = replace(self.method, record=True)
        torch.manual_seed(trial.seed)
        self.model = _network(task, self.data)
        self.plan = TrainingPlan(
            global_batch_size=trial.batch_size,
            reference_batch_size=task.reference_batch_size,
            steps_per_epoch=max(1, round(self.count / trial.batch_size)),
            epochs=task.epochs,
        )
        self.local = None
        optimizer = reference_optimizer(task, self.model)
        if isinstance(self.method, PostLocalMethod):
            self.local = LocalSteps(self.method, self.model, optimizer, self.plan)
            self.run_of = self.local.run
        else:
            self.run_of = self.method.wrap(optimizer, self.plan)
        self.steps = self.samples = 0
        self.clock = _Clock()
        self.curve: list[tuple[float, float, float]] = []

    @property
    def count(self) -> int:
        """Training samples of an epoch."""
        return len(self.data.train_y)

    def run(self) -> Outcome:
        """Train within the budget, then measure."""
        self.model.train()
        # tuning runs are only measured at their end
        points = iter(CURVE_AT if self.trial.split == "test" else ())
        next_point = next(points, math.inf)
        finite = True
        self.clock.start()
        for at, rate in self._batches():
            with _decayed(self.run_of.optimizer, rate):
                finite = self._step(self.data.train_x[at], self.data.train_y[at])
            if not finite:
                break
            while self._progress() >= next_point:
                next_point = next(points, math.inf)
                if self._progress() < next_point:
                    self._record()
        self.clock.stop()
        if self.local is not None:
            self.local.finish()
        return self._outcome(finite)

    def _batches(self) -> Iterator[tuple[Tensor, float]]:
        """Indices of the next batch, and the factor of a decay for its step."""
        stream = SampleStream(self.count, self.trial.seed)
        total = round(self.trial.task.epochs * self.count)
        limit = self.trial.time_limit_s
        decays = self.trial.task.decay == "linear"
        while True:
            size = self.run_of.begin_epoch(self.samples // self.count)
            if (limit is None and self.samples + size > total) or (
                limit is not None and self.clock.now() >= limit
            ):
                return
            rate = max(1.0 - self._progress(), 1e-3) if decays else 1.0
            self.samples += size
            self.steps += 1
            yield stream.take(size), rate

    def _progress(self) -> float:
        limit = self.trial.time_limit_s
        if limit is not None:
            return self.clock.now() / limit
        return self.samples / (self.trial.task.epochs * self.count)

    def _step(self, inputs: Tensor, labels: Tensor) -> bool:
        """One optimizer step; whether the loss was still a finite number."""
        if self.local is not None:
            return math.isfinite(self.local.step(inputs, labels))
        run = self.run_of
        pieces = SHARDS if run.after_backward is not None else 1

        def closure() -> Tensor:
            run.optimizer.zero_grad()
            whole = torch.zeros(())
            for x, y in shards(pieces, inputs, labels):
                loss = cross_entropy(self.model(x), y) * (len(y) / len(labels))
                loss.backward()  # type: ignore[no-untyped-call]
                whole = whole + loss.detach()
                if run.after_backward is not None:
                    run.after_backward()
            return whole

        return math.isfinite(float(run.step(closure)))

    def _record(self) -> None:
        self.clock.stop()
        model = self.model if self.local is None else self.local.averaged()
        loss, _ = _measure(model, *self._train_sample())
        _, accuracy = _measure(model, self.data.eval_x, self.data.eval_y)
        epochs = self.samples / self.count
        if math.isfinite(loss):
            self.curve.append((round(epochs, 4), round(loss, 6), round(accuracy, 5)))
        self.clock.start()

    def _train_sample(self) -> tuple[Tensor, Tensor]:
        size = min(self.count, LARGEST_TRAIN_EVALUATION)
        return self.data.train_x[:size], self.data.train_y[:size]

    def _outcome(self, finite: bool) -> Outcome:
        loss, accuracy = _measure(self.model, self.data.eval_x, self.data.eval_y)
        train_loss, train_accuracy = _measure(self.model, *self._train_sample())
        diverged = not (finite and math.isfinite(loss) and math.isfinite(train_loss))
        if not diverged:
            epochs = round(self.samples / self.count, 4)
            self.curve.append((epochs, round(train_loss, 6), round(accuracy, 5)))
        scaling = self.run_of.optimizer
        share = scaling.scaled_share if isinstance(scaling, AdaptiveGradientScaling) else None
        return Outcome(
            trial=self.trial,
            accuracy=accuracy,
            loss=None if diverged else loss,
            train_loss=None if diverged else train_loss,
            train_accuracy=train_accuracy,
            steps=self.steps,
            samples=self.samples,
            cpu_time_s=round(self.clock.cpu, 3),
            wall_time_s=round(self.clock.wall, 3),
            diverged=diverged,
            scaled_share=share,
            curve=tuple(self.curve),
        )


def _network(task: Task, data: ArrayData) -> nn.Module:
    return build_network(task.network, task.dataset, data.train_x.shape[1:], data.num_classes)


def reference_optimizer(task: Task, model: nn.Module) -> Optimizer:
    """SGD or Adam with the task's settings."""
    settings: dict[str, Any] = {"lr": task.learning_rate, "weight_decay": task.weight_decay}
    kind: Callable[..., Optimizer] = torch.optim.Adam
    if task.optimizer == "sgd":
        kind = torch.optim.SGD
        settings["momentum"] = task.momentum
    return make_fused_where_possible(kind, model.parameters(), **settings)


@torch.no_grad()
def _measure(model: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[float, float]:
    """Mean loss and accuracy in evaluation mode."""
    was_training = model.training
    model.eval()
    loss, right = 0.0, 0
    for at in range(0, len(labels), EVALUATION_BATCH):
        x, y = inputs[at : at + EVALUATION_BATCH], labels[at : at + EVALUATION_BATCH]
        out = model(x)
        loss += float(cross_entropy(out, y, reduction="sum"))
        right += int((out.argmax(1) == y).sum())
    model.train(was_training)
    return loss / len(labels), right / len(labels)
