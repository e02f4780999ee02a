"""The question and its curve: candidates on clusters, each with all that the bundle predicts.

A `Request` is the checked question. `make_curve` lists the candidate batch sizes, cuts each into
local batch and accumulation steps, asks the bundle, and marks what misses a limit and what lies on
the Pareto front of time and cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mlflow_tula.batches import check_candidates, divisors
from mlflow_tula.errors import InvalidInputError
from mlflow_tula.knee import KneeRule
from mlflow_tula.recommend.recommendation import CurvePoint, Objective, Scaling
from mlflow_tula.specs import ClusterSpec, Pricing, check_choice, check_int, check_real

if TYPE_CHECKING:
    from mlflow_tula.predictors.bundle import PredictorBundle

MAX_ACCUMULATION_STEPS = 256
BEYOND_PROBES = 4
"""Default candidates reach this many times the largest measured local batch size."""

Asked = tuple[ClusterSpec, int, int]
"""A configuration: cluster, local batch size, accumulation steps."""

NEAR = 2
"""A measured local batch size so many times larger or smaller makes a point known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The arguments of `recommend`, checked."""

    bundle: PredictorBundle
    clusters: tuple[ClusterSpec, ...]
    candidates: tuple[int, ...] | None
    objective: Objective
    epochs: float | None
    deadline_s: float | None
    budget_usd: float | None
    memory_limit_bytes: float | None
    pricing: Pricing | None
    current: int | None
    accumulation_steps: int | None
    dataset_size: int
    knee_rule: KneeRule
    level: float
    gradient_compression: str | None = None
    scaling: Scaling = "any"

    def __post_init__(self) -> None:
        """State the rule, the value and the way out of each bad argument."""
        check_choice("objective", self.objective, Objective)
        check_choice("knee rule", self.knee_rule, KneeRule)
        check_choice("scaling", self.scaling, Scaling)
        check_int("dataset_size", self.dataset_size)
        for name in ("epochs", "deadline_s", "budget_usd", "memory_limit_bytes"):
            if getattr(self, name) is not None:
                check_real(name, getattr(self, name), strict=True)
        for name in ("current", "accumulation_steps"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name))
        if not self.clusters or not all(isinstance(c, ClusterSpec) for c in self.clusters):
            raise InvalidInputError("cluster must be a ClusterSpec or a non-empty list of them")
        if len({(c.nodes, c.devices_per_node) for c in self.clusters}) < len(self.clusters):
            raise InvalidInputError("clusters must differ in nodes or devices_per_node")
        if self.to_target and self.bundle.convergence is None:
            raise InvalidInputError(
                f"objective {self.objective} needs convergence data: fit the bundle with a table "
                "of global_batch_size and epochs_to_target (fit(table, convergence=frame)), or "
                "choose knee, min_time or min_cost"
            )
        if self.objective.startswith("min_cost") and self.pricing is None:
            raise InvalidInputError(
                f"objective {self.objective} needs pricing: usd_per_device_hour or usd_per_gb_hour"
            )
        if self.budget_usd is not None and self.pricing is None:
            raise InvalidInputError(
                "budget_usd needs pricing: usd_per_device_hour or usd_per_gb_hour"
            )
        limit = "deadline_s" if self.deadline_s is not None else "budget_usd"
        if getattr(self, limit) is not None and self.epochs is None and not self.to_target:
            raise InvalidInputError(
                f"{limit} needs the length of the run: give epochs, or an objective to a target"
            )

    @property
    def to_target(self) -> bool:
        """Whether time and cost are counted until the target is reached."""
        return self.objective.endswith("_to_target")

    @property
    def basis(self) -> str:
        """What time and cost are of."""
        if self.to_target:
            return "to target"
        return "one epoch" if self.epochs is None else f"{self.epochs:g} epochs"

    @property
    def per(self) -> str:
        """`basis` in a sentence."""
        return self.basis if self.to_target else f"for {self.basis}"

    @property
    def decides(self) -> str:
        """The field of a CurvePoint that the objective looks at."""
        return self.cost_field if self.objective.startswith("min_cost") else "time_s"

    @property
    def cost_field(self) -> str:
        """Which cost column the objective counts."""
        return "cost_to_target_usd" if self.to_target else "cost_usd"


def listed(name: str, values: Iterable[Any]) -> tuple[Any, ...]:
    """`values` as a tuple; a string or a single value is refused."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidInputError(f"{name} must be a non-empty list, not {values!r}")
    return tuple(values)


