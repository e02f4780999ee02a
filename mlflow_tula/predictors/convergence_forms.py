"""The forms that epochs to the target may take, weighed by prior and evidence.

A prior over the critical batch size, the U shape and the wiggle, times the evidence of the rows;
the equation itself stands in convergence_formulas.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mlflow_tula.predictors import convergence_formulas as formulas
from mlflow_tula.predictors.convergence_rows import ConvergenceRow

Array = NDArray[np.float64]
Form = Literal["pooled", "hyperbola", "scavenger"]

SEED_SPREAD = 0.05
"""Relative spread of epochs over seeds where nothing was told (3.6 % on MLPerf's points)."""
PRIOR_RUNS = 4.0
"""How many runs that prior spread is worth."""
UNEXPLAINED = 0.03
"""Relative error of a row that no number of seeds removes."""
NOISE_SCALE_FACTOR = 5.0
"""Critical batch size over noise scale: 283 over 55-65 on MNIST-1D (docs/method.md)."""
NOISE_SCALE_SPREAD = 0.9
"""Spread of the logarithm of that factor between tasks."""

# prior weights: a form costs its share until rows speak for it
POWERS = ((1.0, 0.7), (1.4, 0.3))
PROCESSES = ((1.5, 0.05, 0.3), (1.5, 0.1, 0.4), (1.5, 0.2, 0.3))  # length, amplitude, weight
HYPERBOLA_PROCESSES = ((0.0, 0.03, 0.4), (0.0, 0.1, 0.4), (0.0, 0.3, 0.2))
U_SHAPE_WEIGHT = 0.35
U_SHAPE_REACH = 8.0
"""Up to how many times the smallest measured size the U shape may begin."""
U_SHAPE_SIZES = 3
"""Measured sizes without which a U shape cannot be told from anything else."""
NUM_CRITICAL = 48
NUM_CRITICAL_FEW = 24
NUM_SMALL = 7
KEPT_WEIGHT = 1e-3
MAX_FORMS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """The forms that share one Gaussian process, each with its posterior weight."""

    length: float
    amplitude: float
    weights: tuple[float, ...]
    critical_batch_sizes: tuple[float, ...]
    powers: tuple[float, ...]
    small_batch_sizes: tuple[float, ...]


def parameters(
    rows: Sequence[ConvergenceRow], form: Form, noise_scale: float | None
) -> dict[str, Any]:
    """The fields of ConvergencePredictor that one fit decides."""
    sizes = np.array([row.global_batch_size for row in rows], float)
    epochs = np.array([_epochs(row) for row in rows])
    variance, usual = _variances(rows)
    fields: dict[str, Any] = {
        "global_batch_sizes": tuple(sizes.tolist()),
        "epochs_to_target": tuple(epochs.tolist()),
        "variances": tuple(variance.tolist()),
        "run_variance": usual,
    }
    if form == "scavenger":
        return fields | _scavenger(sizes, epochs, variance)
    centre = float(np.average(np.log(epochs), weights=1.0 / variance))
    processes = _pool(np.log(sizes), np.log(epochs) - centre, variance, form, noise_scale)
    return fields | {"centre": centre, "processes": processes}


def _variances(rows: Sequence[ConvergenceRow]) -> tuple[Array, float]:
    """Relative variance of each row's mean, and of a new row of as many runs as usual.

    The spread over seeds is shrunk twice: of all rows together to SEED_SPREAD, of each row to
    that of all. Two runs that agree by chance do not make a row exact.
    """
    runs = np.array([row.runs_reached for row in rows], float)
    told = np.array([row.std is not None and row.runs_reached > 1 for row in rows])
    square = np.array([((row.std or 0.0) / _epochs(row)) ** 2 for row in rows])
    degrees = np.where(told, runs - 1.0, 0.0)
    shared = (PRIOR_RUNS * SEED_SPREAD**2 + degrees @ square) / (PRIOR_RUNS + degrees.sum())
    own = (PRIOR_RUNS * shared + degrees * square) / (PRIOR_RUNS + degrees)
    usual = float(shared / np.median(runs)) + UNEXPLAINED**2
    return own / runs + UNEXPLAINED**2, usual


def _epochs(row: ConvergenceRow) -> float:
    """Epochs of a row that reached the target."""
    assert row.epochs_to_target is not None
    return row.epochs_to_target


def _forms(log_batch: Array, form: Form, noise_scale: float | None) -> tuple[Array, ...]:
    """Every (Bc, q, Bs) that is tried, and its log prior."""
    low, high = float(log_batch.min()), float(log_batch.max())
    count = NUM_CRITICAL if len(log_batch) >= U_SHAPE_SIZES else NUM_CRITICAL_FEW
    grid = np.linspace(low - math.log(30), high + math.log(100), count)
    prior = np.full(grid.shape, -math.log(len(grid)))
    if noise_scale is not None:
        expected = math.log(noise_scale * NOISE_SCALE_FACTOR)
        grid = np.linspace(min(grid[0], expected - 2), max(grid[-1], expected + 2), count)
        prior = -0.5 * ((grid - expected) / NOISE_SCALE_SPREAD) ** 2
        prior -= np.logaddexp.reduce(prior)
    falls = [(0.0, 0.0)]
    if form == "pooled" and len(log_batch) >= U_SHAPE_SIZES:
        falls = [(0.0, math.log(1.0 - U_SHAPE_WEIGHT))]
        small = np.exp(np.linspace(low, low + math.log(U_SHAPE_REACH), NUM_SMALL))
        falls += [(float(one), math.log(U_SHAPE_WEIGHT / NUM_SMALL)) for one in small]
    powers = POWERS if form == "pooled" else ((1.0, 1.0),)
    shares = np.log([share for _, share in powers])
    critical, power, small, log_prior = (
        part.ravel()
        for part in (
            *np.meshgrid(
                np.exp(grid), [p for p, _ in powers], [f for f, _ in falls], indexing="ij"
            ),
            prior[:, None, None] + shares[:, None] + np.array([chance for _, chance in falls]),
        )
    )
    return critical, power, small, log_prior


def _pool(
    log_batch: Array, target: Array, variance: Array, form: Form, noise_scale: float | None
) -> tuple[Process, ...]:
    """Weigh every form under every Gaussian process by prior and evidence; keep what matters."""
    critical, power, small, prior = _forms(log_batch, form, noise_scale)
    residuals = target - formulas.trend(log_batch, critical, power, small)
    priors: Sequence[tuple[float, float, float]]
    priors = PROCESSES if form == "pooled" else HYPERBOLA_PROCESSES
    if len(log_batch) < U_SHAPE_SIZES:
        priors = priors[1:2]  # one or two rows say nothing about the wiggle
    nowhere = np.empty(0)
    scores = np.array(
        [
            prior
            + math.log(share)
            + formulas.posterior(log_batch, residuals, variance, nowhere, amplitude, length)[0]
            for length, amplitude, share in priors
        ]
    )
    weights = np.exp(scores - scores.max())
    kept = np.sort(weights, axis=None)[-MAX_FORMS:].min()
    weights[weights < max(kept, KEPT_WEIGHT * weights.max())] = 0.0
    weights /= weights.sum()
    return tuple(
        Process(
            length=length,
            amplitude=amplitude,
            weights=tuple(own[own > 0].tolist()),
            critical_batch_sizes=tuple(critical[own > 0].tolist()),
            powers=tuple(power[own > 0].tolist()),
            small_batch_sizes=tuple(small[own > 0].tolist()),
        )
        for (length, amplitude, _), own in zip(priors, weights, strict=True)
        if own.any()
    )


def _scavenger(sizes: Array, epochs: Array, variance: Array) -> dict[str, float]:
    """Weighted least squares of e* + theta / sqrt(B), relative, both kept non-negative."""
    from scipy.optimize import nnls

    scale = epochs * np.sqrt(variance)
    design = np.c_[np.ones_like(sizes), sizes**-0.5] / scale[:, None]
    floor, theta = nnls(design, epochs / scale)[0]
    errors = np.log((floor + theta * sizes**-0.5) / epochs)
    # never said to be surer than the 30 % that the form errs on published points
    spread = max(float(np.sqrt(np.sum(errors**2) / max(len(sizes) - 2, 1))), 0.3)
    return {"floor_epochs": float(floor), "theta": float(theta), "log_sd": spread}
