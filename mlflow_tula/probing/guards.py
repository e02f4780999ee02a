"""What a probe will take, said before it is begun."""

from __future__ import annotations

import math
from collections.abc import Callable

import psutil

from mlflow_tula.probes import Probe, expected_probe_time_s
from mlflow_tula.probing.settings import ProbeSettings
from mlflow_tula.specs import HardwareSpec
from mlflow_tula.table import Measurement, ProfileTable

CPU_MEMORY_SHARE = 0.9
"""Of the memory that is available when a sweep begins, so much is the ranks'."""
ESTIMATE_FACTOR = 1.5
"""A process grows by up to twice what its tensors take (seen with VGG11, docs/method.md)."""
CPU_BASE_BYTES = 7e8
"""What a rank's process holds without a model on a CPU: torch, its threads, small datasets."""
_EXTRA_STEPS = 1.5
"""Evaluation and gradient passes of a short probe, in steps."""


def default_memory_limit(hardware: HardwareSpec, world_size: int) -> int:
    """Bytes that a rank may hold: a device's memory; on a CPU the ranks share what is available."""
    if hardware.device_type != "cpu":
        return hardware.device_memory_bytes
    available = min(hardware.device_memory_bytes, psutil.virtual_memory().available)
    return int(CPU_MEMORY_SHARE * available / world_size)


def expected_seconds(table: ProfileTable, probe: Probe, settings: ProbeSettings) -> float:
    """Duration of a probe from the rows so far, never less than its least number of steps."""
    expected = expected_probe_time_s(table, probe)
    rows = [row for row in table.ok if row.world_size == probe.world_size] or list(table.ok)
    if not rows:
        return expected
    nearest = min(rows, key=lambda row: abs(row.local_batch_size - probe.local_batch_size))
    ratio = probe.local_batch_size / nearest.local_batch_size
    step = float(nearest.step_time_s or 0.0) / nearest.accumulation_steps
    # A floor bends small batches: halving the batch never halves the time, doubling it may.
    step *= probe.accumulation_steps * (ratio if ratio > 1 else max(ratio, 0.5))
    least = settings.warmup_steps + settings.min_steps + _EXTRA_STEPS
    return max(expected, least * step)


def expected_peak_bytes(
    table: ProfileTable,
    probe: Probe,
    estimate: Callable[[int], int | None],
    limit_bytes: float = math.inf,
) -> int | None:
    """Peak bytes of a rank, or None where nothing is known.

    A line through the two largest sizes measured at this world size. With one size measured, its
    peak plus ESTIMATE_FACTOR times what the estimate adds; with none, ESTIMATE_FACTOR times the
    estimate and what a process holds without a model: a sweep shall not begin by running out. Where
    not even a batch of one would pass by that rule, the bare estimate, a lower bound.

    Args:
        table: rows so far.
        probe: what is to be measured.
        estimate: bytes of a step by counting, where that is possible.
        limit_bytes: what a rank may hold.
    """
    rows = {
        row.local_batch_size: row
        for row in table.ok
        if row.world_size == probe.world_size and row.peak_memory_bytes is not None
    }
    size = probe.local_batch_size
    largest = [rows[key] for key in sorted(rows)[-2:]]
    if len(largest) == 2:
        low, high = (float(_peak(row)) for row in largest)
        slope = (high - low) / (largest[1].local_batch_size - largest[0].local_batch_size)
        beyond = max(size - largest[1].local_batch_size, 0)
        return int(high + max(slope, 0.0) * beyond)
    estimated = estimate(size)
    if estimated is None:
        return None
    if not largest:
        base = _unmeasured_base(table.hardware)
        if base + ESTIMATE_FACTOR * (estimate(1) or 0) > limit_bytes:
            return estimated
        return int(base + ESTIMATE_FACTOR * estimated)
    growth = max(estimated - (largest[0].allocated_memory_bytes or 0), 0)
    return int(_peak(largest[0]) + ESTIMATE_FACTOR * growth)


def _unmeasured_base(hardware: HardwareSpec) -> float:
    """Bytes that count against the limit before a model exists."""
    return CPU_BASE_BYTES if hardware.device_type == "cpu" else 0.0


def _peak(row: Measurement) -> int:
    assert row.peak_memory_bytes is not None, "rows without it were left out"
    return row.peak_memory_bytes


def gigabytes(size: int) -> str:
    """Bytes for a message."""
    return f"{size / 1e9:.2f} GB"
