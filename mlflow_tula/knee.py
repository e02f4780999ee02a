"""Where a larger batch stops paying: two knee rules, and one rule for ties.

Both rules read a curve of time (or any quantity where less is better) against batch size:

* `kneedle`: the point of largest curvature of the unit-scaled curve (Satopaa et al., "Finding a
  Kneedle in a Haystack", ICDCSW 2011; the kneed package);
* `diminishing_returns`: the smallest batch within `tolerance` (10 %) of the best time.

Neither changes when an axis is scaled: seconds or hours, samples or thousands of samples.
`benchmarks/knee_rules.py` measures which one leads to the smaller regret on published curves when
the curve is only predicted; its answer is `DEFAULT_RULE`. (Kneedle names the same size somewhat
more often, but a miss costs more, and its knee leaves much of the time on the table.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from mlflow_tula.errors import InvalidInputError

KneeRule = Literal["kneedle", "diminishing_returns"]

DEFAULT_RULE: KneeRule = "diminishing_returns"
DIMINISHING_TOLERANCE = 0.10
"""A batch is large enough when it comes within this share of the best time."""
TIE = 0.03
"""Differences below the spread of re-measuring the same configuration (2.9 % on average, over the
repeated rows of petuum/adaptdl's published OSDI 2021 traces) are ties."""

_DRAWS = 256
"""Random curves that a decision's worth is judged by."""

Floats = npt.NDArray[np.float64]


def knee(
    batch_sizes: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    rule: KneeRule = DEFAULT_RULE,
    tolerance: float = DIMINISHING_TOLERANCE,
) -> int:
    """Index of the knee, by the rule named."""
    if rule == "kneedle":
        return kneedle(batch_sizes, values)
    return diminishing_returns(batch_sizes, values, tolerance=tolerance)


def kneedle(batch_sizes: npt.ArrayLike, values: npt.ArrayLike) -> int:
    """Index of the Kneedle point of a falling, convex curve; a curve without one gives the best.

    Only the part up to the minimum is looked at: behind it a larger batch costs time.
    """
    sizes, times = _checked(batch_sizes, values)
    best = int(np.argmin(times))
    if best < 2:
        return best
    span = float(times[: best + 1].max() - times[best])
    if span <= DIMINISHING_TOLERANCE * times[best]:
        return 0  # a flat curve has no knee, only noise: the smaller batch wins
    from kneed import KneeLocator

    axis = sizes[: best + 1]
    scaled = (times[: best + 1] - times[best]) / span
    located = KneeLocator(axis, scaled, S=1.0, curve="convex", direction="decreasing").knee
    if located is None:
        return best
    return int(np.argmin(np.abs(axis - located)))


def diminishing_returns(
    batch_sizes: npt.ArrayLike,
    values: npt.ArrayLike,
    *,
    tolerance: float = DIMINISHING_TOLERANCE,
) -> int:
    """Index of the smallest batch whose value is within `tolerance` of the best one."""
    _, times = _checked(batch_sizes, values)
    good_enough = times <= (1.0 + tolerance) * times.min()
    return int(np.argmax(good_enough))


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """An index of the candidates, and how it came about."""

    index: int
    by_rule: int
    """What the rule said before ties and the current choice were looked at."""
    kept_current: bool = False
    noise: float = 0.0
    """The share of a difference that the intervals of the two candidates leave open."""


def choose_minimum(
    values: npt.ArrayLike,
    noise: npt.ArrayLike,
    *,
    current: Sequence[int] = (),
    measured: npt.ArrayLike = False,
) -> Settled:
    """The smallest value; ties go to the current choice, the measured ones, the smaller ones.

    Args:
        values: what is minimised, candidates in ascending order of devices and batch size.
        noise: each value's relative half interval (`relative_noise`).
        current: indices that stand for the current choice.
        measured: which were measured: known to run, and their value is no guess.

    Two candidates tie when they differ by less than `TIE` and by less than their intervals leave
    open; the current choice stays until another gains more than the intervals leave open.
    """
    times, spread = np.asarray(values, np.float64), np.asarray(noise, np.float64)
    best = int(np.argmin(times))
    open_share = np.hypot(spread, spread[best])
    gap = np.log(times / times[best])
    tied = gap <= np.minimum(open_share, TIE)
    tied[best] = True
    surest = tied & np.asarray(measured, bool)
    first = int(np.argmax(surest if surest.any() else tied))
    kept = [i for i in current if gap[i] <= open_share[i]]
    if kept:
        index = min(kept, key=lambda i: (float(times[i]), i))
        return Settled(
            index=index, by_rule=first, kept_current=index != first, noise=float(open_share[index])
        )
    return Settled(index=first, by_rule=best, noise=float(min(open_share[first], TIE)))


def choose_knee(
    batch_sizes: npt.ArrayLike,
    values: npt.ArrayLike,
    noise: npt.ArrayLike,
    *,
    rule: KneeRule = DEFAULT_RULE,
    current: int | None = None,
) -> Settled:
    """The knee of one curve; the current choice stays while the intervals leave the rule open.

    A current batch below the knee stays when its time may be within the tolerance of the best; one
    above it stays when the knee itself may not be.
    """
    times, spread = np.asarray(values, np.float64), np.asarray(noise, np.float64)
    chosen = knee(batch_sizes, values, rule=rule)
    if current is None or current == chosen:
        return Settled(index=chosen, by_rule=chosen)
    doubtful = min(current, chosen)
    best = int(np.argmin(times))
    open_share = float(np.hypot(spread[doubtful], spread[best]))
    if rule == "diminishing_returns":
        bound = (1.0 + DIMINISHING_TOLERANCE) * times[best]
        gap = abs(np.log(times[doubtful] / bound))
    else:
        open_share = float(np.hypot(spread[current], spread[chosen]))
        gap = abs(np.log(times[current] / times[chosen]))
    if gap <= open_share:
        return Settled(index=current, by_rule=chosen, kept_current=True, noise=open_share)
    return Settled(index=chosen, by_rule=chosen, noise=open_share)


def decision_gains(
    sizes: Floats, log_times: Floats, spread: Floats, known: npt.NDArray[np.bool_], *, to_knee: bool
) -> tuple[float, Floats]:
    """Knowledge gradient of a choice among candidates of uncertain time.

    Args:
        sizes: batch sizes, ascending.
        log_times: logarithms of the predicted times.
        spread: standard deviation of each.
        known: which were measured.
        to_knee: the choice is the knee; otherwise the least time.

    Returns:
        The expected loss of choosing now (a share of time), and the expected fall of it when one
        candidate more is known, for each.
    """
    draws = log_times + spread * _smooth_normals(sizes)
    if to_knee:
        chosen = [diminishing_returns(sizes, np.exp(draw - draw.min())) for draw in draws]
        right = draws[np.arange(len(draws)), chosen][:, None]
        losses = np.abs(draws - right)
    else:
        losses = draws - draws.min(axis=1, keepdims=True)
    now = float(losses.mean(axis=0).min())
    gains = np.zeros(len(sizes))
    for i in np.flatnonzero(~known):
        order = np.argsort(draws[:, i])
        later = [losses[part].mean(axis=0).min() for part in np.array_split(order, 4)]
        gains[i] = max(now - float(np.mean(later)), 0.0)
    return now, gains


def _smooth_normals(sizes: Floats) -> Floats:
    """Standard normal draws that neighbours in log batch size share in part; always the same."""
    axis = np.log2(sizes)
    together = np.exp(-np.abs(axis[:, None] - axis[None, :]) / 2.0)
    root = np.linalg.cholesky(together + 1e-9 * np.eye(len(sizes)))
    draws = np.random.default_rng(0).standard_normal((_DRAWS, len(sizes)))
    return np.asarray(draws @ root.T)


def relative_noise(lower: Floats, upper: Floats) -> Floats:
    """Half the interval in logarithms: how much of a relative difference can be noise."""
    with np.errstate(divide="ignore", invalid="ignore"):
        noise = np.log(upper / lower) / 2.0
    return np.where(np.isfinite(noise), np.maximum(noise, 0.0), 0.0)


def _checked(batch_sizes: npt.ArrayLike, values: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Both as arrays: ascending positive sizes, positive finite values."""
    sizes = np.asarray(batch_sizes, dtype=np.float64)
    times = np.asarray(values, dtype=np.float64)
    if sizes.ndim != 1 or sizes.shape != times.shape or not sizes.size:
        raise InvalidInputError(
            f"a knee needs as many values as batch sizes, at least one: {sizes.size} sizes and "
            f"{times.size} values given"
        )
    if not (np.all(np.isfinite(sizes)) and sizes[0] > 0 and np.all(np.diff(sizes) > 0)):
        raise InvalidInputError("batch sizes of a knee must be positive and ascending")
    if not (np.all(np.isfinite(times)) and np.all(times > 0)):
        raise InvalidInputError("values of a knee must be positive and finite")
    return sizes, times
