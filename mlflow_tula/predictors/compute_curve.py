"""The compute curve: many forms fitted to the same probes, held at once, each with its weight.

No form is right on every device, and four probes cannot say which one is: pooling over floor, line
and the sharpness of the turn between them errs less than choosing (docs/method.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlflow_tula.predictors import step_time_formulas as formulas

Array = NDArray[np.float64]

POWERS = (1.0, 2.0, 3.0)
"""Sharpness of the turn from floor to line; 1 is the plain line."""
OFFSETS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.95)
"""Seconds that no overlap hides, as fractions of the smallest time."""
MODEL_SD = 0.03
"""How far a form stands from the truth, and a measurement from its repetition (2.9 % on average
on public tables, docs/method.md)."""
MODEL_SD_ROWS = 2.0
"""How many rows that prior is worth."""
REST_SD, REST_NOISE, REST_DOUBLINGS = 0.08, 0.015, 2.0
"""What forms leave over: its size, the noise in it, and how far it reaches."""
CHORD_WEIGHT, CHORD_SD = 0.45, 0.3
"""Weight of the last chord beyond the probes, and the error at which half of it is taken back."""
ROBUST_ROWS, ROBUST_SEARCH = 6, 12
"""From so many sizes on, an outlier can be told from a bend; up to so many, each is suspected."""
BEND_SD = 0.06
"""Real curves stand so far from every form at times; only what is further off is an outlier."""
LEAST_WEIGHT = 0.01
IGNORED = 1e-15
"""Trust in a row that is left out for a trial; still no zero to divide by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Points:
    """Distinct local batch sizes in ascending order, seconds and weights (1: as good as any)."""

    sizes: Array
    times: Array
    weights: Array

    def without(self, index: int) -> Points:
        """All but one."""
        keep = np.arange(len(self.sizes)) != index
        return Points(sizes=self.sizes[keep], times=self.times[keep], weights=self.weights[keep])


def fit_curve(points: Points) -> dict[str, Any]:
    """Parameters of `step_time_formulas.compute_time`.

    Each form is linear in floor^p and slope^p once p and the offset are fixed, so that the fit is
    a non-negative least squares of relative residuals in closed form, for all forms at once.
    """
    if len(points.sizes) == 1:
        return _one_size(float(points.sizes[0]), float(points.times[0]))
    trust = np.ones_like(points.times)
    if len(points.sizes) >= ROBUST_ROWS:
        trust = _first_trust(points)
    forms, residuals, weights = _pool(points, trust**2)
    if len(points.sizes) >= ROBUST_ROWS:
        for _ in range(8):
            rest = weights @ residuals
            scale = max(BEND_SD, 1.4826 * float(np.median(np.abs(rest))))
            trust = 1.0 / (1.0 + (_wildness(rest) / (2.5 * scale)) ** 2)
            forms, residuals, weights = _pool(points, trust**2)
    kept = weights >= LEAST_WEIGHT * weights.max()
    weights = weights[kept] / weights[kept].sum()
    fitted = np.log(points.times) - weights @ residuals[kept]
    rest = _smooth(points, weights @ residuals[kept], trust**2)
    rest = isotonic(fitted + rest, points.weights * trust**2) - fitted
    curve: dict[str, Any] = {
        name: _plain(values[kept])
        for name, values in zip(("offsets_s", "floors_s", "slopes_s", "powers"), forms, strict=True)
    }
    curve |= {
        "weights": _plain(weights),
        "sizes": _plain(points.sizes),
        "rest": _plain(rest),
        "chord_s": 0.0,
        "chord_weight": 0.0,
    }
    return curve | _chord(curve)


def _first_trust(points: Points) -> Array:
    """Ones, less the one size without which the others agree best, where it stands far off.

    Reweighting alone, begun at a fit that a wild row has bent, does not always find it.
    """
    best, least = np.ones_like(points.times), np.inf
    guesses = [best]
    if len(points.sizes) <= ROBUST_SEARCH:
        guesses += list(np.where(np.eye(len(points.sizes)) > 0, IGNORED, 1.0))
    for guess in guesses:
        _, residuals, weights = _pool(points, guess)
        loss = float(np.sum(np.log1p((weights @ residuals / (2.5 * MODEL_SD)) ** 2)))
        if loss < least - 1e-9:
            best, least = guess, loss
    return best


def _wildness(rest: Array) -> Array:
    """Log residuals; past a factor e as large as the relative ones that least squares sees.

    A row that the line overshoots a millionfold would otherwise outweigh all others even where it
    is trusted least.
    """
    size = np.abs(rest)
    return np.where(size <= 1.0, size, np.exp(np.minimum(size, 50.0) - 1.0))


