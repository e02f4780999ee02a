"""The noise scale of one step, from what single samples contribute to the gradients of all layers.

    c_i   contribution of sample i to a gradient g = sum_i c_i of b samples (b c_i is its own)
    noise_scale from mean |b c_i|^2 (one sample) and |g|^2 (b samples), summed over parameters

This is the estimate of McCandlish et al. (arXiv 1812.06162, appendix A.1) with batches of 1 and b
of the same step, and so at equal weights. All layers that sample_norms.py knows stand for the
network, weights and biases alike; `coverage` says for how much of the squared gradient. (Biases
alone were off by a factor of fifteen on a small convolution; the difference of two successive
gradients by twenty, because a step turns the next gradient against itself.)

Batch normalization couples samples: what they contribute takes each other out again, and the true
gradient is lost. Networks with it are judged by their linear layers alone, where contributions are
independent, and the estimate is a rough one (`doubt`). How near all of it comes is in
docs/accuracy.md. Clipping, loss scaling and averaging over ranks change nothing: gradients are read
as backward computes them on this rank.
"""

from __future__ import annotations

import contextlib
import math
import random
import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from mlflow_tula.gradients import noise_scale
from mlflow_tula.integrations.hooks import Hook
from mlflow_tula.integrations.sample_norms import Norms, Reader, parameters_of_layer, reader_of

_MOST_LAYERS = 512
_LEAST_WEIGHT = 0.1
"""Of the newest step in the running means; the first ones count equally."""

_MOST_SAMPLES = 128
"""Samples that are looked at, drawn at random where a batch has more.

Fewer would be cheaper, but where the true gradient is small beside the noise, it is lost: what is
taken off for the noise must be that of the very samples of the batch.
"""

LEAST_COVERAGE = 0.5
"""Of the squared gradient; an estimate that stands on less is a rough one."""

_CANCELLED = 1e-8
"""Below it a bias has no gradient at all: one before a normalization, which takes it out again."""


