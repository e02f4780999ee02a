"""The links of a cluster, from an all-reduce microbenchmark: latency and bandwidth, each scope.

    time = latency log2(n) + 2 (n - 1) / n bytes / bandwidth

n: devices of a node within it, nodes between them. Fitted by non-negative relative least squares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlflow_tula.specs import Spec, check_real
from mlflow_tula.table import LinkMeasurement, LinkScope

SMALL_MESSAGE_BYTES = 2**20
"""Smaller messages ride in a shaped link's token bucket and look too fast (docs/method.md)."""
FASTEST_BYTES_PER_S = 1e15
"""Stands for "no bandwidth term was seen": JSON knows no infinity."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link(Spec):
    """Latency in seconds a doubling of the ranks, bandwidth in bytes per second.

    `relative_error` is the mean absolute relative error over the fitted messages.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    relative_error: float = 0.0

    def __post_init__(self) -> None:
        """Check every field once."""
        check_real("latency_s", self.latency_s)
        check_real("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, strict=True)
        check_real("relative_error", self.relative_error)


def fit(rows: Sequence[LinkMeasurement], scope: LinkScope) -> Link | None:
    """The link of one scope, or None without two different messages over two or more ranks."""
    from scipy.optimize import nnls

    usable = [row for row in rows if row.scope == scope and _count(row) > 1]
    large = [row for row in usable if row.message_bytes >= SMALL_MESSAGE_BYTES]
    if len({row.message_bytes for row in large}) >= 2:
        usable = large
    if len({row.message_bytes for row in usable}) < 2:
        return None
    count = np.array([_count(row) for row in usable], float)
    time = np.array([row.time_s for row in usable], float)
    bytes_ = np.array([row.message_bytes for row in usable], float)
    design = np.c_[np.log2(count), 2.0 * (count - 1.0) / count * bytes_] / time[:, None]
    scale = design.max(axis=0)
    found, _ = nnls(design / scale, np.ones_like(time))
    latency, per_byte = (float(value) for value in found / scale)
    fitted = design @ np.array([latency, per_byte])
    return Link(
        latency_s=latency,
        bandwidth_bytes_per_s=1.0 / max(per_byte, 1.0 / FASTEST_BYTES_PER_S),
        relative_error=float(np.mean(np.abs(fitted - 1.0))),
    )


def _count(row: LinkMeasurement) -> int:
    """Ranks that share the measured link."""
    return row.devices_per_node if row.scope == "intra_node" else row.nodes
