"""Peak memory of a rank against the local batch size. Numpy only: shipped with registered models.

    peak(b, n) = convex(b) + (copy - shared (n - 1) / n) [n > 1]

`convex` joins the measured points; past the largest it goes on at the last slope, times the bend
that small probes cannot have seen. `copy` is DDP's bucket copy of the gradients, and `shared` is
nothing. Under FSDP `shared` are parameters, gradients and optimizer state, of which each rank
holds its n-th part, and `copy` the largest block, which is whole while it computes. Bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .formulas import normal_quantile

Array = NDArray[np.float64]

UNVERIFIED_LIMIT = 4.0
"""Past this many times the largest batch size that ran, nothing fits before it is run."""
FITS_LEVEL = 0.9
"""A size that was not run fits where the upper end of this interval does."""

OK, OOM, FAILED = "ok", "oom", "failed"
OK_ELSEWHERE, OOM_ELSEWHERE, FAILED_ELSEWHERE = "ok elsewhere", "oom elsewhere", "failed elsewhere"
STATES = (FAILED_ELSEWHERE, OK_ELSEWHERE, OOM_ELSEWHERE, FAILED, OK, OOM)
"""What a probe says of its size; a later one wins over an earlier one."""


def batch_peak(params: Mapping[str, Any], batch: Array) -> Array:
    """Bytes of one rank on its own: through the measured points, straight on beyond them."""
    known = np.asarray(params["batch_sizes"], float)
    peaks = np.asarray(params["peak_bytes"], float)
    slope, bend = params["slope_bytes"], params["bend_batch_size"]
    beyond = np.maximum(batch - known[-1], 0.0) * slope
    beyond += np.maximum(batch - max(bend, known[-1]), 0.0) * slope * (params["bend_factor"] - 1)
    below = np.maximum(known[0] - batch, 0.0) * params["first_slope_bytes"]
    return np.asarray(np.interp(batch, known, peaks) + beyond - below)


def neighbours(known: Array, batch: Array) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Indices of the measured sizes at or below, and at or above, each batch size."""
    last = len(known) - 1
    below = np.clip(np.searchsorted(known, batch, side="right") - 1, 0, last)
    return below, np.clip(np.searchsorted(known, batch), 0, last)


def spread(params: Mapping[str, Any], batch: Array) -> tuple[Array, Array]:
    """Relative standard deviations below and above the value, growing with each doubling.

    Upwards more than downwards: the allocator and the choice of workspace jump up (VGG11 on an
    A100: from 5,567 to 10,467 MiB between 32 and 64).
    """
    known = np.asarray(params["batch_sizes"], float)
    below, above = neighbours(known, batch)
    # nothing at a probe; between two of them most in the middle
    inside = np.minimum(
        np.abs(np.log2(known[above] / batch)), np.abs(np.log2(batch / known[below]))
    )
    outside = np.log2(np.maximum(batch / known[-1], known[0] / batch))
    steps = np.maximum(outside, inside)
    base = params["relative_sd"]
    return base + params["down_sd"] * steps, base + params["up_sd"] * steps


def peak_memory(
    params: Mapping[str, Any], local_batch_size: Array, world_size: Array, level: float = 0.9
) -> tuple[Array, Array, Array]:
    """Peak bytes of a rank with its interval; NaN where memory was never measured."""
    batch = np.asarray(local_batch_size, float)
    if not params["batch_sizes"]:
        unknown = np.full(batch.shape, np.nan)
        return unknown, unknown.copy(), unknown.copy()
    alone = batch_peak(params, batch)
    half = normal_quantile(0.5 + level / 2)
    down, up = spread(params, batch)
    lower, upper = _bounds(params, batch, alone, level)
    lower = np.minimum(lower, alone * np.exp(-half * down))
    upper = np.maximum(upper, alone * np.exp(half * up))
    if params["identified"] and np.all(np.diff(params["peak_bytes"]) >= 0):
        floor, ceiling = _neighbouring_peaks(params, batch)
        lower = np.maximum(lower, np.minimum(floor * np.exp(-half * params["relative_sd"]), alone))
        upper = np.minimum(upper, np.maximum(ceiling * np.exp(half * params["relative_sd"]), alone))
    copy, doubt = params["copy_bytes"], half * params["copy_sd_bytes"]
    many = np.asarray(world_size) > 1
    saved = saved_bytes(params, world_size)
    lower = np.maximum(lower + many * max(copy - doubt, 0.0) - saved, many * copy)
    value = np.maximum(alone + many * copy - saved, many * copy)
    return value, np.minimum(lower, value), np.maximum(upper + many * (copy + doubt) - saved, value)


