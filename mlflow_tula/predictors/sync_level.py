"""Levels of synchronisation: what an all-reduce costs on each measured set of ranks.

On one set of ranks synchronisation is a constant that compute hides more or less. Its level and the
overlap's power are found on a grid, for every power at once, and the powers are pooled by how well
they explain the rows. Over the ranks, levels follow the link's own law or a pool of growth laws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mlflow_tula.predictors import step_time_formulas as formulas
from mlflow_tula.predictors.sync_formulas import overlapped

Array = NDArray[np.float64]
Counts = Literal["nodes", "devices"]

POWERS = (1.0, 2.0, 4.0, 16.0)
"""Overlap: 1 hides nothing (gloo with a rank per core), 16 is the maximum of the two."""
_NEVER = 1e-9
PLAIN_PRIOR = (1.0, 1.0, 1.0, _NEVER)
"""How far each power is believed where nothing more is known: nothing hides behind all of compute
as well as behind the backward pass."""
SHARED_PRIOR = (1.0, 0.1, 0.02, _NEVER)
"""How far each power is believed where ranks share cores: all-reduce needs the very same ones."""
HIDING_PRIOR = (0.02, 0.1, 0.5, 1.0)
"""The same across nodes, where the backward pass is known: behind a network DDP hides most of it
(forward + optimizer + max(backward, sync) was right to 2 to 6 %, docs/distributed.md)."""
LEVELS, FEW_LEVELS = 120, 40
"""Levels that are tried first; few of them where only the misfit is asked for."""
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
MOST_FAR = 4.0
"""Deviations from a guessed level beyond which it is only wrong."""
LINK_SD, LINK_BACKWARD_SD = 0.35, 0.15
"""Error of a level that only the microbenchmark foretells; less where the backward pass is known,
which is what hides it."""
GUESS = {"devices": 0.2, "nodes": 0.8}
GUESS_SD = 1.0
"""Without any measurement: synchronisation as a share of compute at the middle size, give or take
a factor of three (T4 nodes: 0.2 to 0.4 within one, 0.4 to 2 across two)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncRows:
    """Trials on more ranks than the base: sizes, seconds, weights, seconds of compute there."""

    batch: Array
    nodes: Array
    devices: Array
    times: Array
    weights: Array
    alone: Array
    extra: Array
    """Seconds of the accumulation passes before the last, which nothing is synchronised in."""
    hidden: Array
    """The share of compute that synchronisation can hide behind."""
    compressed: NDArray[np.bool_]
    """Whether half the bytes were sent."""
    busy: Array
    """Seconds for which the all-reduce keeps the cores busy that compute."""


def empty_tier(
    counts: Counts,
    base_nodes: int,
    base_devices: int,
    *,
    shared_cores: bool = False,
    hiding_known: bool = False,
) -> dict[str, Any]:
    """The fields of a tier that need no measurement."""
    prior = PLAIN_PRIOR
    if counts == "devices" and shared_cores:
        prior = SHARED_PRIOR
    elif counts == "nodes" and hiding_known:
        prior = HIDING_PRIOR
    nodes, devices = (
        (2 * base_nodes, base_devices) if counts == "nodes" else (base_nodes, 2 * base_devices)
    )
    return {
        "counts": counts,
        "powers": list(POWERS),
        "weights": [weight / sum(prior) for weight in prior],
        "log2_ranks": [float(np.log2(nodes * devices))],
        "log_levels": [[0.0] for _ in POWERS],
        "fewest_ranks": nodes * devices,
        "fewest_units": 2,
        "sizes": [],
        "rest": [],
        "links": None,
        "gradient_bytes": 0.0,
        "messages": 1.0,
        "hiding_known": hiding_known,
        "measured": False,
        "level_sd": GUESS_SD,
        "between_sd": 0.0,
        "growth_sd": SINGLE_GROWTH_SD,
        **SINGLE,
    }


def guess_tier(tier: dict[str, Any], usual_compute_s: float, least_s: float) -> dict[str, Any]:
    """Levels where nothing was measured on such ranks."""
    if tier["links"] is not None:
        known = tier["counts"] == "nodes" and tier["hiding_known"]
        sd = LINK_BACKWARD_SD if known else LINK_SD
        return {**tier, "level_sd": sd, "growth_sd": sd / 2}
    level = max(GUESS[tier["counts"]] * usual_compute_s, least_s)
    return {**tier, "log_levels": [[float(np.log(level))] for _ in POWERS]}


