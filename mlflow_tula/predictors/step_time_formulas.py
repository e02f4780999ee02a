"""Seconds per optimizer step. Numpy only: shipped with each registered model.

    step(b, n, d, k) = max(k data(b), (k - 1) micro(b, d) + overlap(compute(b, d), sync(n, d)))

b: local batch size; n: nodes; d: devices per node; k: accumulation steps. `compute` pools forms
`offset + (floor^p + (slope b)^p)^(1/p)`, joins the measured sizes, and slows where devices share
(`contention`); `sync` is an all-reduce that follows the measured levels and grows by a pooled law;
`overlap` is a p-norm, pooled over p.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .formulas import smooth_maximum, student_quantile
from .sync_formulas import (
    TINY,
    backward_share,
    busy_time,
    link_time,
    log_growth,
    num_buckets,
    overlapped,
    sync_time,
    with_link,
    with_options,
)

__all__ = [
    "backward_share",
    "busy_time",
    "link_time",
    "log_growth",
    "num_buckets",
    "step_time",
    "sync_time",
]

Array = NDArray[np.float64]

REST_DECAY = 3.0
"""What overlap leaves over at the measured ranks fades within half a doubling beyond."""


def log_forms(curve: Mapping[str, Any], batch: Array) -> Array:
    """Log seconds of each pooled compute form, one row a form."""
    offset, floor, slope, power = (
        np.asarray(curve[name], float)[:, None]
        for name in ("offsets_s", "floors_s", "slopes_s", "powers")
    )
    floors = np.broadcast_to(floor, (len(floor), len(batch)))
    value = offset + smooth_maximum(floors, slope * batch, power)
    return np.asarray(np.log(np.maximum(value, TINY)))


def compute_time(curve: Mapping[str, Any], batch: Array) -> tuple[Array, Array]:
    """Seconds of one device's work at each local batch size, and how far the forms disagree.

    Inside the measured sizes: the pooled form plus what it left over at them, joined by lines
    in log size. Beyond: between that and the chord of the two largest sizes, which no floor or
    jump below them can mislead.
    """
    sizes, weights = (np.asarray(curve[name], float) for name in ("sizes", "weights"))
    asked, back = np.unique(np.concatenate([sizes, batch]), return_inverse=True)
    known, back = back[: len(sizes)], back[len(sizes) :]
    forms, place = log_forms(curve, asked), np.log(asked)
    log_time = weights @ forms + np.interp(place, place[known], curve["rest"])
    beyond = np.maximum(asked - sizes[-1], 0.0)
    chord = np.log(np.exp(log_time[known[-1]]) + curve["chord_s"] * beyond)
    share = curve["chord_weight"] * (beyond > 0)
    # the forms' quarrel is about the way between and on from the measured sizes, not their level
    ways = forms - np.array([np.interp(place, place[known], form[known]) for form in forms])
    doubt = np.sqrt(np.maximum(weights @ ways**2 - (weights @ ways) ** 2, 0.0))
    doubt = np.hypot(doubt, np.sqrt(share * (1 - share)) * np.abs(chord - log_time))
    value = np.exp((1 - share) * log_time + share * chord)
    return value[back], doubt[back]


def compute_parts(curve: Mapping[str, Any], alone: Array) -> tuple[Array, Array]:
    """Seconds of compute that the batch size does not change, and those that grow with it."""
    weights, offsets, floors = (
        np.asarray(curve[name], float) for name in ("weights", "offsets_s", "floors_s")
    )
    floor = np.minimum(float(weights @ (offsets + floors)), alone)
    return np.asarray(floor), np.asarray(alone - floor)


def log_sharing(params: Mapping[str, Any], devices: Array) -> Array:
    """Logarithm of a node's busy devices over those that the compute curve was measured on."""
    busy = np.maximum(devices, params["base"]["devices_per_node"])
    return np.asarray(np.log(busy / params["contention"]["devices"]))


def contended(
    params: Mapping[str, Any], batch: Array, devices: Array
) -> tuple[Array, Array, Array]:
    """Seconds of compute, `floor r^f + slope r^s`, and of a pass that only adds up; the doubt."""
    slope, floor, slower, doubt = _contended_parts(params, batch, devices)
    return slope + floor, np.maximum(slope + floor - params["optimizer_s"] * slower, 0.0), doubt