def saved_bytes(params: Mapping[str, Any], world_size: Array) -> Array:
    """What a rank need not hold since FSDP's ranks share it; nothing under DDP."""
    ranks = np.asarray(world_size, float)
    return np.asarray(float(params.get("shared_bytes", 0.0)) * (1.0 - 1.0 / ranks))


def _neighbouring_peaks(params: Mapping[str, Any], batch: Array) -> tuple[Array, Array]:
    """Peaks of the next smaller and the next larger probe: readings that rise stay between."""
    known, peaks = (np.asarray(params[name], float) for name in ("batch_sizes", "peak_bytes"))
    below, above = neighbours(known, batch)
    return (
        np.where(batch < known[0], 0.0, peaks[below]),
        np.where(batch > known[-1], np.inf, peaks[above]),
    )


def _bounds(
    params: Mapping[str, Any], batch: Array, alone: Array, level: float
) -> tuple[Array, Array]:
    """Bounds that hold where the spread over doublings does not: no slope, or falling readings."""
    known, peaks = (np.asarray(params[name], float) for name in ("batch_sizes", "peak_bytes"))
    low, high = alone, alone
    if np.any(np.diff(peaks) < 0):
        below, above = neighbours(known, batch)
        high = np.maximum(high, np.maximum(peaks[below], peaks[above]))
    if not params["identified"]:
        # from "the batch takes nothing" to "the batch takes all of it"
        alike = np.interp(batch, known, peaks)
        scaled = alike * np.maximum(batch / known[-1], 1.0) * np.minimum(batch / known[0], 1.0)
        share = min(1.0, level / FITS_LEVEL)
        low = low + share * (np.minimum(alike, scaled) - alone)
        high = high + share * (np.maximum(alike, scaled) - alone)
    return np.minimum(low, alone), np.maximum(high, alone)


def feasible(
    params: Mapping[str, Any],
    local_batch_size: Array,
    world_size: Array,
    memory_limit_bytes: float | None = None,
    devices_per_node: Array | int = 1,
) -> tuple[NDArray[np.bool_], NDArray[np.object_]]:
    """Whether each (local batch size, world size) runs within the limit of a rank, and why.

    A map, not a threshold: what was run decides for itself, and a size that was not run is never
    inferred from its neighbours where one of them ran out of memory. Without a limit it is the
    memory of the device the table was measured on; a CPU's is shared by the node's ranks.
    """
    batch = np.asarray(local_batch_size, float)
    ranks = np.broadcast_to(np.asarray(world_size, float), batch.shape)
    if not params.get("shared_bytes"):
        ranks = np.minimum(ranks, 2.0)  # one alone or several: DDP's map knows no more
    limit = np.full(batch.shape, memory_limit_bytes or params["limit_bytes"], float)
    if memory_limit_bytes is None and params["limit_is_shared"]:
        limit = limit / np.asarray(devices_per_node, float)
    # a limit of no less than the device's is what every row that ran has met already
    stated = memory_limit_bytes is not None and memory_limit_bytes < params["limit_bytes"]
    fits = np.zeros(batch.shape, bool)
    reason = np.empty(batch.shape, object)
    for count in np.unique(ranks):
        rows = ranks == count
        fits[rows], reason[rows] = _feasible_here(params, batch[rows], count, limit[rows], stated)
    return fits, reason


