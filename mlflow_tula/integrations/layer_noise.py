"""The noise scale of one step, from what each sample contributes to the gradients of the biases.

    g_i = b sum over positions of dL/d(output of the layer)_i      sample i's gradient of a bias
    noise_scale from mean |g_i|^2 (one sample) and |mean g_i|^2 (b samples), summed over the layers

For a layer that adds a bias (linear, convolution, normalization) the gradient with respect to its
output is all that a per-sample gradient of the bias takes, and backward computes it anyway: no
second pass and no copy of the gradients. The biases of a network stand for all of its weights; of
transformers the same is reported of the normalization layers (Gray et al., arXiv 2411.00999). Batch
normalization couples samples and takes biases out again: networks with it are judged by their
linear layers alone, of which the weights count as well, |g_i|^2 = |d_i|^2 |a_i|^2 for the output's
gradient d and the input a. How near that comes is in docs/accuracy.md. The difference of two
successive gradients, the other cheap way, was up to twenty times too high at ordinary learning
rates: a step turns the next gradient against itself.

Clipping, loss scaling and averaging over ranks change nothing, since all samples share them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.utils.hooks import RemovableHandle

from mlflow_tula.gradients import noise_scale
from mlflow_tula.integrations.hooks import Hook

_MOST_LAYERS = 128
_LEAST_WEIGHT = 0.1
"""Of the newest step in the running means; the first ones count equally."""

_CANCELLED = 1e-8
"""Below it a bias has no gradient at all: one before a normalization, which takes it out again."""


class LayerNoise:
    """Armed for one step; collects its layers' sums on their device, and running means of them."""

    def __init__(self) -> None:
        """Start with nothing known."""
        self._handles: list[RemovableHandle] = []
        self._sums: dict[int, Tensor] = {}
        self._samples = 0
        self._coupled = False
        self._mean: Tensor | None = None
        self._count = 0
        self._size = 0

    def arm(self, model: nn.Module) -> None:
        """Listen to the layers of a model for one step; not to compiled ones."""
        parts = list(model.modules())
        if any(hasattr(part, "_orig_mod") for part in parts):
            return
        self._coupled = any(isinstance(part, _BatchNorm) for part in parts)
        layers = [part for part in parts if _rows_of(part) is not None]
        if self._coupled:
            layers = [part for part in layers if isinstance(part, nn.Linear)]
        self._sums, self._samples = {}, 0
        for layer in layers[:_MOST_LAYERS]:
            hook = Hook(self._on_output)
            self._handles.append(layer.register_forward_hook(hook))

    def finish(self) -> None:
        """Listen no more, and add what was heard to the means."""
        if not self._handles:
            return
        self.disarm()
        sums, self._sums = list(self._sums.values()), {}
        if not sums or len({one.device for one in sums}) > 1:
            return
        stacked = torch.stack(sums)  # a row a layer: mean |g_i|^2, |mean g_i|^2
        counts = stacked[:, 1:] > _CANCELLED * stacked[:, :1]
        now = torch.where(counts, stacked, torch.zeros_like(stacked)).sum(0)
        if self._size != self._samples or self._mean is None:
            self._count, self._size, self._mean = 0, self._samples, torch.zeros_like(now)
        self._count += 1
        weight = max(1.0 / self._count, _LEAST_WEIGHT)
        after = torch.lerp(self._mean, now, weight)
        self._mean = torch.where(after.isfinite(), after, self._mean)

    def disarm(self) -> None:
        """Take every hook off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def noise_scale(self) -> float | None:
        """In samples; waits for the device, so not for the training thread."""
        if self._mean is None or self._size < 2:
            return None
        one, mean = (math.sqrt(float(value)) for value in self._mean)
        return noise_scale([one], [mean], small_batch=1, large_batch=self._size)

    def _on_output(self, layer: nn.Module, args: Any, output: Any) -> None:
        """A forward hook: listen to the gradient of this output, the first of each layer."""
        key = id(layer)
        if key in self._sums or not isinstance(output, Tensor) or not output.requires_grad:
            return
        samples = len(output)
        if self._samples == 0:
            self._samples = samples
        rows = _rows_of(layer)
        if samples != self._samples or rows is None:
            return

        inputs = args[0].detach() if self._coupled and output.dim() == 2 else None

        def on_gradient(gradient: Tensor) -> None:
            if self._handles and key not in self._sums:
                self._sums[key] = _sums(rows(gradient.detach().float()), inputs)

        output.register_hook(on_gradient)  # type: ignore[no-untyped-call, unused-ignore]


@torch.no_grad()
def _sums(rows: Tensor, inputs: Tensor | None) -> Tensor:
    """Mean |g_i|^2 and |mean g_i|^2 of b rows that add up to the bias's gradient.

    With a linear layer's inputs, (b, in), those of its weights are added.
    """
    one, mean = rows.square().sum(1), rows.sum(0).square().sum()
    if inputs is not None:
        inputs = inputs.float()
        one = one * (1 + inputs.square().sum(1))
        mean = mean + (rows.T @ inputs).square().sum()
    return torch.stack([one.sum() * len(rows), mean])


def _rows_of(layer: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """How a layer's output gradient becomes one row a sample; None without a trained bias."""
    bias = getattr(layer, "bias", None)
    if not isinstance(bias, Tensor) or not bias.requires_grad:
        return None
    width = bias.numel()
    if isinstance(layer, nn.Linear | nn.LayerNorm):
        return lambda gradient: gradient.reshape(len(gradient), -1, width).sum(1)
    if isinstance(layer, _ConvNd | _BatchNorm | nn.GroupNorm):
        return lambda gradient: gradient.reshape(len(gradient), width, -1).sum(2)
    return None