def fit_tier(tier: dict[str, Any], rows: SyncRows) -> dict[str, Any]:
    """Fit the levels of every measured set of ranks.

    Args:
        tier: from `empty_tier`, links filled in.
        rows: the trials.
    """
    ranks, which = np.unique(rows.nodes * rows.devices, return_inverse=True)
    tier = _seen(tier, rows, ranks)
    growth = formulas.log_growth(tier, rows.nodes, rows.devices, rows.compressed)
    messages = tier.get("messages", 1.0)
    fits = [_fit_power(rows, which, growth, power, messages) for power in POWERS]
    scores = np.array([_score(rows, one[2]) for one in fits]) + np.log(tier["weights"])
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    tier["weights"] = [float(value) for value in weights]
    tier["log_levels"] = [[float(value) for value in one[0]] for one in fits]
    rest = weights @ np.array([one[1] for one in fits])
    return tier | _rest(rows, ranks, which, rest)


def score_rows(
    tier: dict[str, Any], guesses: Sequence[SyncRows], usual_compute_s: float | None
) -> Array:
    """How well levels explain rows, whatever the overlap: logarithms of evidence.

    Where ranks share cores, levels above what would be guessed count against it: synchronisation
    can make up for any compute, however little.

    Args:
        tier: from `empty_tier`, links filled in.
        guesses: the same rows, each time with other seconds of compute.
        usual_compute_s: compute at a middle size; None where any level will do.
    """
    rows = guesses[0]
    ranks, which = np.unique(rows.nodes * rows.devices, return_inverse=True)
    middle, spread = np.inf, 1.0
    if usual_compute_s is not None:
        guess = guess_tier(tier, usual_compute_s, 0.0)
        middle, spread = guess["log_levels"][0][0], guess["level_sd"]
    tier = _seen(tier, rows, ranks)
    growth = formulas.log_growth(tier, rows.nodes, rows.devices, rows.compressed)
    scores = np.zeros((len(guesses), len(POWERS))) + np.log(tier["weights"])
    for i, one in enumerate(guesses):
        for j, power in enumerate(POWERS):
            messages = tier.get("messages", 1.0)
            levels, _, misfit = _fit_power(one, which, growth, power, messages, FEW_LEVELS)
            far = min(max((float(levels.mean()) - middle) / spread, 0.0), MOST_FAR)
            scores[i, j] += _score(rows, misfit) - 0.5 * far**2
    return np.asarray(np.logaddexp.reduce(scores, axis=1))


def _score(rows: SyncRows, misfit: float) -> float:
    """Logarithm of the evidence for a fit."""
    return -0.5 * (float(rows.weights.sum()) + MISFIT_ROWS) * float(np.log(misfit))


def _seen(tier: dict[str, Any], rows: SyncRows, ranks: Array) -> dict[str, Any]:
    """The tier with what was measured in it, levels apart."""
    units = rows.nodes if tier["counts"] == "nodes" else rows.devices
    seen = {
        "fewest_ranks": int(ranks[0]),
        "fewest_units": int(units.min()),
        "log2_ranks": [float(value) for value in np.log2(ranks)],
        "measured": True,
        "level_sd": LEVEL_SD,
        "between_sd": BETWEEN_SD,
    }
    if len(ranks) > 1:
        seen |= {"growth_sd": GROWTH_SD, **SEVERAL}
    return {**tier, **seen}


def _fit_power(
    rows: SyncRows,
    which: NDArray[np.intp],
    growth: Array,
    power: float,
    messages: float,
    num_levels: int = LEVELS,
) -> tuple[Array, Array, float]:
    """Levels (logs over the growth law) at one overlap power, log residuals, and the misfit."""
    member = (which[None, :] == np.arange(which.max() + 1)[:, None]).astype(float)
    growths = (member @ growth) / member.sum(axis=1)
    own = np.exp(growth - growths[which])[:, None]

    def residuals(level: Array) -> Array:
        sync, alone, hidden = level * own, rows.alone[:, None], rows.hidden[:, None]
        both = overlapped(alone, sync, power, hidden, messages, rows.busy[:, None])
        return np.asarray(np.log(rows.times[:, None] / (both + rows.extra[:, None])))

    def losses(sync: Array) -> Array:
        return np.asarray(member @ (rows.weights[:, None] * _huber(residuals(sync))))

    grid = np.geomspace(1e-4 * rows.times.min(), 10.0 * rows.times.max(), num_levels)
    coarse = grid[losses(np.broadcast_to(grid, (len(which), len(grid)))).argmin(axis=1)]
    step = grid[1] / grid[0]
    fine = coarse[:, None] * np.geomspace(1.0 / step, step, num_levels // 4 + 1)[None, :]
    loss = losses(fine[which])
    found = np.log(fine[np.arange(len(fine)), loss.argmin(axis=1)])
    levels = found - growths
    levels = levels.mean() + SMOOTHING * (levels - levels.mean())
    rest = residuals(np.exp((levels + growths)[which])[:, None])[:, 0]
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
