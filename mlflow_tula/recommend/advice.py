"""When other ways to synchronise would pay, and how a job scales over the clusters asked about.

    advise(request, chosen)     bf16 compression and accumulation, at the chosen configuration
    scale(request, chosen)      strong and weak scaling from the smallest cluster to the largest

Both ask the bundle again; nothing is measured. A saving below what the intervals of two such
predictions leave open is not called one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlflow_tula.recommend.curve import predicted
from mlflow_tula.recommend.recommendation import CurvePoint, ScalingPoint, three_digits
from mlflow_tula.specs import ClusterSpec

if TYPE_CHECKING:
    from mlflow_tula.recommend.curve import Request

WORTH = 0.05
"""A smaller saving of a step is no reason to change how gradients are sent."""
ACCUMULATIONS = (2, 4, 8)


def advise(request: Request, chosen: CurvePoint) -> tuple[str, ...]:
    """Sentences on compression and accumulation; none on one rank.

    FSDP has neither: it sends no gradients as DDP does, and communicates in every pass.
    """
    if chosen.world_size == 1 or request.bundle.workload.strategy == "fsdp":
        return ()
    found = []
    assert chosen.step_time_s is not None, "what was chosen has a step time"
    now = chosen.step_time_s
    if request.gradient_compression is None:
        (half,) = _ask(request, chosen, "bf16", (1,))
        saved = 1.0 - half / now
        if saved > WORTH:
            found.append(
                f"bf16 gradient compression would save {saved:.0%} of a step ({_ms(now)} to "
                f"{_ms(half)}; --gradient-compression bf16 rounds gradients to 8 bits of mantissa)"
            )
        else:
            found.append(f"bf16 gradient compression does not pay here ({saved:+.1%} of a step)")
    per_sample = now / chosen.global_batch_size
    best, gain = 1, 0.0
    possible = [n for n in ACCUMULATIONS if chosen.global_batch_size * n <= request.dataset_size]
    times = _ask(request, chosen, request.gradient_compression, possible) if possible else []
    for steps, seconds in zip(possible, times, strict=True):
        samples = chosen.global_batch_size * steps
        less = 1.0 - seconds / samples / per_sample
        # twice the batch must be worth it: a small further gain is none
        if less > gain + WORTH:
            best, gain = steps, less
    if best > 1:
        found.append(
            f"{best} accumulation steps would save {gain:.0%} of the time a sample takes: one "
            f"synchronisation in {best} passes, at a global batch of "
            f"{chosen.global_batch_size * best}, which may need more epochs"
        )
    elif possible:
        found.append("more accumulation steps do not pay here: synchronisation is no large part")
    return tuple(found)


def scale(request: Request, chosen: CurvePoint) -> tuple[ScalingPoint, ...]:
    """Each cluster with the chosen global batch, and with the chosen local batch."""
    clusters = sorted(request.clusters, key=lambda one: (one.world_size, one.nodes))
    if len(clusters) < 2:
        return ()
    passes = chosen.accumulation_steps
    whole, local = chosen.global_batch_size, chosen.local_batch_size
    strong = [
        (cluster, whole // (cluster.world_size * passes))
        for cluster in clusters
        if whole % (cluster.world_size * passes) == 0
    ]
    weak = [
        (cluster, local)
        for cluster in clusters
        if local * passes * cluster.world_size <= request.dataset_size
    ]
    return (*_points(request, "strong", strong, passes), *_points(request, "weak", weak, passes))


def _points(
    request: Request, kind: Any, pairs: Sequence[tuple[ClusterSpec, int]], passes: int
) -> list[ScalingPoint]:
    found: list[ScalingPoint] = []
    asked = [(cluster, local, passes) for cluster, local in pairs]
    rows = predicted(request, asked, request.gradient_compression)
    for (cluster, local), row in zip(pairs, rows, strict=True):
        throughput = float(row["throughput"])
        first = found[0] if found else None
        speedup = 1.0 if first is None else throughput / first.throughput
        ranks = 1 if first is None else first.nodes * first.devices_per_node
        more = 1.0 if first is None else cluster.world_size / ranks
        found.append(
            ScalingPoint(
                scaling=kind,
                nodes=cluster.nodes,
                devices_per_node=cluster.devices_per_node,
                global_batch_size=local * passes * cluster.world_size,
                local_batch_size=local,
                step_time_s=float(row["step_time_s"]),
                throughput=throughput,
                speedup=speedup,
                efficiency=speedup / more,
                extrapolated=bool(row["extrapolated"]),
                fits=bool(row["fits"]),
            )
        )
    return found


def _ask(
    request: Request, chosen: CurvePoint, compression: str | None, steps: Sequence[int]
) -> list[float]:
    """Seconds of a step of the chosen configuration, with so many times the passes."""
    cluster = next(
        one
        for one in request.clusters
        if (one.nodes, one.devices_per_node) == (chosen.nodes, chosen.devices_per_node)
    )
    count = len(steps)
    return request.bundle.step_seconds(
        {
            "local_batch_size": [chosen.local_batch_size] * count,
            "nodes": [cluster.nodes] * count,
            "devices_per_node": [cluster.devices_per_node] * count,
            "accumulation_steps": [chosen.accumulation_steps * more for more in steps],
        },
        bandwidth_bytes_per_s=cluster.inter_node_bandwidth_bytes_per_s,
        latency_s=cluster.inter_node_latency_s,
        gradient_compression=compression,
    )


def _ms(seconds: float) -> str:
    return f"{three_digits(1e3 * seconds)} ms"