def _contended_parts(
    params: Mapping[str, Any], batch: Array, devices: Array
) -> tuple[Array, Array, Array, Array]:
    """Seconds that grow with the batch, those that do not, `r^f`, and the forms' doubt."""
    known, ratio = params["contention"], log_sharing(params, devices)
    alone, doubt = compute_time(params["compute"], batch)
    floor, slope = compute_parts(params["compute"], alone)
    slower = np.exp(known["floor"] * ratio)
    return slope * np.exp(known["slope"] * ratio), floor * slower, slower, doubt


def contention_deviation(params: Mapping[str, Any], batch: Array, devices: Array) -> Array:
    """Standard deviation of log compute that the exponents of contention leave open.

    Nothing at measured device counts and sizes; elsewhere what changes on the way from them.
    """
    near, smallest, largest = _nearest_devices(params, devices)
    here, there = log_sharing(params, devices), log_sharing(params, near)
    slope, floor, _, _ = _contended_parts(params, batch, devices)
    known_slope, known_floor, _, _ = _contended_parts(
        params, np.clip(batch, smallest, largest), near
    )
    by_slope = (here * slope - there * known_slope) / (slope + floor)
    by_floor = (here * floor - there * known_floor) / (slope + floor)
    slopes, both, floors = params["contention"]["covariance"]
    variance = slopes * by_slope**2 + 2.0 * both * by_slope * by_floor + floors * by_floor**2
    return np.asarray(np.sqrt(np.maximum(variance, 0.0)))


def _nearest_devices(params: Mapping[str, Any], devices: Array) -> tuple[Array, Array, Array]:
    """The nearest measured device count of a node, and the sizes measured on it."""
    setups = np.asarray(params["range"]["setups"], float)
    counts = np.unique(setups[:, 1])
    mine = [setups[setups[:, 1] == count] for count in counts]
    ends = np.array([(rows[:, 2].min(), rows[:, 3].max()) for rows in mine])
    apart = np.abs(np.log2(devices)[:, None] - np.log2(counts)[None, :])
    which = np.argmin(apart, axis=1)
    return counts[which], ends[which, 0], ends[which, 1]


def _tier_parts(
    tier: Mapping[str, Any],
    batch: Array,
    nodes: Array,
    devices: Array,
    alone: Array,
    hidden: Array,
    factor: Array,
) -> tuple[Array, Array]:
    """Log seconds of compute overlapped with synchronisation, and the share of the latter."""
    powers, weights = (np.asarray(tier[name], float) for name in ("powers", "weights"))
    sync = sync_time(tier, nodes, devices) * factor
    busy = busy_time(tier, nodes, devices)
    both = overlapped(alone, sync, powers[:, None], hidden, tier.get("messages", 1.0), busy)
    value = weights @ np.log(both)
    share = weights @ (sync / both) ** powers[:, None]
    rest = np.asarray(tier["rest"], float)
    if rest.size:
        place, size = np.log2(nodes * devices), np.log(batch)
        columns = np.array([np.interp(size, np.log(tier["sizes"]), row) for row in rest])
        knots = np.asarray(tier["log2_ranks"], float)
        above = np.clip(np.searchsorted(knots, place), 0, len(knots) - 1)
        below = np.clip(above - 1, 0, len(knots) - 1)
        gap = np.maximum(knots[above] - knots[below], TINY)
        part = np.clip((place - knots[below]) / gap, 0.0, 1.0)
        index = np.arange(len(batch))
        outside = np.maximum(np.maximum(place - knots[-1], knots[0] - place), 0.0)
        known = (1 - part) * columns[below, index] + part * columns[above, index]
        value = value + known * 2.0 ** (-REST_DECAY * outside)
    return value, share


def _raw(
    params: Mapping[str, Any], setup: Sequence[Array], factors: Sequence[Array]
) -> tuple[list[Array], Array, Array]:
    """Seconds before monotony is imposed, one array a factor; then as `step_values`."""
    batch, nodes, devices, accumulation = setup
    base = params["base"]
    alone, micro, doubt = contended(params, batch, devices)
    hidden = backward_share(params, batch)
    many = nodes > base["nodes"]
    some = ~many & (devices > base["devices_per_node"])
    totals, share = [], np.zeros_like(alone)
    for factor in factors:
        value = alone.copy()
        for rows, tier in ((some, params["intra_node"]), (many, params["inter_node"])):
            if rows.any():
                here = (part[rows] for part in (batch, nodes, devices, alone, hidden, factor))
                log_value, part = _tier_parts(tier, *here)
                value[rows] = np.exp(log_value)
                if factor is factors[0]:
                    share[rows] = part
        # FSDP gathers and scatters in every pass, DDP reduces in the last one alone
        again = micro + value - alone if params.get("sync_every_pass") else micro
        total = value + (accumulation - 1.0) * again
        if factor is factors[0]:
            share = share * value / np.maximum(total, TINY)
        if params["data"] is not None:
            data = params["data"]["offset_s"] + params["data"]["slope_s"] * batch
            total = np.maximum(total, accumulation * data)
        totals.append(total)
    return totals, share, doubt