def make_curve(request: Request) -> tuple[CurvePoint, ...]:
    """Every candidate on every cluster with its predictions, smaller worlds and batches first."""
    clusters = sorted(request.clusters, key=lambda c: (c.world_size, c.nodes))
    sizes = _global_sizes(request)
    if sizes is not None:
        wanted = [[size for size in sizes if size % one.world_size == 0] for one in clusters]
        found = _on_each(request, clusters, wanted)
    else:
        near = [_held(request, one, _default_sizes(request, one)[0]) for one in clusters]
        found = _on_each(request, clusters, near)
        # Where nothing fits, what is smaller than all that was probed comes into question.
        without = [one for one, here in zip(clusters, found, strict=True) if not _any_fits(here)]
        smaller = [_default_sizes(request, one)[1] for one in without]
        more = dict(zip(without, _on_each(request, without, smaller), strict=True))
        found = [more.get(one, []) + here for one, here in zip(clusters, found, strict=True)]
    points = [point for here in found for point in here]
    if not points:
        raise InvalidInputError(
            f"a dataset of {request.dataset_size} samples cannot feed "
            f"{request.clusters[0].world_size} ranks with {request.accumulation_steps or 1} "
            "accumulation steps: use fewer"
        )
    return _mark_pareto(request, _apply_limits(request, points))


