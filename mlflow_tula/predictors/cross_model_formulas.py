"""Step time and memory of a model that never ran here, from its counted kernels. Numpy only.

    step(b) = step_s + sample_s b + sum over kernels of
              floor[phase] + flops(b) s_per_flop[kind, phase] + bytes(b) s_per_byte[kind, phase]

A roofline with the corners rounded off: every kernel pays its floor, its arithmetic at the rate of
its class of intensity, and its traffic. `params["log_theta"]` holds the logarithms of those rates,
in the order of `NAMES`; `params["covariance"]` what the other models leave open of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

PHASES = ("forward", "backward", "optimizer")
ARITHMETIC = (
    "convolution",
    "pointwise_convolution",
    "grouped_convolution",
    "depthwise_convolution",
    "matmul",
)
TRAFFIC = ("compute", "normalization", "pooling", "elementwise", "optimizer")
NAMES = (
    *(f"floor_s.{phase}" for phase in PHASES),
    *(f"s_per_flop.{kind}" for kind in ARITHMETIC),
    "backward_factor",
    *(f"s_per_byte.{kind}" for kind in TRAFFIC),
    "step_s",
    "sample_s",
)
REFERENCE_BATCH = 32.0
_FLOORS, _FLOPS, _BACKWARD = slice(0, 3), slice(3, 8), 8
_BYTES, _STEP, _SAMPLE = slice(9, 14), 14, 15


def work(operations: Sequence[Mapping[str, Any]], batch: Array) -> Array:
    """What the rates multiply, at each batch size.

    Args:
        operations: `ModelFeatures.to_dict()["operations"]`.
        batch: local batch sizes.

    Returns:
        (sizes, 20): kernels of the three phases; FLOPs of the five kinds forward, then backward;
        bytes of the five classes; one; the batch size.
    """
    columns = np.zeros((len(batch), 20))
    for one in operations:
        phase, kind = PHASES.index(one["phase"]), one["kind"]
        columns[:, phase] += one["count"]
        flops = one["count"] * (one["flops_fixed"] + batch * one["flops_per_sample"])
        moved = one["count"] * (one["bytes_fixed"] + batch * one["bytes_per_sample"])
        if kind in ARITHMETIC:
            columns[:, 3 + 5 * (phase > 0) + ARITHMETIC.index(kind)] += flops
        traffic = "compute" if kind in ARITHMETIC else kind
        columns[:, 13 + TRAFFIC.index("optimizer" if phase == 2 else traffic)] += moved
    columns[:, 18] = 1.0
    columns[:, 19] = batch
    return columns


def log_step_time(log_theta: Array, columns: Array) -> tuple[Array, Array]:
    """Log seconds of a step at each size, and its derivatives by `log_theta`, (sizes, rates)."""
    rate = np.exp(log_theta)
    parts = np.empty((len(columns), len(NAMES)))
    parts[:, _FLOORS] = columns[:, 0:3] * rate[_FLOORS]
    backward = columns[:, 8:13] * rate[_FLOPS] * rate[_BACKWARD]
    parts[:, _FLOPS] = columns[:, 3:8] * rate[_FLOPS] + backward
    parts[:, _BACKWARD] = 0.0
    parts[:, _BYTES] = columns[:, 13:18] * rate[_BYTES]
    parts[:, _STEP] = columns[:, 18] * rate[_STEP]
    parts[:, _SAMPLE] = columns[:, 19] * rate[_SAMPLE]
    total = parts.sum(axis=1)
    slopes = parts / total[:, None]
    slopes[:, _BACKWARD] = backward.sum(axis=1) / total
    return np.log(total), slopes


def own_covariance(spread: Mapping[str, Any], batch: Array, other: Array) -> Array:
    """Covariance of what is a model's own in log step time: a level, a tilt over log size."""
    tilt = np.log2(batch / REFERENCE_BATCH)[:, None] * np.log2(other / REFERENCE_BATCH)[None, :]
    return np.asarray(spread["level_sd"] ** 2 + spread["tilt_sd"] ** 2 * tilt)


def step_time_posterior(
    params: Mapping[str, Any],
    operations: Sequence[Mapping[str, Any]],
    batch: Array,
    probes: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:
    """Log seconds at each size and their covariance, given probes of the model itself.

    Args:
        params: the fitted rates and spreads.
        operations: the model's kernels.
        batch: local batch sizes.
        probes: sizes and log seconds of steps that were measured; None without any.
    """
    spread = params["spread"]
    covariance = np.asarray(params["covariance"], float)

    def prior(sizes: Array) -> tuple[Array, Array]:
        return log_step_time(np.asarray(params["log_theta"], float), work(operations, sizes))

    def between(one: tuple[Array, Array], two: tuple[Array, Array]) -> Array:
        shared = one[1] @ covariance @ two[1].T + own_covariance(spread, one[0], two[0])
        return np.asarray(spread["scale"] ** 2 * shared)

    mean, slopes = prior(batch)
    here = between((batch, slopes), (batch, slopes))
    noise = np.eye(len(batch)) * (spread["scale"] * spread["noise_sd"]) ** 2
    if probes is None or not len(probes[0]):
        return mean, here + noise
    sizes, seen = probes
    there, their_slopes = prior(sizes)
    across = between((batch, slopes), (sizes, their_slopes))
    doubt = (spread["scale"] * spread["noise_sd"]) ** 2 + spread["trial_sd"] ** 2
    own = between((sizes, their_slopes), (sizes, their_slopes)) + np.eye(len(sizes)) * doubt
    gain = np.linalg.solve(own, across.T).T
    return mean + gain @ (seen - there), here - gain @ across.T + noise


def peak_bytes(lines: Sequence[Sequence[float]], batch: Array) -> Array:
    """Bytes of live tensors at the peak of a step, as counted: the highest of the lines."""
    fixed, slope = np.asarray(lines, float).T
    return np.asarray((fixed[:, None] + slope[:, None] * batch[None, :]).max(axis=0))


def memory_columns(lines: Sequence[Sequence[float]], batch: Array) -> Array:
    """(sizes, 3): one, counted peak bytes, and those of them that grow with the batch."""
    counted = peak_bytes(lines, batch)
    static = peak_bytes(lines, np.zeros(1))[0]
    return np.stack([np.ones_like(counted), counted, counted - static], axis=1)
