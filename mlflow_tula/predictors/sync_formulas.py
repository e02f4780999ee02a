"""Seconds of synchronisation, and how far compute hides them. Shipped with each registered model.

    link(n) = latency k log2(n) + 2 (n - 1) / n c bytes / bandwidth (+ casts)

k: messages that the gradient is sent in (DDP's buckets); c: 1, or 1/2 with bf16 compression, which
casts to it and back. Synchronisation hides behind the backward pass alone, and of that not behind
the last bucket's way:

    overlap(compute, sync) = compute - back
        + min(((back + busy)^p + sync^p)^(1/p) + q min(back, sync), back + sync)

back: the backward pass's part of compute (all of it where that was not measured); busy: what the
all-reduce takes of the cores that compute, on a CPU; p: 1 hides nothing; q = (1 - 1/p) / (2 k).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .formulas import smooth_maximum

Array = NDArray[np.float64]

TINY = 1e-300
FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
"""DDP closes its first bucket at 1 MiB and the others at 25 MiB."""
STATED_LINK_SD, STATED_BACKWARD_SD = 0.35, 0.2
"""Error of an all-reduce that a stated link alone foretells; less where it is known what can hide
it."""


def link_time(
    link: Mapping[str, Any],
    message_bytes: float,
    count: Array,
    *,
    messages: float = 1.0,
    compressed: Any = False,
) -> Array:
    """Ring all-reduce of a gradient over `count` nodes (or devices of a node); 0 for one."""
    rounds = link["latency_s"] * messages * np.log2(count)
    ring = 2.0 * (count - 1.0) / count * message_bytes / link["bandwidth_bytes_per_s"]
    casts = np.where(count > 1.0, link.get("cast_s_per_byte", 0.0) * message_bytes, 0.0)
    return np.asarray(rounds + np.where(compressed, 0.5 * ring + casts, ring))


def num_buckets(gradient_bytes: float, cap_bytes: float | None = None) -> float:
    """How many messages DDP makes of a gradient, about."""
    cap = cap_bytes or BUCKET_BYTES
    rest = max(gradient_bytes - min(FIRST_BUCKET_BYTES, cap), 0.0)
    return 1.0 + float(np.ceil(rest / cap))


def log_growth(
    tier: Mapping[str, Any], nodes: Array, devices: Array, compressed: Any = None
) -> Array:
    """How synchronisation grows with the ranks, as a logarithm up to a constant.

    With the link's terms: their sum (two ranks may take longer than the law of more says:
    `pair_factor`, gloo's gather). Without: a weighted geometric mean of no growth, of a
    ring's `2 (W - 1) / W` and of one whose latency counts, `0.7 + 0.3 log2(n)`. Fewer ranks than
    were measured are not taken to be faster.
    """
    half = tier.get("compressed", False) if compressed is None else compressed
    pair = np.where(nodes * devices == 2.0, np.log(tier.get("pair_factor", 1.0)), 0.0)
    if tier["links"] is not None:
        total: Array = np.zeros_like(nodes)
        for scope, count in (("intra_node", devices), ("inter_node", nodes)):
            if tier["links"].get(scope) is not None:
                total += link_time(
                    tier["links"][scope],
                    tier["gradient_bytes"],
                    count,
                    messages=tier.get("messages", 1.0),
                    compressed=half,
                )
        return np.asarray(pair + np.log(np.maximum(total, TINY)))
    ranks = np.maximum(nodes * devices, tier["fewest_ranks"])
    units = np.maximum(nodes if tier["counts"] == "nodes" else devices, tier["fewest_units"])
    ring = np.log(2.0 * (ranks - 1.0) / ranks)
    latency = np.log(0.7 + 0.3 * np.log2(units))
    sent = np.where(half, np.log(0.5), 0.0)
    return np.asarray(pair + tier["ring_weight"] * ring + tier["latency_weight"] * latency + sent)


def sync_time(tier: Mapping[str, Any], nodes: Array, devices: Array) -> Array:
    """Seconds of synchronisation, one row an overlap power."""
    place = np.log2(nodes * devices)
    levels = np.asarray(tier["log_levels"], float)
    growth = log_growth(tier, nodes, devices)
    shift = np.array([np.interp(place, tier["log2_ranks"], row) for row in levels])
    return np.asarray(np.exp(growth + shift))


def busy_time(tier: Mapping[str, Any], nodes: Array, devices: Array) -> Array:
    """Seconds for which the all-reduce keeps the cores busy that compute; 0 where not measured.

    Of the link between nodes: within one the p-norm's power tells it.
    """
    total: Array = np.zeros_like(nodes)
    link = (tier["links"] or {}).get("inter_node")
    if link is None or tier["counts"] != "nodes":
        return total
    half = bool(tier.get("compressed", False))
    ring = 2.0 * (nodes - 1.0) / nodes * tier["gradient_bytes"]
    total = total + link.get("cpu_s_per_byte", 0.0) * ring * (0.5 if half else 1.0)
    return np.asarray(total)


def backward_share(params: Mapping[str, Any], batch: Array) -> Array:
    """The backward pass's part of compute at each local batch size; 1 where it is not known."""
    known = params.get("backward")
    if not known:
        return np.ones_like(batch)
    return np.asarray(np.interp(np.log(batch), np.log(known["sizes"]), known["shares"]))