class _Part:
    """One layer during an armed step; not kept alive."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = weakref.ref(layer)
        self.norms: Norms = {}
        self.calls = 0
        self.heard = False


class LayerNoise:
    """Armed for one step; collects its layers' sums on their device, and running means of them."""

    def __init__(self) -> None:
        """Start with nothing known."""
        self._handles: list[RemovableHandle] = []
        self._parts: dict[int, _Part] = {}
        self._gradients: dict[int, Tensor] = {}
        self._samples = 0
        self._chosen: list[int] | None = None
        # Own, so that the user's random numbers stay theirs.
        self._random = random.Random(0)
        self._mean: Tensor | None = None
        self._count = 0
        self._size = 0
        self.coupled = False

    def arm(self, model: nn.Module, samples: int | None = None) -> None:
        """Listen to the layers of a model for one step; not to compiled or sharded ones.

        Args:
            model: what is trained.
            samples: of a pass; a step with others, and layers whose first side is another, are
                left out. None: as many as the first layer shows.
        """
        modules = list(model.modules())
        if any(map(_left_alone, modules)):
            return
        parameters = [p for p in model.parameters() if p.requires_grad]
        if any(type(parameter.data) is not Tensor for parameter in parameters):
            return  # a sharded tensor's norm would wait for the other ranks
        self.coupled = any(isinstance(one, _BatchNorm) for one in modules)
        self._parts, self._gradients, self._samples, self._chosen = {}, {}, samples or 0, None
        if samples is not None:
            self._choose(samples)
        for layer in modules:
            if self.coupled and not isinstance(layer, nn.Linear):
                continue
            if len(self._parts) < _MOST_LAYERS and parameters_of_layer(layer):
                self._parts[id(layer)] = _Part(layer)
                hook = Hook(self._on_output)
                self._handles.append(layer.register_forward_hook(hook))
        for parameter in parameters:
            listen: Any = parameter.register_hook
            self._handles.append(listen(self._on_gradient(id(parameter))))

    def finish(self) -> None:
        """Listen no more, and add what was heard to the means."""
        if not self._handles:
            return
        self.disarm()
        parts, gradients = list(self._parts.values()), self._gradients
        self._parts, self._gradients = {}, {}
        if not gradients or len({one.device for one in gradients.values()}) > 1:
            return
        now = _summed(parts, gradients, self._samples)
        if now is None:
            return
        if self._size != self._samples or self._mean is None:
            self._count, self._size, self._mean = 0, self._samples, torch.zeros_like(now)
        self._count += 1
        weight = max(1.0 / self._count, _LEAST_WEIGHT)
        after = torch.lerp(self._mean, now, weight)
        self._mean = torch.where(after.isfinite().all(), after, self._mean)

    def disarm(self) -> None:
        """Take every hook off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def noise_scale(self) -> float | None:
        """In samples; waits for the device, so not for the training thread."""
        if self._mean is None or self._size < 2:
            return None
        one, mean = (math.sqrt(float(value)) for value in self._mean[:2])
        return noise_scale([one], [mean], small_batch=1, large_batch=self._size)

    def coverage(self) -> float | None:
        """Share of the squared gradient that the estimate stands on; waits for the device."""
        if self._mean is None:
            return None
        seen, whole = float(self._mean[1]), float(self._mean[2])
        return seen / whole if whole > 0 else None

    def doubt(self) -> str:
        """Why the estimate is a rough one, in a few words; empty where it is not."""
        covered = self.coverage()
        if covered is None:
            return ""
        if self.coupled:
            return (
                "batch normalization couples samples: from the linear layers alone, "
                f"{covered:.0%} of the squared gradient"
            )
        if covered < LEAST_COVERAGE:
            return f"from {covered:.0%} of the squared gradient: the other layers are not known"
        return ""

    def _on_output(self, layer: nn.Module, args: Any, output: Any) -> None:
        """A forward hook: keep the chosen samples' inputs until the output's gradient comes."""
        part = self._parts.get(id(layer))
        if part is None or part.heard or not isinstance(output, Tensor):
            return
        if not output.requires_grad or not output.dim():
            return
        part.calls += 1
        if part.calls > 1 or len(args) != 1 or not isinstance(args[0], Tensor):
            return  # a layer that is called twice in a pass adds up two contributions a sample
        samples = len(output)
        if self._samples == 0:
            self._choose(samples)
        if samples != self._samples or len(args[0]) != samples or _recomputes():
            return
        reader = reader_of(layer, self._chosen_of(args[0]))
        if reader is not None:
            listen: Any = output.register_hook
            listen(self._on_output_gradient(part, reader, args[0]))

    def _choose(self, samples: int) -> None:
        """Which samples are looked at, in all layers the same; None is all."""
        self._samples, self._chosen = samples, None
        if samples > _MOST_SAMPLES:
            self._chosen = sorted(self._random.sample(range(samples), _MOST_SAMPLES))

    def _chosen_of(self, values: Tensor) -> Tensor:
        """The rows of the chosen samples; without a copy where these are all."""
        with torch.no_grad():
            values = values.detach()
            return values if self._chosen is None else values[self._chosen]

    def _on_output_gradient(self, part: _Part, reader: Reader, inputs: Tensor) -> Any:
        """The hook of an output; never breaks a backward pass."""
        version = inputs._version
        copied = self._chosen is not None

        def heard(gradient: Tensor) -> None:
            if part.heard or not self._handles:
                return
            part.heard = True
            # What was changed in place since is no longer what the layer was given.
            if not copied and inputs._version != version:
                return
            with contextlib.suppress(Exception), torch.no_grad():
                part.norms = reader(self._chosen_of(gradient).float())

        return heard

    def _on_gradient(self, key: int) -> Any:
        """The hook of a parameter: the whole batch's gradient, before anybody changes it."""

        def heard(gradient: Tensor) -> None:
            if key not in self._gradients and gradient.layout is torch.strided:
                with contextlib.suppress(Exception), torch.no_grad():
                    norm = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32)
                    self._gradients[key] = norm.square()

        return heard


def _recomputes() -> bool:
    """Whether activations are not kept (checkpointing, offloading): then neither are they here."""
    with contextlib.suppress(Exception):
        return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return False


def _left_alone(module: nn.Module) -> bool:
    """Compiled modules would compile again; replicas of a module are other modules."""
    return (
        hasattr(module, "_orig_mod")
        or getattr(module, "_compiled_call_impl", None) is not None
        or isinstance(module, torch.jit.ScriptModule | nn.DataParallel)
    )


def _summed(parts: list[_Part], gradients: dict[int, Tensor], samples: int) -> Tensor | None:
    """Mean |b c_i|^2 and |g|^2 over the parameters that were seen per sample, |g|^2 over all."""
    owned = [(part, parameters_of_layer(layer)) for part in parts if (layer := part.layer())]
    owners = Counter(id(one) for _, parameters in owned for one in parameters.values())
    rows = []
    for part, parameters in owned:
        if part.calls != 1:
            continue
        for name, parameter in parameters.items():
            key = id(parameter)
            if name in part.norms and key in gradients and owners[key] == 1:
                one = part.norms[name].float().mean() * samples**2
                rows.append(torch.stack([one, gradients[key]]))
    if not rows:
        return None
    stacked = torch.stack(rows)
    counts = stacked[:, 1:] > _CANCELLED * stacked[:, :1]
    seen = torch.where(counts, stacked, torch.zeros_like(stacked)).sum(0)
    return torch.cat([seen, torch.stack(list(gradients.values())).sum().unsqueeze(0)])
