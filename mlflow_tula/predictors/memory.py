"""Peak memory: fitted to the measured peaks, with the map of what ran and what did not.

The equation and the rules of feasibility stand in memory_formulas.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mlflow_tula.errors import SchemaError, TooFewProbesWarning
from mlflow_tula.predictors import memory_formulas as formulas
from mlflow_tula.predictors.memory_copy import copies_beyond, counted_copy
from mlflow_tula.specs import Spec, check_real
from mlflow_tula.table import Measurement, ProfileTable

Array = NDArray[np.float64]

FLAT = 0.005
"""Growth over all probes, a fraction, below which the batch's own bytes are not identified."""
BEND_BATCH_SIZE = 32
"""Peaks of smaller batches come late in backward, of larger ones early: the slope rises there."""
BEND_FACTOR = 1.3
"""By how much it rises (VGG11 at 32x32: 0.83 MB a sample below, 1.15 above; docs/method.md)."""
REPEAT_SD = 0.005
"""Relative spread of repeated readings where there are none (counted as two readings)."""
RESIDENT_SD = 0.015
"""The same on a CPU, where a process's resident peak is read, not an allocator's counter."""
DOWN_SD, UP_SD = 0.05, 0.05
"""Relative error per doubling beyond the probes, downwards and upwards (jumps of workspace)."""
PRIOR_STEPS = 8.0
"""How many left-out sizes that prior error is worth."""
JUMP = 1.4
"""Room beyond the probes for one more choice of workspace (VGG11 on an A100: 1.4 times the line);
a CPU makes none."""
COPY_SPREAD = 0.4
"""Relative spread of a copy that was counted, not measured."""
UNKNOWN_SHARE = 0.5
"""Share of a single reading that is taken to grow with the batch; its interval is all of it."""
UNKNOWN_COPY = 0.25
"""Gradients as a share of the static bytes where the parameters were not counted: of weights,
gradients, momentum and context."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryProbe(Spec):
    """One measured configuration of the map; `peak_bytes` is None where it was not measured."""

    local_batch_size: int
    world_size: int
    status: str
    peak_bytes: int | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPredictor:
    """Peak bytes of a rank against the local batch size, and the map of feasibility.

        peak(b, n) = convex(b) + (copy - shared (n - 1) / n) [n > 1]

    convex: straight lines through `batch_sizes`, `peak_bytes`; past the largest `slope_bytes` a
    sample, times `bend_factor` past `bend_batch_size`. copy: `copy_bytes` of gradients, DDP's
    buckets, or FSDP's largest block. shared: `shared_bytes` that FSDP's ranks share, 0 under DDP.
    `identified` is False where the readings are flat or there is one size only: then
    the interval runs from "the batch takes nothing" to "it takes all". Valid up to 4x the
    largest batch size that ran (or `counted_batch_size`, of a model that never ran here); further
    out nothing is said to fit.
    """

    batch_sizes: tuple[float, ...]
    peak_bytes: tuple[float, ...]
    slope_bytes: float = 0.0
    first_slope_bytes: float = 0.0
    bend_batch_size: float = 0.0
    bend_factor: float = 1.0
    identified: bool = False
    relative_sd: float = REPEAT_SD
    down_sd: float = DOWN_SD
    up_sd: float = UP_SD
    jump: float = 1.0
    copy_bytes: float = 0.0
    copy_sd_bytes: float = 0.0
    shared_bytes: float = 0.0
    counted_batch_size: float = 0.0
    limit_bytes: float
    limit_is_shared: bool = False
    probes: tuple[MemoryProbe, ...] = ()
    form: str = ""
    leave_one_out_mape: float | None = None
    warnings: tuple[str, ...] = ()

    @classmethod
    def fit(
        cls,
        table: ProfileTable,
        *,
        static_bytes_hint: float | None = None,
        activation_bytes_hint: float | None = None,
    ) -> Self:
        """Fit the peaks of a table's ok rows; rows out of memory enter the map.

        Args:
            table: the measurements.
            static_bytes_hint: bytes that no batch changes, from a count on fake tensors.
            activation_bytes_hint: bytes a sample, likewise; both are used only where the readings
                cannot tell.
        """
        for name, hint in (
            ("static_bytes_hint", static_bytes_hint),
            ("activation_bytes_hint", activation_bytes_hint),
        ):
            if hint is not None:
                check_real(name, hint)
        sizes, peaks, copy = _points(table)
        curve = _curve(sizes, peaks, static_bytes_hint, activation_bytes_hint)
        notes = _notes(table, sizes, bool(curve["identified"]))
        for text in notes:
            warnings.warn(text, TooFewProbesWarning, stacklevel=2)
        return cls(
            **curve,
            **_copy(table, copy, sizes, peaks, float(curve["slope_bytes"])),
            **_errors(table, sizes, peaks),
            jump=1.0 if table.hardware.device_type == "cpu" else JUMP,
            shared_bytes=float(table.workload.sharded_bytes),
            limit_bytes=float(table.hardware.device_memory_bytes),
            limit_is_shared=table.hardware.device_type == "cpu",
            probes=tuple(probe_of(row) for row in table.measurements),
            warnings=tuple(notes),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        data = dataclasses.asdict(self)
        for name in ("counted_batch_size", "shared_bytes"):
            if not data[name]:
                del data[name]
        return {key: list(item) if isinstance(item, tuple) else item for key, item in data.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; checked, SchemaError names what is wrong."""
        if not isinstance(data, Mapping):
            raise SchemaError(f"memory must be a JSON object, not {type(data).__name__}")
        fields = dict(data)
        try:
            for name in ("batch_sizes", "peak_bytes"):
                fields[name] = tuple(float(value) for value in fields[name])
            fields["probes"] = tuple(MemoryProbe.from_dict(one) for one in fields.get("probes", ()))
            fields["warnings"] = tuple(str(text) for text in fields.get("warnings", ()))
            fields.setdefault("counted_batch_size", 0.0)
            fields.setdefault("shared_bytes", 0.0)
            for name in _NUMBERS:
                fields[name] = float(fields[name])
            made = cls(**fields)
            numbers = (*made.batch_sizes, *made.peak_bytes, *(fields[name] for name in _NUMBERS))
            usable = all(math.isfinite(number) and number >= 0 for number in numbers)
        except (TypeError, ValueError, KeyError) as error:
            raise SchemaError(f"memory is damaged: {error}") from error
        rising = all(a < b for a, b in itertools.pairwise(made.batch_sizes))
        if not usable or not rising or len(made.batch_sizes) != len(made.peak_bytes):
            raise SchemaError("memory is damaged: batch_sizes and peak_bytes do not go together")
        return made


