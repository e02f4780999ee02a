"""Squared norms of what single samples contribute to a layer's gradients, without a second pass.

    W = sum_i A_i^T D_i      A_i (T, in): sample i's inputs of the layer; D_i (T, out): the
                             gradient of its outputs; T positions (one, pixels, words)
    |A^T D|^2 = sum_tt' (a_t . a_t')(d_t . d_t')     cheaper where T is small (arXiv 2009.03106)

Backward computes D anyway, so that a hook on the layer's output is all it takes. Covered are linear
layers, convolutions over one or two dimensions, embeddings and the affine parts of normalizations;
what else a network holds is not seen per sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

Norms = dict[str, Tensor]
"""By parameter (`weight`, `bias`): |c_i|^2 of the chosen samples' contributions c_i, (m,)."""

Reader = Callable[[Tensor], Norms]
"""From the gradient of the layer's output, at the chosen samples, to their squared norms."""

_MOST_HELD = 2**22
"""Numbers of one intermediate result; more are computed a few samples at a time."""


def reader_of(layer: nn.Module, inputs: Tensor) -> Reader | None:
    """How this layer's output gradient becomes squared norms.

    Args:
        layer: a leaf of the network.
        inputs: its inputs of the chosen samples, samples first; kept until the gradient comes.

    Returns:
        None for a layer of a kind that is not covered, or one called in another way.
    """
    if isinstance(layer, nn.Linear):
        return lambda gradient: _linear(inputs.float(), gradient)
    if isinstance(layer, nn.Conv1d | nn.Conv2d) and not isinstance(layer.padding, str):
        usual = layer.padding_mode == "zeros" and inputs.dim() == layer.weight.dim()
        return (lambda gradient: _convolution(layer, inputs.float(), gradient)) if usual else None
    if isinstance(layer, nn.Embedding) and inputs.dim() == 2:
        return lambda gradient: _embedding(layer, inputs, gradient)
    if isinstance(layer, nn.LayerNorm | nn.GroupNorm | nn.RMSNorm):
        return lambda gradient: _normalization(layer, inputs.float(), gradient)
    if isinstance(layer, _BatchNorm):
        return lambda gradient: {"bias": _square(gradient.flatten(2).sum(2))}
    return None


def parameters_of_layer(layer: nn.Module) -> dict[str, nn.Parameter]:
    """The layer's own parameters that are trained."""
    return {name: p for name, p in layer._parameters.items() if p is not None and p.requires_grad}


def _square(rows: Tensor) -> Tensor:
    """Squared norm of each row."""
    return rows.flatten(1).square().sum(1)


def _linear(inputs: Tensor, gradient: Tensor) -> Norms:
    width, out = inputs.shape[-1], gradient.shape[-1]
    a, d = inputs.reshape(len(inputs), 1, -1, width), gradient.reshape(len(inputs), 1, -1, out)
    return {"weight": _products(a, d), "bias": _square(d.sum(2))}


def _convolution(layer: Any, inputs: Tensor, gradient: Tensor) -> Norms:
    """A linear layer over patches, group by group."""
    count, groups = len(inputs), layer.groups
    if inputs.dim() == 3:  # one dimension: two, of which one is a single row
        inputs, gradient = inputs.unsqueeze(2), gradient.unsqueeze(2)
    one = len(layer.kernel_size) == 1
    options = {
        "kernel_size": (1, *layer.kernel_size) if one else layer.kernel_size,
        "dilation": (1, *layer.dilation) if one else layer.dilation,
        "padding": (0, *layer.padding) if one else layer.padding,
        "stride": (1, *layer.stride) if one else layer.stride,
    }
    d = gradient.flatten(2)
    norms = []
    places = d.shape[2] * layer.in_channels // groups * groups
    patch = options["kernel_size"][0] * options["kernel_size"][1]
    at_once = max(1, _MOST_HELD // max(places * patch, 1))
    for begin in range(0, count, at_once):
        part = slice(begin, begin + at_once)
        patches = functional.unfold(inputs[part], **options)
        a = patches.reshape(len(patches), groups, -1, patches.shape[2]).transpose(2, 3)
        of_groups = d[part].reshape(len(patches), groups, -1, d.shape[2]).transpose(2, 3)
        norms.append(_products(a, of_groups))
    return {"weight": torch.cat(norms), "bias": _square(d.sum(2))}


def _products(a: Tensor, d: Tensor) -> Tensor:
    """|A^T D|^2 per sample, summed over groups; a is (m, groups, T, in), d (m, groups, T, out)."""
    count, groups, length, width = a.shape
    out = d.shape[3]
    if length == 1:
        return (a.square().sum((2, 3)) * d.square().sum((2, 3))).sum(1)
    ghost = length * (width + out) < width * out
    size = groups * (2 * length * length if ghost else width * out)
    at_once = max(1, _MOST_HELD // size)
    norms = []
    for begin in range(0, count, at_once):
        left, right = a[begin : begin + at_once], d[begin : begin + at_once]
        if ghost:
            products = (left @ left.transpose(2, 3)) * (right @ right.transpose(2, 3))
            norms.append(products.sum((1, 2, 3)))
        else:
            norms.append(_square(left.transpose(2, 3) @ right))
    # Differences of rounding may leave less than nothing of a sum that is zero.
    return torch.cat(norms).clamp(min=0)


def _embedding(layer: nn.Embedding, words: Tensor, gradient: Tensor) -> Norms:
    """Rows of the same word add up before they are squared."""
    if layer.padding_idx is not None:
        gradient = gradient * (words != layer.padding_idx).unsqueeze(-1)
    norms = []
    at_once = max(1, _MOST_HELD // max(words.shape[1] ** 2, 1))
    for begin in range(0, len(words), at_once):
        one, d = words[begin : begin + at_once], gradient[begin : begin + at_once]
        same = one.unsqueeze(1) == one.unsqueeze(2)
        norms.append(((d @ d.transpose(1, 2)) * same).sum((1, 2)))
    return {"weight": torch.cat(norms).clamp(min=0)}


def _normalization(layer: Any, inputs: Tensor, gradient: Tensor) -> Norms:
    """Scale and shift of what was normalized within each sample."""
    if isinstance(layer, nn.GroupNorm):
        normal = functional.group_norm(inputs, layer.num_groups, eps=layer.eps)
        dims = tuple(range(2, inputs.dim()))
    else:
        if isinstance(layer, nn.LayerNorm):
            normal = functional.layer_norm(inputs, layer.normalized_shape, eps=layer.eps)
        else:
            normal = functional.rms_norm(inputs, layer.normalized_shape, eps=layer.eps)
        dims = tuple(range(1, inputs.dim() - len(layer.normalized_shape)))
    scale, shift = normal * gradient, gradient
    if dims:
        scale, shift = scale.sum(dims), shift.sum(dims)
    return {"weight": _square(scale), "bias": _square(shift)}