def _plain(values: Array) -> list[float]:
    """A JSON list."""
    return [float(value) for value in values]


def _one_size(size: float, time: float) -> dict[str, Any]:
    """One probe: all floor or all line, nobody knows which; the middle, and both as bounds."""
    return {
        "offsets_s": [0.0, 0.0],
        "floors_s": [time, 0.0],
        "slopes_s": [0.0, time / size],
        "powers": [1.0, 1.0],
        "weights": [0.5, 0.5],
        "sizes": [size],
        "rest": [0.0],
        "chord_s": 0.0,
        "chord_weight": 0.0,
    }


def _pool(points: Points, trust: Array) -> tuple[tuple[Array, ...], Array, Array]:
    """Every form's parameters, its log residuals, and its posterior weight."""
    unit_size, unit_time = points.sizes[-1], points.times.min()
    size, time = points.sizes / unit_size, points.times / unit_time
    power, offset = (grid.ravel() for grid in np.meshgrid(POWERS, OFFSETS, indexing="ij"))
    p = power[:, None]
    left = time[None, :] - offset[:, None]
    # a relative error of the whole is left / time of a relative error of what is left
    root = np.sqrt(points.weights * trust)
    target = left / time * root / p
    first = target / left**p
    floor, slope = _non_negative(first, first * size[None, :] ** p, target)
    forms = (
        offset * unit_time,
        floor ** (1.0 / power) * unit_time,
        slope ** (1.0 / power) * unit_time / unit_size,
        power,
    )
    names = ("offsets_s", "floors_s", "slopes_s", "powers")
    fitted = formulas.log_forms(dict(zip(names, forms, strict=True)), points.sizes)
    residuals = np.log(points.times) - fitted
    squares = (residuals**2 * points.weights * trust).sum(axis=1)
    evidence = np.log(MODEL_SD_ROWS * MODEL_SD**2 + squares)
    rows = float((points.weights * trust).sum()) + MODEL_SD_ROWS
    log_weight = -0.5 * rows * (evidence - evidence.min())
    weights = np.exp(log_weight)
    return forms, residuals, weights / weights.sum()


def _non_negative(first: Array, second: Array, target: Array) -> tuple[Array, Array]:
    """Least squares of `x first + y second = target` row by row, with x and y not below zero."""
    a, b, c = (first**2).sum(1), (first * second).sum(1), (second**2).sum(1)
    u, v = (first * target).sum(1), (second * target).sum(1)
    determinant = np.maximum(a * c - b * b, 1e-14 * a * c)
    x, y = (c * u - b * v) / determinant, (a * v - b * u) / determinant
    no_x, no_y = x < 0, y < 0
    return np.where(no_x, 0.0, np.where(no_y, u / a, x)), np.where(
        no_y, 0.0, np.where(no_x, v / c, y)
    )


def _smooth(points: Points, rest: Array, trust: Array) -> Array:
    """What the forms leave over, less the noise in it: a Gaussian process in log size."""
    place = np.log2(points.sizes)
    apart = np.abs(place[:, None] - place[None, :])
    prior = REST_SD**2 * np.exp(-apart / REST_DOUBLINGS)
    noise = REST_NOISE**2 / np.maximum(points.weights * trust**2, 1e-6)
    return np.asarray(prior @ np.linalg.solve(prior + np.diag(noise), rest))


def isotonic(values: Array, weights: Array) -> Array:
    """The nearest values that never fall (pool adjacent violators, weighted squares)."""
    blocks: list[list[float]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        blocks.append([value, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (low, first, count), (high, second, more) = blocks[-2], blocks[-1]
            total = first + second
            blocks[-2:] = [[(low * first + high * second) / total, total, count + more]]
    return np.concatenate([np.full(int(count), value) for value, _, count in blocks])


def _chord(curve: dict[str, Any]) -> dict[str, float]:
    """Slope of the last chord, and its weight: less where two close sizes leave it to noise."""
    ends = np.asarray(curve["sizes"][-2:], float)
    times, _ = formulas.compute_time(curve, ends)
    rise = max(float(times[1] - times[0]), 0.0)
    doubt = (np.sqrt(2.0) * REST_NOISE * times[1] / max(rise, 1e-9 * times[1])) ** 2
    return {
        "chord_s": float(rise / (ends[1] - ends[0])),
        "chord_weight": float(CHORD_WEIGHT / (1.0 + doubt / CHORD_SD**2)),
    }