def step_values(
    params: Mapping[str, Any], setup: Sequence[Array], factors: Sequence[Array]
) -> tuple[list[Array], Array, Array]:
    """Seconds per step, never falling with the batch size, for each factor on synchronisation.

    Between two knots the logarithm is convex in log size, so that the running maximum over the
    knots below is all that monotony needs.

    Args:
        params: the fitted parameters.
        setup: local batch sizes, nodes, devices per node, accumulation steps; arrays of a length.
        factors: arrays of that length, functions of nodes and devices alone.

    Returns:
        Seconds, one array a factor; the share of synchronisation and the forms' doubt (of log
        compute), both at the first factor.
    """
    values, share, doubt = _raw(params, setup, factors)
    knots = np.asarray(params["knots"], float)
    kinds, first, which = np.unique(
        np.stack(setup[1:], axis=1), axis=0, return_index=True, return_inverse=True
    )
    grid = [np.tile(knots, len(kinds)), *np.repeat(kinds, len(knots), axis=0).T]
    at_knots, _, _ = _raw(params, grid, [np.repeat(one[first], len(knots)) for one in factors])
    below = np.searchsorted(knots, setup[0], side="right")
    out = []
    for value, at in zip(values, at_knots, strict=True):
        least = np.maximum.accumulate(at.reshape(len(kinds), len(knots)), axis=1)
        least = np.c_[np.zeros(len(kinds)), least]
        out.append(np.maximum(value, least[which.reshape(-1), below]))
    return out, share, doubt


def compute_deviation(
    params: Mapping[str, Any], batch: Array, devices: Array, doubt: Array
) -> Array:
    """Standard deviation of log compute: distance from what was measured, and the forms."""
    spread = params["spread"]
    sizes = np.log2(np.asarray(params["compute"]["sizes"], float))
    place = np.log2(batch)
    above = np.clip(np.searchsorted(sizes, place), 0, len(sizes) - 1)
    below = np.clip(above - 1, 0, len(sizes) - 1)
    # a bridge between two measured sizes: nothing at them, most in the middle
    gap = np.maximum(sizes[above] - sizes[below], TINY)
    bridge = np.clip((place - sizes[below]) * (sizes[above] - place) / gap, 0.0, None)
    beyond = np.maximum(np.maximum(place - sizes[-1], sizes[0] - place), 0.0)
    counts = np.log2(np.asarray(params["range"]["device_counts"], float))
    shared = np.min(np.abs(np.log2(devices)[:, None] - counts[None, :]), axis=1)
    variance = spread["bridge_sd"] ** 2 * bridge + (spread["beyond_sd"] * beyond) ** 2 + doubt**2
    variance += (spread["contention_sd"] * shared) ** 2
    foreseen = spread.get("foreseen")
    if foreseen is not None:  # a curve of other models, not of this one's own trials
        known = np.interp(place, foreseen["log2_sizes"], foreseen["deviations"])
        variance += known**2
    return np.asarray(np.sqrt(variance))


def sync_deviation(params: Mapping[str, Any], nodes: Array, devices: Array) -> Array:
    """Standard deviation of log synchronisation: level, place between levels, growth beyond."""
    base = params["base"]
    many = nodes > base["nodes"]
    some = ~many & (devices > base["devices_per_node"])
    variance = np.zeros_like(nodes)
    for rows, tier in ((some, params["intra_node"]), (many, params["inter_node"])):
        if rows.any():
            ranks = np.log2(nodes[rows] * devices[rows])
            known = np.asarray(tier["log2_ranks"], float)
            nearest = np.min(np.abs(ranks[:, None] - known[None, :]), axis=1)
            outside = np.maximum(np.maximum(ranks - known[-1], known[0] - ranks), 0.0)
            variance[rows] = (
                tier["level_sd"] ** 2
                + tier["between_sd"] ** 2 * np.minimum(nearest, 1.0)
                + (tier["growth_sd"] * outside) ** 2
            )
    return np.sqrt(variance)


