"""Epoch time, time to target and dollars, each with its interval.

    epoch_time      = steps_per_epoch * step_time
    time_to_target  = epochs_to_target * epoch_time
    dollars         = hours * devices * (price + price_gb * peak_memory / 1e9)

The equations stand in predictors/formulas.py. Uncertain factors are taken as independent, so that
their log-intervals add as the sides of a right angle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.predictors import formulas
from mlflow_tula.specs import ClusterSpec, Pricing, Spec, Workload, check_int, check_real

Triple = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate(Spec):
    """A positive quantity with its interval; the bounds default to the value: known exactly."""

    value: float
    lower: float | None = None
    upper: float | None = None

    def __post_init__(self) -> None:
        """Fill in the bounds, and check that they hold the value."""
        value = check_real("value", self.value)
        lower = value if self.lower is None else check_real("lower", self.lower)
        upper = value if self.upper is None else float(self.upper)
        if math.isnan(upper) or not lower <= value <= upper:
            raise InvalidInputError(
                f"an interval must hold its value: {lower:g} <= {value:g} <= {upper:g} does not"
            )
        object.__setattr__(self, "value", value)
        object.__setattr__(self, "lower", lower)
        object.__setattr__(self, "upper", upper)

    def scaled(self, factor: float) -> Estimate:
        """The estimate of `factor` times the quantity."""
        number = check_real("factor", factor)
        low, high = self.value if self.lower is None else self.lower, self.upper
        return Estimate(
            value=self.value * number,
            lower=low * number,
            upper=(self.value if high is None else high) * number,
        )


def epoch_time(step_time_s: Estimate, *, workload: Workload, global_batch_size: int) -> Estimate:
    """Seconds of one epoch: the workload's steps (floor with drop_last, else ceil) of that time."""
    size = check_int("global_batch_size", global_batch_size)
    steps = formulas.steps_per_epoch(
        workload.dataset_size, np.array([float(size)]), workload.drop_last
    )
    return step_time_s.scaled(float(steps[0]))


def time_to_target(epoch_time_s: Estimate, epochs_to_target: Estimate) -> Estimate:
    """Seconds until the target metric is reached."""
    return _product(epoch_time_s, epochs_to_target)


def dollars(
    seconds: Estimate,
    *,
    cluster: ClusterSpec,
    pricing: Pricing,
    peak_memory_bytes: Estimate | None = None,
) -> Estimate:
    """What `seconds` on a cluster cost.

    Args:
        seconds: how long all devices are held.
        cluster: which devices.
        pricing: per device hour, per GB hour (GB = 1e9 bytes of peak memory of each device), or
            both.
        peak_memory_bytes: peak of one device; needed with a price per GB hour.

    Raises:
        InvalidInputError: a price per GB without any memory.
    """
    if pricing.usd_per_gb_hour is not None and peak_memory_bytes is None:
        raise InvalidInputError(
            "usd_per_gb_hour needs peak_memory_bytes: measure memory, or price by device hour"
        )
    peak = _triple(peak_memory_bytes or Estimate(value=0.0))
    rates = [
        float(
            formulas.dollars(
                np.ones(1),
                np.full(1, float(cluster.world_size)),
                bytes_held,
                usd_per_device_hour=pricing.usd_per_device_hour,
                usd_per_gb_hour=pricing.usd_per_gb_hour,
            )[0]
        )
        for bytes_held in peak
    ]
    return _product(seconds, Estimate(value=rates[0], lower=rates[1], upper=rates[2]))


def _product(first: Estimate, second: Estimate) -> Estimate:
    """Two independent factors; a factor of zero costs nothing, however wide the other."""
    if first.value == 0 or second.value == 0:
        return Estimate(value=0.0)
    value, lower, upper = formulas.product_interval(_triple(first), _triple(second))
    return Estimate(
        value=float(value[0]),
        lower=min(float(lower[0]), float(value[0])),
        upper=max(float(upper[0]), float(value[0])),
    )


def _triple(estimate: Estimate) -> Triple:
    """Value, lower and upper as the arrays that the formulas take."""
    lower = estimate.value if estimate.lower is None else estimate.lower
    upper = estimate.value if estimate.upper is None else estimate.upper
    return np.array([estimate.value]), np.array([lower]), np.array([upper])
