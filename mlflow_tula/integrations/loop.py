"""One training loop of one thread: its steps, their batch, their gradients.

    |- update 1 -|- batch 2, forward, backward -|- update 2 -|- batch 3 ...
    begin_step                                  begin_step                    one interval

Protocol: the optimizer that steps first is the loop's; what others do in between (the second one
of a GAN) belongs to the step and is no step of its own. An interval goes from the start of an
update to the start of the next, on the host's clock, and so holds exactly one batch. The first
WARMUP_STEPS are not timed, what the observer itself takes is left out, and intervals in which a
data loader began a new pass (a new epoch, an evaluation) are kept apart. Where the device works
asynchronously the host waits for it once its queue is full, so that the median over many steps is
the device's.
"""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mlflow_tula.integrations.facts import WARMUP_STEPS, LoopFacts, ObserverSettings, StepKey
from mlflow_tula.integrations.gradient_samples import GradientSampler
from mlflow_tula.integrations.layer_noise import LayerNoise
from mlflow_tula.integrations.model_calls import (
    CallWatch,
    Observation,
    parameters_of,
    unwrapped,
)
from mlflow_tula.integrations.step_times import StepTimes
from mlflow_tula.specs import Precision

Drawn = tuple[int, ...]
"""Sizes of the batches that were drawn from data loaders for a step."""

_MOST_KNOWN = 200
_TAKES_OVER = 25
"""Steps of another optimizer alone after which the loop is taken to be over."""


