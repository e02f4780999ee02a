"""What several ranks add to one's memory: DDP's copy of the gradients, FSDP's blocks put together.

How large it is, from what was counted and what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mlflow_tula.table import ProfileTable

Array = NDArray[np.float64]

GLOO_COPIES = 1.5
"""Gradients copied on a CPU, by DDP's buckets and by gloo: between 0.5 of them (resident, where a
small batch left room) and 2 (allocated); ResNet18, two ranks, torch 2.14."""


FSDP_BLOCKS = 2.0
"""Times the largest block that a rank holds whole: its parameters and its gradient. MobileNetV3 on
2 and 4 gloo ranks held 1.0 to 2.8 of them (allocated bytes, batch 8 and 64, torch 2.14)."""


def copies_beyond(
    points: Mapping[int, float], many: Mapping[int, int], counted: float | None
) -> Array:
    """What the copy can be at most, from sizes of several ranks above all of one rank's.

    One rank's memory does not fall with the batch: a copy that was counted from the parameters and
    would make it fall is too large. The line through one rank's ends gives the other estimate.
    """
    last = max(points)
    above = [size for size in many if size > last]
    if not above or counted is None:
        return np.array([])
    first = min(points)
    slope = (points[last] - points[first]) / (last - first) if last > first else 0.0
    level = np.array([many[size] - points[last] for size in above], float)
    line = level - max(slope, 0.0) * (np.array(above) - last)
    if level.min() >= counted:
        return np.array([])
    return np.maximum([level.min(), line.min()], 0.0)


def counted_copy(table: ProfileTable) -> float | None:
    """Bytes of DDP's copy from the number of parameters, or None where it is not known.

    Under FSDP those of the largest block, which is whole while it computes.
    """
    if table.workload.strategy == "fsdp":
        block = table.workload.block_parameters
        return None if block is None else FSDP_BLOCKS * 4 * block
    if table.workload.gradient_bytes is None:
        return None
    copies = GLOO_COPIES if table.hardware.device_type == "cpu" else 1.0
    return copies * table.workload.gradient_bytes
