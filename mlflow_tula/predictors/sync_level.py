"""Levels of synchronisation: what an all-reduce costs on each measured set of ranks.

On one set of ranks synchronisation is a constant that compute hides more or less. Its level and the
overlap's power are found on a grid, for every power at once, and the powers are pooled by how well
they explain the rows. Over the ranks, levels follow the link's own law or a pool of growth laws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mlflow_tula.predictors import step_time_formulas as formulas
from mlflow_tula.predictors.formulas import smooth_maximum

Array = NDArray[np.float64]
Counts = Literal["nodes", "devices"]

POWERS = (1.0, 2.0, 4.0)
"""Overlap: 1 hides nothing (gloo with a rank per core), 4 is nearly the maximum of the two."""
CONTENTION = (0.0, 0.05, 0.12, 0.3, 0.6, 1.0, 1.5)
"""Slower compute per doubling of a node's busy devices, little expected; ranks that share the cores
of a CPU take twice as long each."""
CONTENTION_PRIOR = 0.05
MISFIT_SD, MISFIT_ROWS, HUBER = 0.05, 2.0, 0.15
SMOOTHING = 0.75
"""Share of a level's distance from the growth law that is believed: the rest is noise."""
REST_SHARE = 0.5
"""Share of what the pooled overlap leaves over at each size that is believed."""
SEVERAL = {"ring_weight": 0.5, "latency_weight": 0.5}
SINGLE = {"ring_weight": 0.25, "latency_weight": 0.0}
"""Growth pools where several levels were measured, and where one level says nothing of growth."""
LEVEL_SD, BETWEEN_SD, GROWTH_SD = 0.1, 0.13, 0.1
SINGLE_GROWTH_SD = 0.15
LINK_SD = 0.35
"""Error of a level that only the microbenchmark foretells."""
GUESS = {"devices": 0.2, "nodes": 0.8}
GUESS_SD = 1.0
"""Without any measurement: synchronisation as a share of compute at the middle size, give or take
a factor of three (T4 nodes: 0.2 to 0.4 within one, 0.4 to 2 across two)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncRows:
    """Trials on more ranks than the base: sizes, seconds, weights, seconds of compute alone."""

    batch: Array
    nodes: Array
    devices: Array
    times: Array
    weights: Array
    alone: Array
    extra: Array
    """Seconds of the accumulation passes before the last, which nothing is synchronised in."""


def empty_tier(counts: Counts, base_nodes: int, base_devices: int) -> dict[str, Any]:
    """The fields of a tier that need no measurement."""
    nodes, devices = (
        (2 * base_nodes, base_devices) if counts == "nodes" else (base_nodes, 2 * base_devices)
    )
    return {
        "counts": counts,
        "powers": list(POWERS),
        "weights": [1.0 / len(POWERS)] * len(POWERS),
        "log2_ranks": [float(np.log2(nodes * devices))],
        "log_levels": [[0.0] for _ in POWERS],
        "fewest_ranks": nodes * devices,
        "fewest_units": 2,
        "sizes": [],
        "rest": [],
        "links": None,
        "gradient_bytes": 0.0,
        "measured": False,
        "level_sd": GUESS_SD,
        "between_sd": 0.0,
        "growth_sd": SINGLE_GROWTH_SD,
        **SINGLE,
    }


def guess_tier(tier: dict[str, Any], usual_compute_s: float, least_s: float) -> dict[str, Any]:
    """Levels where nothing was measured on such ranks."""
    if tier["links"] is not None:
        return {**tier, "level_sd": LINK_SD, "growth_sd": LINK_SD / 2}
    level = max(GUESS[tier["counts"]] * usual_compute_s, least_s)
    return {**tier, "log_levels": [[float(np.log(level))] for _ in POWERS]}


def fit_tier(tier: dict[str, Any], rows: SyncRows, slowdown: Array) -> tuple[dict[str, Any], float]:
    """Fit the levels of every measured set of ranks.

    Args:
        tier: from `empty_tier`, links filled in.
        rows: the trials.
        slowdown: doublings of a node's busy devices, one a row, where contention is to be found;
            zeros where it is known already.

    Returns:
        The tier, and contention per doubling.
    """
    ranks, which = np.unique(rows.nodes * rows.devices, return_inverse=True)
    units = rows.nodes if tier["counts"] == "nodes" else rows.devices
    tier |= {
        "fewest_ranks": int(ranks[0]),
        "fewest_units": int(units.min()),
        "log2_ranks": [float(value) for value in np.log2(ranks)],
        "measured": True,
        "level_sd": LEVEL_SD,
        "between_sd": BETWEEN_SD,
    }
    if len(ranks) > 1:
        tier |= {"growth_sd": GROWTH_SD, **SEVERAL}
    growth = formulas.log_growth(tier, rows.nodes, rows.devices)
    guesses = CONTENTION if np.any(slowdown > 0) else (0.0,)
    fits = [
        _fit_power(rows, which, growth, power, 1.0 + guess * slowdown)
        for power in POWERS
        for guess in guesses
    ]
    count = float(rows.weights.sum()) + MISFIT_ROWS
    score = np.array([-0.5 * count * np.log(one[2]) for one in fits]).reshape(len(POWERS), -1)
    score -= np.log1p(np.asarray(guesses) / CONTENTION_PRIOR)
    posterior = np.exp(score - score.max())
    posterior /= posterior.sum()
    contention = float((posterior.sum(axis=0) * np.asarray(guesses)).sum())
    if len(guesses) > 1:
        # levels once more, at the contention that all rows agree on
        factor = 1.0 + contention * slowdown
        fits = [_fit_power(rows, which, growth, power, factor) for power in POWERS]
    tier["weights"] = [float(value) for value in posterior.sum(axis=1)]
    tier["log_levels"] = [[float(value) for value in one[0]] for one in fits]
    rest = np.asarray(tier["weights"]) @ np.array([one[1] for one in fits])
    return tier | _rest(rows, ranks, which, rest), contention


def _fit_power(
    rows: SyncRows, which: NDArray[np.intp], growth: Array, power: float, factor: Array
) -> tuple[Array, Array, float]:
    """Levels (logs over the growth law) at one overlap power, log residuals, and the misfit."""
    member = (which[None, :] == np.arange(which.max() + 1)[:, None]).astype(float)

    def residuals(sync: Array) -> Array:
        overlapped = smooth_maximum(
            np.broadcast_to((rows.alone * factor)[:, None], sync.shape), sync, power
        )
        return np.asarray(
            np.log(rows.times[:, None] / (overlapped + (rows.extra * factor)[:, None]))
        )

    def losses(sync: Array) -> Array:
        return np.asarray(member @ (rows.weights[:, None] * _huber(residuals(sync))))

    grid = np.geomspace(1e-4 * rows.times.min(), 10.0 * rows.times.max(), 120)
    coarse = grid[losses(np.broadcast_to(grid, (len(which), len(grid)))).argmin(axis=1)]
    step = grid[1] / grid[0]
    fine = coarse[:, None] * np.geomspace(1.0 / step, step, 31)[None, :]
    loss = losses(fine[which])
    found = np.log(fine[np.arange(len(fine)), loss.argmin(axis=1)])
    growths = (member @ growth) / member.sum(axis=1)
    levels = found - growths
    levels = levels.mean() + SMOOTHING * (levels - levels.mean())
    rest = residuals(np.exp(levels[which] + growth)[:, None])[:, 0]
    return levels, rest, float(MISFIT_ROWS * MISFIT_SD**2 + loss.min(axis=1).sum())


def _huber(residual: Array) -> Array:
    """Squares near zero, straight lines beyond: one wild row does not decide."""
    size = np.abs(residual)
    return np.where(size < HUBER, size**2, 2.0 * HUBER * size - HUBER**2)


def _rest(rows: SyncRows, ranks: Array, which: NDArray[np.intp], rest: Array) -> dict[str, Any]:
    """What the pooled overlap leaves over at each set of ranks, at the sizes measured on any."""
    sizes = np.unique(rows.batch)
    table = []
    for index in range(len(ranks)):
        here = which == index
        order = np.argsort(rows.batch[here])
        mean_rest = rest[here][order].clip(-HUBER, HUBER)
        table.append(
            REST_SHARE * np.interp(np.log(sizes), np.log(rows.batch[here][order]), mean_rest)
        )
    return {
        "sizes": [float(size) for size in sizes],
        "rest": [[float(value) for value in row] for row in table],
    }
