"""Contention: how much slower one rank computes when more devices of its node work at once.

    compute(b, d) = floor(b) (d / d0)^f + slope(b) (d / d0)^s

d0: the devices that the compute curve was measured on; floor and slope: its two parts. Devices with
processors of their own hardly slow each other (s = f, near 0). Ranks on a CPU share its cores: with
twice the ranks each has half the threads, and what grows with the batch takes up to twice as long
(s near 1), the latency of many small operations less. Rows on more devices tell s and f: their step
less their recorded synchronisation, else the levels of `sync_level`. One batch size there cannot
part them, and what it leaves open is the covariance that `step_time_formulas` widens answers by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

OWN = (0.0, 0.05, 0.12, 0.3, 0.6, 1.0, 1.5)
OWN_PRIOR = 0.05
"""Devices of their own: slower by such a share per doubling, little expected."""
SHARED_MOST, SHARED_CENTRE, SHARED_SD = 1.5, 0.85, 0.65
FLOOR_CENTRE, FLOOR_SD, FLOOR_REACH = 0.4, 0.4, 0.8
"""Shared cores: s is about in proportion, from none at all to more than all (caches); f is less,
and below 0 where fewer threads wait less for each other."""
COARSE, FINE = 0.3, 0.05
MISFIT_SD, MISFIT_ROWS = 0.05, 2.0
"""How far recorded parts stand from the formula, and how many rows that is worth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beliefs:
    """Pairs of exponents, and the logarithm of how much each is believed."""

    slopes: Array
    floors: Array
    scores: Array

    @property
    def weights(self) -> Array:
        """Beliefs that sum to one."""
        weights = np.exp(self.scores - self.scores.max())
        return np.asarray(weights / weights.sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class BusyRows:
    """Rows on other device counts than the curve's: parts of compute, and what was recorded."""

    floor: Array
    """Seconds of a pass on the curve's devices that the batch size does not change."""
    slope: Array
    """Seconds that grow with it."""
    log_ratio: Array
    """Logarithm of devices over the curve's."""
    busy: Array
    """Seconds of a pass less synchronisation, NaN where it was not recorded."""
    weights: Array


def prior(shared_cores: bool, step: float = COARSE) -> Beliefs:
    """Beliefs before any row."""
    if not shared_cores:
        share = np.asarray(OWN)
        exponents = np.log2(1.0 + share)
        return Beliefs(slopes=exponents, floors=exponents, scores=-np.log1p(share / OWN_PRIOR))
    slopes, floors = np.meshgrid(
        np.arange(0.0, SHARED_MOST + step / 2, step),
        FLOOR_CENTRE + FLOOR_REACH * np.linspace(-1.0, 1.0, 2 * round(0.3 / step) + 1),
        indexing="ij",
    )
    scores = ((slopes - SHARED_CENTRE) / SHARED_SD) ** 2 + ((floors - FLOOR_CENTRE) / FLOOR_SD) ** 2
    return Beliefs(slopes=slopes.ravel(), floors=floors.ravel(), scores=-0.5 * scores.ravel())


def from_parts(shared_cores: bool, rows: BusyRows) -> Beliefs:
    """Beliefs after recorded parts: no synchronisation has to be guessed."""
    before = prior(shared_cores, FINE)
    known = np.isfinite(rows.busy)
    log_ratio, weights = rows.log_ratio[known], rows.weights[known]
    slower = rows.floor[known] * np.exp(np.outer(before.floors, log_ratio))
    slower += rows.slope[known] * np.exp(np.outer(before.slopes, log_ratio))
    squares = (weights * np.log(rows.busy[known] / slower) ** 2).sum(axis=1)
    evidence = np.log(MISFIT_ROWS * MISFIT_SD**2 + squares)
    scores = before.scores - 0.5 * (weights.sum() + MISFIT_ROWS) * evidence
    return Beliefs(slopes=before.slopes, floors=before.floors, scores=scores)


def summary(beliefs: Beliefs | None, devices: int) -> dict[str, Any]:
    """What `step_time_formulas` reads: the mean exponents and their covariance.

    Args:
        beliefs: None where no slowing is expected and none was looked for.
        devices: what the compute curve was measured on.
    """
    if beliefs is None:
        return {"devices": devices, "slope": 0.0, "floor": 0.0, "covariance": [0.0, 0.0, 0.0]}
    weights = beliefs.weights
    slope, floor = float(weights @ beliefs.slopes), float(weights @ beliefs.floors)
    off_slope, off_floor = beliefs.slopes - slope, beliefs.floors - floor
    pairs = ((off_slope, off_slope), (off_slope, off_floor), (off_floor, off_floor))
    return {
        "devices": devices,
        "slope": slope,
        "floor": floor,
        "covariance": [float(weights @ (one * other)) for one, other in pairs],
    }
