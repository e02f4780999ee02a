"""Who is called in a training step, with how many samples, how often.

    models_of(optimizer)     the modules that hold an optimizer's parameters, outermost first
    CallWatch                one step long: samples and passes of the outermost model that is called
    count_samples(...)       samples in the arguments of a call: tensors, dicts, tuples, objects

A step is watched now and then only, by forward pre-hooks on the model itself: hooks common to all
modules would slow every one of them down and stop `module.compile()` from compiling.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from mlflow_tula.integrations.facts import StepKey
from mlflow_tula.integrations.hooks import Hook
from mlflow_tula.specs import Precision

_MOST_LEVELS = 6
_MOST_LOOKED_AT = 64
_PRECISIONS: dict[torch.dtype, Precision] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What one watched step showed."""

    key: StepKey
    model: nn.Module
    sample_shape: tuple[int, ...]
    precision: Precision


def parameters_of(optimizer: Optimizer | None) -> list[Tensor]:
    """All parameters of an optimizer; none of one that is gone."""
    if optimizer is None:
        return []
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def models_of(parameters: Iterable[Tensor]) -> list[nn.Module]:
    """The outermost modules that hold some of the parameters; looks through all live objects.

    Costs about 0.1 s with half a million objects, so it is asked once a loop, in its first step.
    """
    wanted = {id(parameter) for parameter in parameters}
    objects = gc.get_objects()
    # By type, and never by isinstance: lazy proxies run code when asked for their class.
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, nn.Module)}
    holders = [one for one in objects if type(one) in kinds and _holds(one, wanted)]
    del objects
    inner = {id(part) for one in holders for part in _parts(one) if part is not one}
    return [one for one in holders if id(one) not in inner]


def _holds(module: nn.Module, wanted: set[int]) -> bool:
    with contextlib.suppress(Exception):  # half-made modules, modules with own parameters()
        return any(id(parameter) in wanted for parameter in module.parameters())
    return False


def _parts(module: nn.Module) -> list[nn.Module]:
    with contextlib.suppress(Exception):
        return list(module.modules())
    return []