def overlapped(
    alone: Array, sync: Array, power: Any, share: Array, messages: float, busy: Any = 0.0
) -> Array:
    """Compute with synchronisation: arrays of one shape, `power` broadcast to it."""
    back = share * alone
    hidden = np.minimum(back + busy, back + sync)
    both = smooth_maximum(np.broadcast_to(hidden, sync.shape), sync, power)
    # one that can hide behind all of compute is one of which nothing is known: no tail either
    tail = np.where(share < 1.0, (1.0 - 1.0 / np.asarray(power)) / (2.0 * messages), 0.0)
    late = both + tail * np.minimum(back, sync)
    return np.asarray(alone - back + np.minimum(late, back + sync))


def with_options(
    params: Mapping[str, Any], compression: str | None, bucket_bytes: float | None
) -> Mapping[str, Any]:
    """The same parameters for gradients that are sent in another way than DDP's own.

    Raises:
        ValueError: a compression that does not exist, or DDP's ways asked of FSDP.
    """
    if compression not in (None, "none", "bf16"):
        raise ValueError(f"gradient_compression must be none or bf16, not {compression!r}")
    if params.get("sync_every_pass") and (compression == "bf16" or bucket_bytes is not None):
        raise ValueError(
            "gradient_compression and bucket_bytes say how DDP sends gradients, and this was "
            "measured with strategy fsdp: leave them out"
        )
    changed = dict(params)
    for name in ("intra_node", "inter_node"):
        tier = dict(params[name])
        tier["compressed"] = compression == "bf16"
        if bucket_bytes is not None and params["gradient_bytes"]:
            tier["messages"] = num_buckets(params["gradient_bytes"], bucket_bytes)
        changed[name] = tier
    return changed


def with_link(
    params: Mapping[str, Any], bandwidth_bytes_per_s: float | None, latency_s: float | None
) -> Mapping[str, Any]:
    """The same parameters with another link between the nodes.

    Raises:
        ValueError: how many bytes an all-reduce moves, or the term that is not stated, is unknown.
    """
    tier = params["inter_node"]
    links = dict(tier["links"] or {})
    link = dict(links.get("inter_node") or {})
    if bandwidth_bytes_per_s is not None:
        link["bandwidth_bytes_per_s"] = bandwidth_bytes_per_s
    if latency_s is not None:
        link["latency_s"] = latency_s
    if not params["gradient_bytes"]:
        raise ValueError(
            "a stated link needs the bytes that an all-reduce moves: set num_parameters of the "
            "workload, or leave the link out"
        )
    if "bandwidth_bytes_per_s" not in link:
        raise ValueError(
            "inter_node_latency_s alone says nothing about bandwidth, which was not measured: "
            "state inter_node_bandwidth_bytes_per_s too"
        )
    link.setdefault("latency_s", 0.0)
    changed = {
        **tier,
        "links": {**links, "inter_node": link},
        "gradient_bytes": params["gradient_bytes"],
    }
    if tier["links"] is None:
        # levels were measured against another law: the stated link stands alone
        zeros = [[0.0] for _ in tier["powers"]]
        sd = STATED_BACKWARD_SD if params.get("backward") else STATED_LINK_SD
        changed |= {"log2_ranks": [1.0], "log_levels": zeros, "rest": [], "sizes": []}
        changed |= {"level_sd": sd, "between_sd": 0.0, "growth_sd": 0.0}
    return {**params, "inter_node": changed}