_NUMBERS = (
    "slope_bytes",
    "first_slope_bytes",
    "bend_batch_size",
    "bend_factor",
    "relative_sd",
    "down_sd",
    "up_sd",
    "jump",
    "copy_bytes",
    "copy_sd_bytes",
    "counted_batch_size",
    "limit_bytes",
)


def fit(
    table: ProfileTable,
    *,
    static_bytes_hint: float | None = None,
    activation_bytes_hint: float | None = None,
) -> MemoryPredictor:
    """`MemoryPredictor.fit`, as the other predictors offer it."""
    return MemoryPredictor.fit(
        table, static_bytes_hint=static_bytes_hint, activation_bytes_hint=activation_bytes_hint
    )


def probe_of(row: Measurement) -> MemoryProbe:
    """A row of the table as a point of the map."""
    return MemoryProbe(
        local_batch_size=row.local_batch_size,
        world_size=row.world_size,
        status=row.status,
        peak_bytes=row.peak_memory_bytes or None,
        reason=row.reason[:200],
    )


def _readings(table: ProfileTable, many: bool) -> dict[int, list[int]]:
    """Peaks by local batch size, of one rank (`many` False) or of several. Zero is no reading.

    What FSDP's ranks share is added back, so that all numbers of ranks can be compared.
    """
    found: dict[int, list[int]] = {}
    shared = {"shared_bytes": table.workload.sharded_bytes}
    for row in table.ok:
        if row.peak_memory_bytes and (row.world_size > 1) == many:
            saved = int(formulas.saved_bytes(shared, np.array(row.world_size)))
            found.setdefault(row.local_batch_size, []).append(row.peak_memory_bytes + saved)
    return found


