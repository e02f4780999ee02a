"""Peak memory of a rank against the local batch size. Numpy only: shipped with registered models.

    peak(b, n) = convex(b) + copy [n > 1]

`convex` joins the measured points; past the largest it goes on at the last slope, times the bend
that small probes cannot have seen. `copy` is DDP's bucket copy of the gradients. Bytes.
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
    copy, doubt = params["copy_bytes"], half * params["copy_sd_bytes"]
    many = np.asarray(world_size) > 1
    lower = lower + many * max(copy - doubt, 0.0)
    return alone + many * copy, lower, upper + many * (copy + doubt)


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
    world = np.broadcast_to(np.asarray(world_size, float), batch.shape)
    limit = np.full(batch.shape, memory_limit_bytes or params["limit_bytes"], float)
    if memory_limit_bytes is None and params["limit_is_shared"]:
        limit = limit / np.asarray(devices_per_node, float)
    value, _, upper = peak_memory(params, batch, world, FITS_LEVEL)
    pairs = np.c_[batch, world, limit, value, upper]
    unique, back = np.unique(pairs, axis=0, return_inverse=True)
    stated = memory_limit_bytes is not None and memory_limit_bytes < params["limit_bytes"]
    answers = [_feasible_one(params, row, stated) for row in unique.tolist()]
    back = back.reshape(-1)
    fits = np.array([answer[0] for answer in answers], bool)[back]
    return fits, np.array([answer[1] for answer in answers], object)[back]


def _feasible_one(params: Mapping[str, Any], row: list[float], stated: bool) -> tuple[bool, str]:
    """The verdict for one configuration: batch, world size, limit, peak, its upper end."""
    batch, world, limit, value, _ = row
    same = [probe for probe in params["probes"] if (probe["world_size"] > 1) == (world > 1)]
    verdict = _measured([p for p in same if p["local_batch_size"] == batch], limit, value, stated)
    if verdict is not None:
        return verdict
    ran = {p["local_batch_size"] for p in params["probes"] if p["status"] == "ok"}
    out = {p["local_batch_size"] for p in params["probes"] if p["status"] == "oom"}
    # one device and several are two maps; where only the other one knows a size, it speaks
    out -= {p["local_batch_size"] for p in same if p["status"] == "ok"} - {
        p["local_batch_size"] for p in same if p["status"] == "oom"
    }
    if batch in out:
        return False, "ran out of memory at this local batch size on another number of devices"
    if not ran:
        return False, "no batch size has run yet"
    if batch > UNVERIFIED_LIMIT * max(ran):
        return False, f"beyond 4x the largest batch size that ran ({max(ran):g}): run it to verify"
    below = [size for size in {*out, *ran} if size < batch]
    neighbour = max(below) if below else min({*out, *ran})
    if neighbour in out:
        return False, f"its neighbour, batch size {neighbour:g}, ran out of memory: run it"
    if value != value:
        if batch <= max(ran) and not stated:
            return True, "memory was not measured, but a larger batch size ran"
        return False, "memory was not measured: run it, or measure peak_memory_bytes"
    return _predicted(params, [size for size in out if size > batch], row)


def _measured(here: list[Any], limit: float, value: float, stated: bool) -> tuple[bool, str] | None:
    """The verdict of the probes of this very configuration, or None without any."""
    if any(probe["status"] == "oom" for probe in here):
        return False, "ran out of memory when measured"
    ran = [probe for probe in here if probe["status"] == "ok"]
    if ran and not stated:
        return True, "was run"
    if ran:
        peaks = [probe["peak_bytes"] for probe in ran if probe["peak_bytes"] is not None]
        peak = max(peaks) if peaks else value
        if peak != peak:
            return False, "was run, but its memory was not measured against this limit"
        if peak <= limit:
            return True, "was run, within the limit"
        return False, f"was run and took {peak / 1e9:.2f} GB, above the limit"
    if here:
        return False, f"the probe failed: {here[0]['reason'] or 'no reason known'}"
    return None


def _predicted(
    params: Mapping[str, Any], larger: list[float], row: list[float]
) -> tuple[bool, str]:
    """The verdict of the interval, against the limit and against what ran out of memory."""
    _, world, limit, value, upper = row
    if larger:
        # a larger size that ran out shows where the limit really lies, whatever the nominal one
        sizes = np.array(larger)
        failed = peak_memory(params, sizes, np.full(sizes.shape, world))[0].min()
        limit = min(limit, float(failed))
    if upper <= limit:
        return True, "the interval's upper end is within the limit"
    if value <= limit:
        return False, "predicted within the limit, but not surely: run it to verify"
    return False, f"predicted to take {value / 1e9:.2f} GB, above the limit"
