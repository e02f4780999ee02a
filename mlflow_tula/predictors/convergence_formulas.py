"""Epochs to the target against the batch size. Numpy only: shipped with each registered model.

    log epochs(B) = log E0 + log(1 + (B / Bc)^q) + log(1 + (Bs / B)^3) + f(log B) + noise

The first terms are McCandlish's hyperbola (q = 1; larger where the target is nearly out of reach
of large batches) with a U shape below Bs, steep because too small a batch fails at once:
published curves double within one halving. f is a Gaussian process that follows what no form
does. Many (Bc, q, Bs, f) are held at once, each with its posterior weight, so that nothing rests
on a form that the data cannot identify.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .formulas import normal_quantile

Array = NDArray[np.float64]

FALL_POWER = 3.0
"""Steepness of the U shape's small side."""
LEVEL_SD = 2.5
"""Prior spread of log E0 about the data's middle: as good as unknown."""
BEYOND_SD = 0.1
"""Relative error per factor e beyond the measured sizes: the recipe itself gives way there."""


def trend(log_batch: Array, critical: Array, power: Array, small: Array) -> Array:
    """Rise log(1 + (B/Bc)^q) and fall log(1 + (Bs/B)^3), one row a form; Bs = 0: no U shape."""
    rise = np.logaddexp(0.0, power[:, None] * (log_batch - np.log(critical)[:, None]))
    fall = np.log1p((small[:, None] * np.exp(-log_batch)) ** FALL_POWER)
    return np.asarray(rise + fall)


def covariance(first: Array, second: Array, amplitude: float, length: float) -> Array:
    """Matern 3/2 in log batch size, with the unknown level; length 0 has the level alone."""
    level = np.full((len(first), len(second)), LEVEL_SD**2)
    if length <= 0 or amplitude <= 0:
        return level
    scaled = np.sqrt(3.0) * np.abs(first[:, None] - second[None, :]) / length
    return np.asarray(level + amplitude**2 * (1.0 + scaled) * np.exp(-scaled))


def posterior(
    log_batch: Array,
    residuals: Array,
    variance: Array,
    asked: Array,
    amplitude: float,
    length: float,
) -> tuple[Array, Array, Array]:
    """What one Gaussian process says, for many rows of residuals at once.

    Returns:
        log evidence (one a row of residuals), mean correction (rows x asked), variance (asked).
    """
    white = amplitude**2 if length <= 0 else 0.0
    inner = covariance(log_batch, log_batch, amplitude, length) + np.diag(variance + white)
    lower = np.linalg.cholesky(inner)
    spread = np.linalg.solve(lower, residuals.T)
    evidence = -0.5 * np.sum(spread**2, axis=0) - np.sum(np.log(np.diag(lower)))
    across = np.linalg.solve(lower, covariance(log_batch, asked, amplitude, length))
    own = LEVEL_SD**2 + amplitude**2
    return evidence, spread.T @ across, np.maximum(own - np.sum(across**2, axis=0), 0.0)


def log_epochs(params: Mapping[str, Any], log_batch: Array) -> tuple[Array, Array]:
    """Mean and standard deviation of log epochs, pooled over the forms of `params`."""
    known = np.log(np.asarray(params["global_batch_sizes"], float))
    target = np.log(np.asarray(params["epochs_to_target"], float))
    variance = np.asarray(params["variances"], float)
    centre = float(params["centre"])
    mean = np.zeros_like(log_batch)
    square = np.zeros_like(log_batch)
    for process in params["processes"]:
        weight = np.asarray(process["weights"], float)
        forms = tuple(
            np.asarray(process[name], float)
            for name in ("critical_batch_sizes", "powers", "small_batch_sizes")
        )
        residuals = target - centre - trend(known, *forms)
        _, correction, own = posterior(
            known, residuals, variance, log_batch, process["amplitude"], process["length"]
        )
        values = centre + trend(log_batch, *forms) + correction
        mean += weight @ values
        square += weight @ (values**2 + own)
    return mean, np.sqrt(np.maximum(square - mean**2, 0.0) + float(params["run_variance"]))


def scavenger(params: Mapping[str, Any], log_batch: Array) -> tuple[Array, Array]:
    """Scavenger's form, epochs = e* + theta / sqrt(B): log epochs and its standard deviation."""
    value = params["floor_epochs"] + params["theta"] * np.exp(-0.5 * log_batch)
    return np.log(value), np.full_like(log_batch, params["log_sd"])


def may_not_reach(params: Mapping[str, Any], batch_size: Array) -> NDArray[np.bool_]:
    """Whether a run may fail: unless each measured neighbour reached the target in every run.

    Beyond the measured sizes the outermost one decides: failures at an end stay failures.
    """
    sizes = np.asarray(params["reach_batch_sizes"], float)
    doubtful = np.asarray(params["reach_rates"], float) < 1.0
    below = np.clip(np.searchsorted(sizes, batch_size, side="right") - 1, 0, len(sizes) - 1)
    above = np.clip(np.searchsorted(sizes, batch_size, side="left"), 0, len(sizes) - 1)
    return np.asarray(doubtful[below] | doubtful[above])


def reach_rate(params: Mapping[str, Any], batch_size: Array) -> Array:
    """Share of runs that reach the target: measured, and straight between in log batch size."""
    sizes = np.log(np.asarray(params["reach_batch_sizes"], float))
    rates = np.asarray(params["reach_rates"], float)
    return np.asarray(np.interp(np.log(np.asarray(batch_size, float)), sizes, rates))


def epochs_to_target(
    params: Mapping[str, Any], global_batch_size: Array, level: float = 0.9
) -> tuple[Array, Array, Array, NDArray[np.bool_]]:
    """Epochs to the target with the interval of a new measurement, and whether it may fail."""
    asked = np.asarray(global_batch_size, float)
    unique, back = np.unique(asked, return_inverse=True)
    form = scavenger if params["form"] == "scavenger" else log_epochs
    mean, deviation = form(params, np.log(unique))
    sizes = np.asarray(params["global_batch_sizes"], float)
    beyond = np.log(np.maximum(np.maximum(unique / sizes.max(), sizes.min() / unique), 1.0))
    half = normal_quantile(0.5 + level / 2) * np.hypot(deviation, BEYOND_SD * beyond)
    # exp overflows only where the honest answer is "anything"
    with np.errstate(over="ignore"):
        value, lower, upper = (np.exp(mean + sign * half)[back] for sign in (0.0, -1.0, 1.0))
    return value, lower, upper, may_not_reach(params, asked)