def _points(table: ProfileTable) -> tuple[Array, Array, Array]:
    """Measured (sizes, peaks) of one rank alone, the largest of repeats, and measured copies."""
    alone = {size: max(seen) for size, seen in _readings(table, False).items()}
    many = {size: max(seen) for size, seen in _readings(table, True).items()}
    points = {size: float(peak) for size, peak in sorted(alone.items())}
    shared = [size for size in many if points and min(points) <= size <= max(points)]
    copies = np.array([many[size] for size in shared], float)
    if shared:
        copies -= np.interp(shared, list(points), list(points.values()))
    elif points:
        copies = copies_beyond(points, many, counted_copy(table))
    copy = max(float(np.median(copies)), 0.0) if len(copies) else counted_copy(table) or 0.0
    for size in set(many) - set(shared):
        # never less than half of what was seen: the copy may be a guess
        points[size] = max(many[size] - copy, 0.5 * many[size])
    sizes = sorted(points)
    return np.array(sizes, float), np.array([points[size] for size in sizes]), copies


def _copy(
    table: ProfileTable, copies: Array, sizes: Array, peaks: Array, slope: float
) -> dict[str, Any]:
    """DDP's bucket copy: measured, counted, or guessed from the static bytes."""
    if len(copies):
        copy = max(float(np.median(copies)), 0.0)
        return {"copy_bytes": copy, "copy_sd_bytes": float(np.std(copies)) + 0.05 * copy}
    counted = counted_copy(table)
    if counted is not None:
        return {"copy_bytes": counted, "copy_sd_bytes": COPY_SPREAD * counted}
    only_many = not _readings(table, False)
    if not len(sizes) or only_many:
        return {"copy_bytes": 0.0, "copy_sd_bytes": 0.0}
    copy = UNKNOWN_COPY * max(float(peaks[0] - slope * sizes[0]), 0.0)
    return {"copy_bytes": copy, "copy_sd_bytes": 0.6 * copy}


def _curve(
    sizes: Array, peaks: Array, static_hint: float | None, activation_hint: float | None
) -> dict[str, Any]:
    """The points and how they go on at both ends."""
    fields: dict[str, Any] = {
        "batch_sizes": tuple(sizes.tolist()),
        "peak_bytes": tuple(peaks.tolist()),
        "bend_batch_size": 0.0,
        "bend_factor": 1.0,
    }
    if not len(sizes):
        return {**fields, "identified": False, "slope_bytes": 0.0, "form": "not measured"}
    last = float(sizes[-1])
    slope = _last_slope(sizes, peaks)
    identified = slope * (last - sizes[0]) > FLAT * peaks[-1]
    if not identified:
        guess = max(slope, 0.0) if len(sizes) > 1 else UNKNOWN_SHARE * float(peaks[-1]) / last
        slope = _hinted_slope(last, float(peaks[-1]), guess, static_hint, activation_hint)
        return {
            **fields,
            "identified": activation_hint is not None,
            "slope_bytes": slope,
            "first_slope_bytes": min(slope, float(peaks[0] / sizes[0])),
            "form": "one size" if len(sizes) == 1 else "flat readings",
        }
    first = float((peaks[1] - peaks[0]) / (sizes[1] - sizes[0]))
    factor = _bend(sizes, peaks)
    return {
        **fields,
        "identified": True,
        "slope_bytes": slope,
        "first_slope_bytes": min(max(first, 0.0), float(peaks[0] / sizes[0])),
        "bend_batch_size": float(min(2 * last, BEND_BATCH_SIZE)),
        "bend_factor": factor,
        "form": "piecewise line" + (", bend expected beyond" if factor > 1.0 else ""),
    }