class CallWatch:
    """Finds the outermost model that is called, and counts samples and passes of a step.

    A pass is a call after which gradients have changed: a model that is called twice before one
    `backward()` makes one pass. Modules that hold the parameters and are never called themselves
    (a LightningModule) are replaced by their parts.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        """Look for the models of this optimizer's parameters; holds on to neither."""
        self._optimizer = weakref.ref(optimizer)
        found = models_of(self._parameters())
        self._models = [weakref.ref(model) for model in found if _can_hook(model)]
        self._levels = 0
        self._handles: list[RemovableHandle] = []
        self._called: weakref.ref[nn.Module] | None = None
        self._probe: Tensor | None = None
        self._mark: tuple[int, int] | None = None
        self._passes: list[int] = []
        self._before_closure: int | None = None
        self._shape: tuple[int, ...] = ()
        self._precision: Precision | None = None

    def _parameters(self) -> list[Tensor]:
        return parameters_of(self._optimizer())

    @property
    def hopeless(self) -> bool:
        """Whether no module of these parameters can be watched."""
        return not self._models

    @property
    def armed(self) -> bool:
        """Whether this step is watched."""
        return bool(self._handles)

    def arm(self) -> None:
        """Watch from now to `finish`."""
        self._probe = self._find_probe()
        self._called, self._mark, self._passes, self._before_closure = None, None, [], None
        self._precision = None
        for model in self._live():
            hook = Hook(self._on_call)
            self._handles.append(model.register_forward_pre_hook(hook, with_kwargs=True))

    def enter_closure(self) -> None:
        """The optimizer calls its closure from here on: all its calls are one pass."""
        self._before_closure = len(self._passes)

    def finish(self, batch_size: int | None = None) -> Observation | None:
        """Stop watching; what was seen, None where nothing was.

        Args:
            batch_size: the data loader's; tells which of the first two sides counts samples.
        """
        if not self.armed:
            return None
        self.disarm()
        model = None if self._called is None else self._called()
        passes, self._called, self._probe = self._passes, None, None
        if model is None:
            self._descend()
            return None
        self._models = [weakref.ref(model)]
        if self._before_closure is not None:
            passes = passes[: self._before_closure] + passes[self._before_closure :][:1]
        if not passes or max(passes) < 1:
            return None
        samples, shape = max(passes), self._shape
        if batch_size is not None and shape and samples != batch_size == shape[0]:
            samples, shape = batch_size, (samples, *shape[1:])  # sequence first
        return Observation(
            key=StepKey(samples, len(passes)),
            model=model,
            sample_shape=shape,
            precision=self._precision or _stored_precision(self._parameters()),
        )

    def disarm(self) -> None:
        """Take every hook off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _on_call(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward pre-hook: note the samples of the first model that is called."""
        if not torch.is_grad_enabled():
            return
        if self._called is not None and self._called() is not model:
            return
        if self._called is None:
            self._called = weakref.ref(model)
            leaf = next((m for m in model.modules() if m._parameters), None)
            if leaf is not None:
                # Inside the model's own autocast, if it has one.
                hook = Hook(self._on_leaf)
                self._handles.append(leaf.register_forward_pre_hook(hook, with_kwargs=True))
        found = count_samples((args, kwargs))
        samples, self._shape = found if found is not None else (0, ())
        mark = self._gradients_mark()
        if self._passes and mark == self._mark:
            self._passes[-1] = max(self._passes[-1], samples)
        else:
            self._passes.append(samples)
        self._mark = mark

    def _on_leaf(self, leaf: nn.Module, args: Any, kwargs: Any) -> None:
        """Whether autocast is on where the first layer computes."""
        kind = self._parameters()[0].device.type
        with contextlib.suppress(RuntimeError):  # a device type that knows no autocast
            if torch.is_autocast_enabled(kind):
                self._precision = _PRECISIONS.get(torch.get_autocast_dtype(kind))

    def _gradients_mark(self) -> tuple[int, int] | None:
        """Changes whenever a backward pass has added to the gradients."""
        if self._probe is None:
            self._probe = self._find_probe()
        gradient = None if self._probe is None else self._probe.grad
        return None if gradient is None else (id(gradient), gradient._version)

    def _find_probe(self) -> Tensor | None:
        return next((p for p in self._parameters() if p.grad is not None), None)

    def _live(self) -> list[nn.Module]:
        return [model for one in self._models if (model := one()) is not None]

    def _descend(self) -> None:
        """Nothing was called: look at the parts next time."""
        self._levels += 1
        wanted = {id(parameter) for parameter in self._parameters()}
        parts = [
            weakref.ref(part)
            for model in self._live()
            for part in model.children()
            if _holds(part, wanted) and _can_hook(part)
        ]
        self._models = parts[:_MOST_LOOKED_AT] if self._levels <= _MOST_LEVELS else []


def _can_hook(module: nn.Module) -> bool:
    """Scripted modules take no hooks; those that compile themselves would compile again."""
    return (
        not isinstance(module, torch.jit.ScriptModule)
        and getattr(module, "_compiled_call_impl", None) is None
    )


def _stored_precision(parameters: list[Tensor]) -> Precision:
    """Of the first floating parameter; fp32 for everything that has no name of its own."""
    for parameter in parameters:
        if parameter.is_floating_point():
            return _PRECISIONS.get(parameter.dtype, "fp32")
    return "fp32"


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DDP, DataParallel and `torch.compile`."""
    for _ in range(8):
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__.endswith("DataParallel"):
            inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            break
        model = inner
    return model


def count_samples(value: Any) -> tuple[int, tuple[int, ...]] | None:
    """Samples in a batch, and the shape of one: the first side of the first tensor found.

    Looks into tuples, lists, mappings and plain objects (data classes, a model's output), four
    levels deep; tensors without sides do not count.
    """
    for tensor in _tensors(value):
        sides = tuple(int(side) for side in tensor.shape)
        if sides:
            return sides[0], sides[1:]
    return None


def _tensors(value: Any) -> Iterator[Tensor]:
    waiting: deque[tuple[Any, int]] = deque([(value, 0)])
    for _ in range(_MOST_LOOKED_AT):
        if not waiting:
            return
        one, level = waiting.popleft()
        if isinstance(one, Tensor):
            if not one.is_nested:
                yield one
        elif level < 5:
            inner: Iterable[Any] = ()
            if isinstance(one, Mapping):
                inner = one.values()
            elif isinstance(one, tuple | list):
                inner = one[:8]
            elif hasattr(one, "__dict__") and not isinstance(one, nn.Module | type):
                inner = vars(one).values()
            waiting.extendleft((part, level + 1) for part in reversed(list(inner)[:16]))