def _feasible_here(
    params: Mapping[str, Any], batch: Array, ranks: float, limit: Array, stated: bool
) -> tuple[NDArray[np.bool_], NDArray[np.object_]]:
    """The verdicts for one rank alone, or for several: two maps that differ by DDP's copy.

    Under FSDP every number of ranks has a map of its own.
    """
    known, state, peaks = _map(params, ranks)
    value, _, upper = peak_memory(params, batch, np.full(batch.shape, ranks), FITS_LEVEL)
    here = np.isin(batch, known)
    at = np.where(here, np.searchsorted(known, batch), -1)
    found = np.where(here, np.append(state, "")[at], "")
    peak = np.where(here, np.append(peaks, np.nan)[at], np.nan)
    peak = np.where(np.isnan(peak), value, peak)

    neighbour = np.isin(state, [OK, OOM, OK_ELSEWHERE, OOM_ELSEWHERE])
    sizes, states = known[neighbour], state[neighbour]
    out = np.isin(states, [OOM, OOM_ELSEWHERE])
    largest = max([*sizes[~out], params.get("counted_batch_size", 0.0)])
    below = np.maximum(np.searchsorted(sizes, batch) - 1, 0)
    beside_out = np.append(out, False)[below]
    effective = np.fmin(limit, _shown_limit(params, batch))
    jump = np.where(batch > largest, params["jump"] * value, value) <= effective

    ran = found == OK
    rules: list[tuple[NDArray[np.bool_], bool, str]] = [
        (found == OOM, False, "ran out of memory when measured"),
        (ran & (not stated), True, "was run"),
        (ran & np.isnan(peak), False, "was run, but its memory was not measured"),
        (ran & (peak <= limit), True, "was run, within the limit"),
        (ran, False, "was run, and took more than the limit"),
        (found == FAILED, False, "failed when measured"),
        (found == OOM_ELSEWHERE, False, "ran out of memory on another number of devices"),
        (np.full(batch.shape, largest == 0), False, "no batch size has run yet"),
        (batch > UNVERIFIED_LIMIT * largest, False, "beyond 4x the largest that ran: run it once"),
        (beside_out, False, "a neighbouring batch size ran out of memory: run it once"),
        (
            np.isnan(value) & (batch <= largest) & (not stated),
            True,
            "memory was not measured, but a larger batch size ran",
        ),
        (np.isnan(value), False, "memory was not measured: run it once"),
        ((upper <= effective) & jump, True, "the interval's upper end is within the limit"),
        (upper <= effective, False, "within the limit unless memory jumps: run it once"),
        (value <= effective, False, "predicted within the limit, but not surely: run it once"),
    ]
    conditions = [rule[0] for rule in rules]
    fits = np.select(conditions, [rule[1] for rule in rules], False)
    reason = np.select(conditions, [rule[2] for rule in rules], "predicted above the limit")
    return fits.astype(bool), reason.astype(object)


def _shown_limit(params: Mapping[str, Any], batch: Array) -> Array:
    """Where larger sizes that ran out show the limit to be, whatever the nominal one.

    No less than the largest peak that ran: a size that ran out below it did so by its workspace.
    """
    out = sorted(
        (float(probe["local_batch_size"]), float(probe["world_size"]))
        for probe in params["probes"]
        if probe["status"] == OOM
    )
    if not out or not params["batch_sizes"]:
        return np.full(batch.shape, np.inf)
    sizes, worlds = np.array(out).T
    bound = peak_memory(params, sizes, worlds)[0]
    bound = np.append(np.minimum.accumulate(bound[::-1])[::-1], np.inf)
    ran = [probe["peak_bytes"] or 0.0 for probe in params["probes"] if probe["status"] == OK]
    return np.maximum(bound[np.searchsorted(sizes, batch)], max(ran, default=0.0))


def _map(params: Mapping[str, Any], ranks: float) -> tuple[Array, NDArray[np.str_], Array]:
    """Sizes that were run, in order, with what became of them and their largest peak.

    One rank and several are two maps; where only the other one knows a size, it speaks. Under
    FSDP more ranks take less memory each: what ran on fewer runs, what ran out on more runs out,
    and nothing else is told by another number.
    """
    states: dict[float, str] = {}
    peaks: dict[float, float] = {}
    sharded = bool(params.get("shared_bytes"))

    def here(probe: Mapping[str, Any]) -> bool:
        if sharded:
            return bool(probe["world_size"] == ranks)
        return bool((probe["world_size"] > 1) == (ranks > 1))

    for probe in sorted(params["probes"], key=here):
        size, status = float(probe["local_batch_size"]), probe["status"]
        if not here(probe):
            fewer = probe["world_size"] < ranks
            if sharded and status != FAILED and (status == OK) != fewer:
                continue
            status = {OK: OK_ELSEWHERE, OOM: OOM_ELSEWHERE}.get(status, FAILED_ELSEWHERE)
        elif probe["peak_bytes"] is not None:
            peaks[size] = max(peaks.get(size, 0.0), float(probe["peak_bytes"]))
        states[size] = max(states.get(size, status), status, key=STATES.index)
    sizes = sorted(states)
    return (
        np.array(sizes),
        np.array([states[size] for size in sizes], dtype="<U16"),
        np.array([peaks.get(size, np.nan) for size in sizes]),
    )