def _bend(sizes: Array, peaks: Array) -> float:
    """By how much the slope is still to rise: the usual bend, less what the probes show of it."""
    if sizes[-1] >= BEND_BATCH_SIZE:
        return 1.0
    growth = np.diff(peaks)
    # a flat start is the floor of static bytes, not a slope
    slopes = (growth / np.diff(sizes))[growth > FLAT * peaks[1:]]
    seen = float(slopes[-1] / slopes[0]) if len(slopes) else 1.0
    return min(max(BEND_FACTOR / seen, 1.0), BEND_FACTOR)


def _last_slope(sizes: Array, peaks: Array) -> float:
    """Bytes a sample past the largest probe: its chords to the others, near ones counting more.

    A chord to a very near size carries the allocator's rounding only, one to a small size the
    other side of the bend: the weight r^2 (1 - r) of the size ratio r is largest between.
    """
    if len(sizes) < 2:
        return 0.0
    chords = (peaks[-1] - peaks[:-1]) / (sizes[-1] - sizes[:-1])
    ratio = sizes[:-1] / sizes[-1]
    return float(np.average(chords, weights=ratio**2 * (1.0 - ratio)))


def _hinted_slope(
    last: float, peak: float, guess: float, static: float | None, activation: float | None
) -> float:
    """Bytes a sample where the readings do not tell: counted, else the guess."""
    if activation is not None:
        return activation
    if static is not None and static < peak:
        return (peak - static) / last
    return guess


def _errors(table: ProfileTable, sizes: Array, peaks: Array) -> dict[str, Any]:
    """Spread of repeats, and of sizes predicted from the smaller ones, shrunk to the priors."""
    usual = RESIDENT_SD if table.hardware.device_type == "cpu" else REPEAT_SD
    squares, count = 2 * usual**2, 2.0
    for many in (False, True):
        for seen in _readings(table, many).values():
            squares += float(np.sum(np.log(np.array(seen) / np.mean(seen)) ** 2))
            count += len(seen) - 1
    down, up, steps = PRIOR_STEPS * DOWN_SD**2, PRIOR_STEPS * UP_SD**2, PRIOR_STEPS
    # readings that fall from one size to the next tell of noise: their difference has it twice
    falls = np.maximum(np.log(peaks[:-1] / peaks[1:]), 0.0) if len(peaks) else np.zeros(0)
    if falls.any():
        squares, count = squares + float(falls @ falls) / 2, count + len(falls)
    for index in range(2, len(sizes)):
        params = _curve(sizes[:index], peaks[:index], None, None)
        if not params["identified"]:
            continue
        guess = formulas.batch_peak(params, sizes[index : index + 1])[0]
        error = math.log(peaks[index] / guess) / max(
            math.log2(sizes[index] / sizes[index - 1]), 0.5
        )
        up += error**2 if error > 0 else 0.0
        down += error**2 if error < 0 else 0.0
        steps += 1
    return {
        "relative_sd": math.sqrt(squares / count),
        "down_sd": math.sqrt(down / steps),
        "up_sd": math.sqrt(up / steps),
        "leave_one_out_mape": _leave_one_out(sizes, peaks),
    }


def _leave_one_out(sizes: Array, peaks: Array) -> float | None:
    """Mean absolute error, a fraction, of each size predicted from the others."""
    if len(sizes) < 3:
        return None
    errors = []
    for index in range(len(sizes)):
        rest = np.arange(len(sizes)) != index
        params = _curve(sizes[rest], peaks[rest], None, None)
        guess = formulas.batch_peak(params, sizes[index : index + 1])[0]
        errors.append(abs(guess / peaks[index] - 1.0))
    return float(np.mean(errors))


def _notes(table: ProfileTable, sizes: Array, identified: bool) -> list[str]:
    """What a person should know about the fit."""
    zeros = sum(row.peak_memory_bytes == 0 for row in table.ok)
    notes = [f"{zeros} rows have a peak memory of 0 bytes, read as not measured"] if zeros else []
    if len(sizes) == 1:
        notes.append(
            f"memory was measured at batch size {sizes[0]:g} only: measure another, at least 2x "
            "larger"
        )
    elif len(sizes) and not identified:
        notes.append(
            f"memory does not grow from batch size {sizes[0]:g} to {sizes[-1]:g}: measure larger "
            "ones before trusting any size beyond"
        )
    return notes
