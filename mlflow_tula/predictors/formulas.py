"""Every equation of the predictors, once. Numpy only: this file is shipped with each model.

Arguments that stand for many configurations are arrays of one length; parameters are the plain
mappings that the predictors write to JSON. Seconds, bytes, dollars.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def smooth_maximum(first: Array, second: Array, power: float | Array) -> Array:
    """`(x^p + y^p)^(1/p)` for x, y >= 0: the sum at p = 1, the maximum as p grows."""
    high = np.maximum(first, second)
    low = np.minimum(first, second)
    ratio = np.divide(low, high, out=np.zeros_like(high), where=high > 0)
    return np.asarray(high * (1.0 + ratio**power) ** (1.0 / power))


def steps_per_epoch(dataset_size: int, global_batch_size: Array, drop_last: bool) -> Array:
    """Optimizer steps of one epoch: floor with drop_last, else ceil; at least one."""
    steps = dataset_size / np.asarray(global_batch_size, float)
    return np.maximum(np.floor(steps) if drop_last else np.ceil(steps), 1.0)


def dollars(
    seconds: Array,
    devices: Array,
    peak_memory_bytes: Array,
    *,
    usd_per_device_hour: float | None,
    usd_per_gb_hour: float | None,
) -> Array:
    """`hours * devices * (price + price_gb * peak / 1e9)`; NaN without any price."""
    hours = np.asarray(seconds, float) * devices / 3600.0
    if usd_per_device_hour is None and usd_per_gb_hour is None:
        return np.full(hours.shape, np.nan)
    total = np.zeros_like(hours)
    if usd_per_device_hour is not None:
        total = total + hours * usd_per_device_hour
    if usd_per_gb_hour is not None:
        total = total + hours * usd_per_gb_hour * np.asarray(peak_memory_bytes, float) / 1e9
    return total


def normal_quantile(probability: float) -> float:
    """Inverse of the standard normal distribution (Acklam's approximation, error below 1.2e-9)."""
    if not 0.0 < probability < 1.0:
        raise ValueError(f"a probability must lie between 0 and 1, not {probability!r}")
    if probability > 0.5:
        return -normal_quantile(1.0 - probability)
    if probability < 0.02425:
        q = float(np.sqrt(-2.0 * np.log(probability)))
        top = np.polyval(_TAIL_TOP, q)
        return float(top / np.polyval(_TAIL_BOTTOM, q))
    q = probability - 0.5
    top = np.polyval(_CENTRE_TOP, q * q) * q
    return float(top / np.polyval(_CENTRE_BOTTOM, q * q))


_CENTRE_TOP = (
    -3.969683028665376e1, 2.209460984245205e2, -2.759285104469687e2,
    1.383577518672690e2, -3.066479806614716e1, 2.506628277459239,
)  # fmt: skip
_CENTRE_BOTTOM = (
    -5.447609879822406e1, 1.615858368580409e2, -1.556989798598866e2,
    6.680131188771972e1, -1.328068155288572e1, 1.0,
)  # fmt: skip
_TAIL_TOP = (
    -7.784894002430293e-3, -3.223964580411365e-1, -2.400758277161838,
    -2.549732539343734, 4.374664141464968, 2.938163982698783,
)  # fmt: skip
_TAIL_BOTTOM = (
    7.784695709041462e-3, 3.224671290700398e-1, 2.445134137003700e0,
    3.754408661907416, 1.0,
)  # fmt: skip


def student_quantile(probability: float, degrees: float) -> float:
    """Inverse of Student's t distribution (Hill's expansion; error below 1 % for degrees >= 3)."""
    z = normal_quantile(probability)
    d = max(float(degrees), 1.0)
    g1 = (z**3 + z) / 4
    g2 = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    g3 = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + g1 / d + g2 / d**2 + g3 / d**3


def product_interval(
    first: tuple[Array, Array, Array], second: tuple[Array, Array, Array]
) -> tuple[Array, Array, Array]:
    """Value and interval of a product of two independent positive quantities.

    Log-variances add, so the half-widths in logarithms add as the sides of a right angle.
    """
    value = first[0] * second[0]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        down = np.hypot(np.log(first[0] / first[1]), np.log(second[0] / second[1]))
        up = np.hypot(np.log(first[2] / first[0]), np.log(second[2] / second[0]))
        return value, value * np.exp(-down), value * np.exp(up)