def _on_each(
    request: Request, clusters: Sequence[ClusterSpec], sizes: Sequence[Sequence[int]]
) -> list[list[CurvePoint]]:
    """The points of each cluster's sizes; the bundle is asked once for all of them."""
    asked: list[Asked] = []
    ends = []
    for cluster, wanted in zip(clusters, sizes, strict=True):
        asked += [(cluster, *layout) for layout in _layouts(request, cluster, wanted)]
        ends.append(len(asked))
    points = _points(request, asked)
    return [points[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _any_fits(points: Iterable[CurvePoint]) -> bool:
    return any(point.fits for point in points)


def _held(request: Request, cluster: ClusterSpec, sizes: list[int]) -> list[int]:
    """What strong or weak scaling leaves of a cluster's candidates: one size, where it can be cut.

    Strong: the global batch of the smallest cluster stays, weak: its local batch does. That is the
    current batch size, or else the largest that was measured there.
    """
    if request.scaling == "any":
        return sizes
    first = min(request.clusters, key=lambda one: (one.world_size, one.nodes))
    largest = max(local for local, _ in request.bundle.probed.ok)
    passes = request.accumulation_steps or 1
    start = request.current or largest * first.world_size * passes
    if request.scaling == "strong":
        return [start] if start % (cluster.world_size * passes) == 0 else []
    per_rank = start // first.world_size
    whole = per_rank * cluster.world_size
    return [whole] if per_rank % passes == 0 and whole <= request.dataset_size else []


def _global_sizes(request: Request) -> list[int] | None:
    """The candidates that were asked for, checked; None for the default."""
    worlds = sorted({cluster.world_size for cluster in request.clusters})
    if request.dataset_size < worlds[0]:
        raise InvalidInputError(
            f"a dataset of {request.dataset_size} samples cannot feed {worlds[0]} ranks: "
            "use fewer devices"
        )
    if request.candidates is None:
        return None
    return check_candidates(
        request.candidates,
        world_sizes=worlds,
        dataset_size=request.dataset_size,
        accumulation_steps=request.accumulation_steps or 1,
    )


def _default_sizes(request: Request, cluster: ClusterSpec) -> tuple[list[int], list[int]]:
    """World size times powers of two from the smallest probe to 4x the largest, and the probes.

    Apart from them those that are smaller still, for the case that nothing else fits.
    """
    cold = request.bundle.cold_start
    probed = [local for local, _ in request.bundle.probed.ok]
    world = cluster.world_size * (request.accumulation_steps or 1)
    farthest = BEYOND_PROBES * max(probed, default=0)
    if cold is not None:
        probed += cold.local_batch_sizes
        farthest = max(farthest, *cold.local_batch_sizes)
    bound = min(request.dataset_size // world, farthest)
    powers = [2**k for k in range(48) if 2**k <= bound]
    near = {world * size for size in (*powers, *probed) if min(probed) <= size <= bound}
    current = request.current
    if current is not None and current % world == 0 and current <= world * bound:
        near.add(current)
    return sorted(near), [world * size for size in powers if size < min(probed)]


def _layouts(request: Request, cluster: ClusterSpec, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(local batch size, accumulation steps) of each global size, accumulation where it must."""
    world, steps = cluster.world_size, request.accumulation_steps
    if steps is not None:
        return [(size // world // steps, steps) for size in sizes if size % (world * steps) == 0]
    layouts = [(size // world, 1) for size in sizes]
    if request.candidates is None:
        return layouts
    too_large = [p.local_batch_size for p in _predict(request, cluster, layouts) if not p.fits]
    options = [
        (local // steps, steps)
        for local in too_large
        for steps in divisors(local, largest=MAX_ACCUMULATION_STEPS)[1:]
    ]
    for point in reversed(_predict(request, cluster, options)):
        if point.fits:  # the fewest steps come last, and stay
            per_rank = point.local_batch_size * point.accumulation_steps
            layouts[sizes.index(per_rank * world)] = (
                point.local_batch_size,
                point.accumulation_steps,
            )
    return layouts


def _predict(
    request: Request, cluster: ClusterSpec, layouts: Sequence[tuple[int, int]]
) -> list[CurvePoint]:
    """One point a layout, from the bundle."""
    asked = [(cluster, local, passes) for local, passes in layouts]
    return _points(request, asked)


def _points(request: Request, asked: Sequence[Asked]) -> list[CurvePoint]:
    """One point a configuration, from the bundle."""
    rows = predicted(request, asked, request.gradient_compression)
    return [
        _point(
            request, {key: v for key, v in row.items() if key in CurvePoint.__dataclass_fields__}
        )
        for row in rows
    ]


def predicted(
    request: Request, asked: Sequence[Asked], compression: str | None
) -> list[dict[str, Any]]:
    """What the bundle says of each configuration, all of one link between nodes asked at once."""
    rows: list[dict[str, Any]] = [{}] * len(asked)
    links: dict[tuple[float | None, float | None], list[int]] = {}
    for at, (cluster, _, _) in enumerate(asked):
        link = cluster.inter_node_bandwidth_bytes_per_s, cluster.inter_node_latency_s
        links.setdefault(link, []).append(at)
    for (bandwidth, latency), places in links.items():
        here = [asked[at] for at in places]
        columns = request.bundle.predict_columns(
            {
                "local_batch_size": [local for _, local, _ in here],
                "nodes": [cluster.nodes for cluster, _, _ in here],
                "devices_per_node": [cluster.devices_per_node for cluster, _, _ in here],
                "accumulation_steps": [passes for _, _, passes in here],
            },
            level=request.level,
            memory_limit_bytes=request.memory_limit_bytes,
            dataset_size=request.dataset_size,
            epochs=request.epochs,
            pricing=request.pricing,
            inter_node_bandwidth_bytes_per_s=bandwidth,
            inter_node_latency_s=latency,
            gradient_compression=compression,
        )
        values = zip(*(column.tolist() for column in columns.values()), strict=True)
        for at, row in zip(places, values, strict=True):
            rows[at] = dict(zip(columns, row, strict=True))
    return rows


_TIMES = ("epoch_time_s", "time_to_target_s")


def _point(request: Request, record: dict[Any, Any]) -> CurvePoint:
    """A row of predictions as a CurvePoint: NaN becomes None, the objective's time is filled in."""
    values = {str(name): _plain(value) for name, value in record.items()}
    source, factor = "epoch_time_s", request.epochs or 1.0
    if request.to_target:
        source, factor = "time_to_target_s", 1.0
    # Samples that drop_last leaves out are no speed: every candidate is charged for all of them.
    steps = request.dataset_size / int(values["global_batch_size"])
    whole = steps * values["step_time_s"] / values["epoch_time_s"]
    times = [f"{name}{end}" for name in _TIMES for end in ("", "_lower", "_upper")]
    for name in (*times, "cost_usd", "cost_to_target_usd"):
        values[name] = None if values.get(name) is None else values[name] * whole
    for end in ("", "_lower", "_upper"):
        seconds = values[f"{source}{end}"]
        values[f"time_s{end}"] = None if seconds is None else seconds * factor
    nodes, devices = int(values["nodes"]), int(values["devices_per_node"])
    measured = (int(values["local_batch_size"]), nodes * devices) in request.bundle.probed.ok
    measured = measured and ran_there(request, nodes, devices)
    return CurvePoint(**values, measured=measured)


def _plain(value: Any) -> Any:
    """A numpy scalar as a Python one; what is not finite is not known."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def ran_there(request: Request, nodes: int, devices: int) -> bool:
    """Whether anything was measured on just this many nodes and devices of each."""
    setups = request.bundle.step_time.params["range"]["setups"]
    return any((nodes, devices) == (setup[0], setup[1]) for setup in setups)


def is_known(request: Request, point: CurvePoint) -> bool:
    """Whether it or its neighbour by a factor of two was measured on so many ranks."""
    if not ran_there(request, point.nodes, point.devices_per_node):
        return False
    return any(
        world == point.world_size
        and local <= NEAR * point.local_batch_size
        and point.local_batch_size <= NEAR * local
        for local, world in request.bundle.probed.ok
    )


def _apply_limits(request: Request, curve: Iterable[CurvePoint]) -> tuple[CurvePoint, ...]:
    """Mark the points that miss the deadline or the budget."""

    def meets(point: CurvePoint) -> bool:
        return all(
            value is not None and value <= limit for _, value, limit in limits(request, point)
        )

    return tuple(replace(point, meets_limits=meets(point)) for point in curve)


def limits(request: Request, point: CurvePoint) -> list[tuple[str, float | None, float]]:
    """(name, value, limit) of each limit asked for."""
    found = []
    if request.deadline_s is not None:
        found.append(("deadline_s", point.time_s, request.deadline_s))
    if request.budget_usd is not None:
        cost: float | None = getattr(point, request.cost_field)
        found.append(("budget_usd", cost, request.budget_usd))
    return found


def _mark_pareto(request: Request, curve: Sequence[CurvePoint]) -> tuple[CurvePoint, ...]:
    """Mark the points that fit and that no other beats in both time and cost (or device time)."""

    def price(point: CurvePoint) -> float:
        cost: float | None = getattr(point, request.cost_field)
        return cost if cost is not None else (point.time_s or 0.0) * point.world_size

    known = [point for point in curve if point.fits and point.time_s is not None]
    front: set[int] = set()
    cheapest = math.inf
    for point in sorted(known, key=lambda p: (p.time_s, price(p), p.global_batch_size)):
        if price(point) < cheapest:
            cheapest = price(point)
            front.add(id(point))
    return tuple(replace(point, on_pareto=id(point) in front) for point in curve)