class Loop:
    """Called at the start and the end of every optimizer step, in the training thread."""

    def __init__(
        self,
        optimizer: Optimizer,
        settings: ObserverSettings,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin with the loop's first step.

        Args:
            optimizer: whose steps count; not kept alive.
            settings: how often to look.
            data: what `describe_loader` says of the loader over which the thread began a pass last.
        """
        self.settings = settings
        self.optimizer = weakref.ref(optimizer)
        self.times = StepTimes()
        self.gradients = GradientSampler(every=settings.gradient_every_n_steps)
        self.noise = LayerNoise()
        self.step = 0
        self.key: StepKey | None = None
        self._own_s = 0.0
        self._last: float | None = None
        self._watch: CallWatch | None = None
        self._known: dict[Drawn, StepKey] = {}
        self._drawn: Drawn = ()
        self._look_at: int | None = None
        # Own, so that the user's random numbers stay theirs; at random, because every tenth step
        # may always be the short one at the end of an epoch.
        self._random = random.Random(0)
        self._others: dict[int, int] = {}
        self._may_be_over = False
        self._data = dict(data or {})
        self._model: weakref.ref[nn.Module] | None = None
        self._shape: tuple[int, ...] | None = None
        self._precision: Precision | None = None
        self._facts: LoopFacts | None = None

    @property
    def over(self) -> bool:
        """Whether the optimizer is gone."""
        return self.optimizer() is None

    def claims(self, optimizer: Optimizer) -> bool:
        """Whether another optimizer's step belongs to this loop; False: a new loop has begun."""
        if self.over or self._may_be_over:
            return False
        count = self._others[id(optimizer)] = self._others.get(id(optimizer), 0) + 1
        return count < _TAKES_OVER

    def begin_step(self, drawn: Drawn, *, paused: bool, closure: bool) -> None:
        """The optimizer is about to step.

        Args:
            drawn: batches drawn since the last step.
            paused: a loader began a new pass since then.
            closure: forward and backward come inside the step (LBFGS, Lightning).
        """
        now = time.perf_counter()
        optimizer = self.optimizer()
        if optimizer is None:
            return
        self._others.clear()
        self._may_be_over = False
        if self._watch is None:
            self._watch = CallWatch(optimizer)
        if closure:
            # The pass of the step before lies in this interval.
            self._watch.enter_closure()
        else:
            self._learn(drawn)
            self.key = self._key_of(drawn)
        if self._last is not None and self.step > WARMUP_STEPS:
            self.times.add(now - self._last - self._own_s, self.key, paused=paused)
        self.step += 1
        self._last, self._own_s, self._drawn = now, 0.0, drawn
        if not closure:
            self.noise.finish()
            self._read_gradients(optimizer)
        self.spent(now)

    def end_step(self, *, closure: bool) -> None:
        """The optimizer has stepped."""
        begin = time.perf_counter()
        optimizer, watch = self.optimizer(), self._watch
        if optimizer is None or watch is None:
            return
        if closure:
            self._learn(self._drawn)
            self.key = self._key_of(self._drawn)
            self.noise.finish()
            self._read_gradients(optimizer)
        if self._wants_look() and not watch.hopeless:
            watch.arm()
        model = None if self._model is None else self._model()
        wanted = self.settings.log_noise_scale and self.gradients.begins(self.step + 1)
        if wanted and model is not None:
            self.noise.arm(model, None if self.key is None else self.key.local_batch_size)
        self.spent(begin)

    def spent(self, begin: float) -> None:
        """Leave the time since `begin` out of the current interval: it was the observer's."""
        self._own_s += time.perf_counter() - begin

    def release(self) -> None:
        """Take all hooks off the model."""
        if self._watch is not None:
            self._watch.disarm()
        self.noise.disarm()

    def leave_run(self) -> None:
        """Forget the intervals so far: from here on they are another run's.

        Another optimizer that steps first in that run begins another loop.
        """
        self.times = StepTimes()
        self._may_be_over = True

    def _read_gradients(self, optimizer: Optimizer) -> None:
        if not self.gradients.due(self.step):
            return
        self.gradients.take(optimizer, self.step)

    def _learn(self, drawn: Drawn) -> None:
        """Take what a watched step showed, if this one was watched."""
        watch = self._watch
        if watch is None or not watch.armed:
            return
        seen = watch.finish(drawn[0] if drawn else None)
        if seen is None:
            return
        if len(self._known) < _MOST_KNOWN or drawn in self._known:
            self._known[drawn] = seen.key
        self._note(seen)

    def _note(self, seen: Observation) -> None:
        """Model, precision, and the shape of a sample, with -1 for sides that vary."""
        if self._model is None or self._model() is not seen.model:
            self._model = weakref.ref(seen.model)
            # A sharded model's gradients are parts on each rank.
            if "FullyShardedDataParallel" in type(seen.model).__name__:
                self.gradients.stop()
        self._precision = seen.precision
        self._facts = None
        before, now = self._shape, seen.sample_shape
        if before is None or len(before) != len(now):
            self._shape = now
        else:
            self._shape = tuple(a if a == b else -1 for a, b in zip(before, now, strict=True))

    def _key_of(self, drawn: Drawn) -> StepKey | None:
        """The batch of a step, from what was drawn for it; asks for a look where that is new."""
        known = self._known.get(drawn)
        if known is not None or not drawn or min(drawn) < 1:
            return known
        if self._loader_tells():
            return StepKey(max(drawn), len(drawn))
        self._look_at = self.step + 2
        return None

    def _loader_tells(self) -> bool:
        """Whether batches that were drawn are the passes that were seen, one for one."""
        if not self._known:
            return self._watch is not None and self._watch.hopeless
        return any(
            drawn and key == StepKey(max(drawn), len(drawn)) for drawn, key in self._known.items()
        )

    def _wants_look(self) -> bool:
        """Whether the model's calls are to be watched until the next step."""
        coming = self.step + 1
        if coming <= WARMUP_STEPS + 2:
            return True
        if self._look_at is None and not self._drawn:
            # No loader says when the batch changes.
            self._look_at = coming + self._random.randrange(self.settings.every_n_steps)
        if self._look_at is not None and coming >= self._look_at:
            self._look_at = None
            return True
        return False

    def facts(self) -> LoopFacts:
        """What is trained, as far as it was seen; asked at every step, as long as it is there."""
        if self._facts is None:
            self._facts = self._describe()
        return self._facts

    def _describe(self) -> LoopFacts:
        optimizer = self.optimizer()
        parameters = [p for p in parameters_of(optimizer) if p.requires_grad]
        model = None if self._model is None else self._model()
        inner = None if model is None else unwrapped(model)
        kind = parameters[0].device.type if parameters else "cpu"
        sharded = model is not None and "FullyShardedDataParallel" in type(model).__name__
        group = optimizer.param_groups[0] if optimizer is not None else {}
        momentum = group.get("momentum")
        return LoopFacts(
            model="loop" if inner is None else type(inner).__name__,
            num_parameters=max(sum(p.numel() for p in parameters), 1),
            optimizer=type(optimizer).__name__.lower(),
            input_shape=self._shape,
            precision=self._precision or "fp32",
            strategy="fsdp" if sharded else "ddp",
            batch_norm=inner is not None
            and any("BatchNorm" in type(part).__name__ for part in inner.modules()),
            momentum=float(momentum) if isinstance(momentum, int | float) else None,
            device_type=kind,
            num_threads=torch.get_num_threads() if kind == "cpu" else None,
            **self._data,
        )


def describe_loader(loader: Any) -> dict[str, Any]:
    """Name and size of a loader's dataset, and whether short batches are dropped."""
    dataset = getattr(loader, "dataset", None)
    if dataset is None:
        return {}
    try:
        size = len(dataset)
    except Exception:  # iterable datasets have no length, or a wrong one
        size = 0
    inner = dataset
    while type(inner).__name__ == "Subset" and hasattr(inner, "dataset"):
        inner = inner.dataset
    drop = getattr(loader, "drop_last", False) or getattr(
        getattr(loader, "batch_sampler", None), "drop_last", False
    )
    return {
        "dataset": type(inner).__name__,
        "dataset_size": size if size > 0 else None,
        "drop_last": bool(drop),
    }