def step_time(
    params: Mapping[str, Any],
    local_batch_size: Array,
    nodes: Array,
    devices_per_node: Array,
    accumulation_steps: Array,
    *,
    level: float = 0.9,
    bandwidth_bytes_per_s: float | None = None,
    latency_s: float | None = None,
    gradient_compression: str | None = None,
    bucket_bytes: float | None = None,
) -> tuple[Array, Array, Array]:
    """Seconds per optimizer step: value, lower, upper.

    Noise, compute and synchronisation each have a spread of their own; that of synchronisation
    goes through the overlap, because what hides behind compute does no harm when it is wrong.
    A stated link between nodes (bytes per second, seconds) takes the measured one's place.
    """
    params = _as_asked(params, bandwidth_bytes_per_s, latency_s, gradient_compression, bucket_bytes)
    if not len(local_batch_size):
        empty = np.zeros(0)
        return empty, empty, empty
    spread = params["spread"]
    half = student_quantile(0.5 + level / 2, spread["degrees"]) * spread["scale"]
    # beyond e^100 the answer is "anything" as well, and still a number
    shift = np.exp(np.minimum(half * sync_deviation(params, nodes, devices_per_node), 100.0))
    (value, low, high), share, doubt = step_values(
        params,
        (local_batch_size, nodes, devices_per_node, accumulation_steps),
        (np.ones_like(shift), 1.0 / shift, shift),
    )
    compute = compute_deviation(params, local_batch_size, devices_per_node, doubt)
    # how well the curve foretells its own rows says nothing of contention: that is never narrowed
    shared = contention_deviation(params, local_batch_size, devices_per_node)
    shared = shared * max(1.0, 1.0 / spread["scale"])
    own = half * np.hypot((1.0 - share) * np.hypot(compute, shared), spread["noise_sd"])
    # fewer ranks than any that was measured can only be faster
    base = params["base"]["nodes"] * params["base"]["devices_per_node"]
    fewer = np.log2(np.maximum(base / (nodes * devices_per_node), 1.0))
    down = np.hypot(own, half * spread["fewer_sd"] * fewer)
    with np.errstate(over="ignore"):
        lower = value * np.exp(-np.hypot(down, np.log(value / low)))
        upper = value * np.exp(np.hypot(own, np.log(high / value)))
    return value, lower, upper


def step_seconds(
    params: Mapping[str, Any],
    setup: Sequence[Array],
    *,
    bandwidth_bytes_per_s: float | None = None,
    latency_s: float | None = None,
    gradient_compression: str | None = None,
) -> Array:
    """The value of `step_time` alone, in a third of its time; `setup` as in `step_values`."""
    params = _as_asked(params, bandwidth_bytes_per_s, latency_s, gradient_compression, None)
    (value,), _, _ = step_values(params, setup, (np.ones(len(setup[0])),))
    return value


def _as_asked(
    params: Mapping[str, Any],
    bandwidth_bytes_per_s: float | None,
    latency_s: float | None,
    gradient_compression: str | None,
    bucket_bytes: float | None,
) -> Mapping[str, Any]:
    """With the stated link and the stated way to synchronise."""
    if bandwidth_bytes_per_s is not None or latency_s is not None:
        params = with_link(params, bandwidth_bytes_per_s, latency_s)
    if gradient_compression is not None or bucket_bytes is not None:
        params = with_options(params, gradient_compression, bucket_bytes)
    return params


def is_extrapolated(
    params: Mapping[str, Any], local_batch_size: Array, nodes: Array, devices_per_node: Array
) -> NDArray[np.bool_]:
    """Outside the sizes measured on so many ranks or more, or outside the counts of ranks."""
    known = params["range"]
    setups = np.asarray(known["setups"], float)
    ranks = nodes * devices_per_node
    counts = setups[:, 0] * setups[:, 1]
    enough = counts[None, :] >= np.minimum(ranks, counts.max())[:, None]
    smallest = np.where(enough, setups[None, :, 2], np.inf).min(axis=1)
    largest = np.where(enough, setups[None, :, 3], 0.0).max(axis=1)
    return np.asarray(
        (local_batch_size < smallest)
        | (local_batch_size > largest)
        | (nodes > known["most_nodes"])
        | (devices_per_node > known["most_devices_per_node"])
        | (ranks > known["largest_world_size"])
        | (ranks < known["smallest_world_size"])
    )
