"""The links of a cluster, from an all-reduce microbenchmark: latency and bandwidth, each scope.

    time = latency k log2(n) + 2 (n - 1) / n bytes / bandwidth

n: devices of a node within it, nodes between them; k: messages, for a gradient that was sent in
buckets. Fitted by non-negative relative least squares. What bf16 compression takes beyond half the
bytes is its two casts, in proportion to the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mlflow_tula.predictors.sync_formulas import link_time
from mlflow_tula.specs import Spec, check_real
from mlflow_tula.table import LinkMeasurement, LinkScope

SMALL_MESSAGE_BYTES = 2**20
"""Smaller messages ride in a shaped link's token bucket and look too fast (docs/method.md)."""
FASTEST_BYTES_PER_S = 1e15
"""Stands for "no bandwidth term was seen": JSON knows no infinity."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link(Spec):
    """Latency in seconds a doubling of the ranks, bandwidth in bytes per second.

    `relative_error` is the mean absolute relative error over the fitted messages;
    `cast_s_per_byte` what compressing and restoring a byte of gradient takes; `cpu_s_per_byte`
    for how long sending a byte keeps a CPU rank's cores busy.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    relative_error: float = 0.0
    cast_s_per_byte: float = 0.0
    cpu_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        """Check every field once."""
        check_real("latency_s", self.latency_s)
        check_real("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, strict=True)
        check_real("relative_error", self.relative_error)
        check_real("cast_s_per_byte", self.cast_s_per_byte)
        check_real("cpu_s_per_byte", self.cpu_s_per_byte)

    def seconds(
        self, message_bytes: float, count: float, *, messages: int = 1, compressed: bool = False
    ) -> float:
        """An all-reduce over `count` nodes (or devices of a node)."""
        return float(
            link_time(
                self.to_dict(),
                message_bytes,
                np.array([float(count)]),
                messages=messages,
                compressed=compressed,
            )[0]
        )


def fit(rows: Sequence[LinkMeasurement], scope: LinkScope) -> Link | None:
    """The link of one scope, or None without two different messages over two or more ranks."""
    from scipy.optimize import nnls

    known = [row for row in rows if row.scope == scope and _count(row) > 1]
    usable = [row for row in known if row.compression is None]
    large = [row for row in usable if row.message_bytes >= SMALL_MESSAGE_BYTES]
    if len({row.message_bytes for row in large}) >= 2:
        usable = large
    if len({row.message_bytes for row in usable}) < 2:
        return None
    count = np.array([_count(row) for row in usable], float)
    time = np.array([row.time_s for row in usable], float)
    bytes_ = np.array([row.message_bytes for row in usable], float)
    rounds = np.log2(count) * [row.num_buckets or 1 for row in usable]
    design = np.c_[rounds, 2.0 * (count - 1.0) / count * bytes_] / time[:, None]
    scale = design.max(axis=0)
    found, _ = nnls(design / scale, np.ones_like(time))
    latency, per_byte = (float(value) for value in found / scale)
    fitted = design @ np.array([latency, per_byte])
    link = Link(
        latency_s=latency,
        bandwidth_bytes_per_s=1.0 / max(per_byte, 1.0 / FASTEST_BYTES_PER_S),
        relative_error=float(np.mean(np.abs(fitted - 1.0))),
        cpu_s_per_byte=_busy(usable),
    )
    casts = [_casts(link, row) for row in known if row.compression is not None]
    return replace(link, cast_s_per_byte=max(float(np.median(casts)), 0.0)) if casts else link


def _busy(rows: Sequence[LinkMeasurement]) -> float:
    """Of all messages together: the clock of busy cores is coarse."""
    known = [row for row in rows if row.cpu_time_s is not None]
    sent = sum(2.0 * (_count(row) - 1) / _count(row) * row.message_bytes for row in known)
    # more than the time itself it cannot be
    busy = sum(min(row.cpu_time_s or 0.0, row.time_s) for row in known)
    return busy / sent if known else 0.0


def _casts(link: Link, row: LinkMeasurement) -> float:
    """Seconds a byte of gradient, beyond the all-reduce of half of them."""
    sent = link.seconds(row.message_bytes / 2, _count(row), messages=row.num_buckets or 1)
    return (row.time_s - sent) / row.message_bytes


def _count(row: LinkMeasurement) -> int:
    """Ranks that share the measured link."""
    return row.devices_per_node if row.scope == "intra_node" else row.nodes
