"""Recommendation: a decision with the numbers it rests on, as JSON and as the table people read.

A `CurvePoint` is one candidate with all its predictions; None means "not known" (no memory was
measured, no price was given, no convergence). A `Recommendation` is the choice, the whole curve,
the reasons in words and the warnings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from mlflow_tula.documents import check_document
from mlflow_tula.errors import InvalidInputError, SchemaError
from mlflow_tula.specs import Spec, check_choice, check_int

if TYPE_CHECKING:
    import pandas as pd

Objective = Literal["knee", "min_time", "min_cost", "min_time_to_target", "min_cost_to_target"]

Scaling = Literal["any", "strong", "weak"]
"""Which batch sizes are compared on several clusters: all, one global size, one local size."""

RECOMMENDATION_KIND = "tula.recommendation"
RECOMMENDATION_SCHEMA_VERSION = 1
_ROWS_AROUND = 4
_CONFIGURATION = (
    "global_batch_size",
    "local_batch_size",
    "accumulation_steps",
    "nodes",
    "devices_per_node",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CurvePoint(Spec):
    """One candidate: seconds, bytes, dollars; `_lower` and `_upper` are the interval's ends.

    `time_s` and `cost_usd` are what the objective counts: of the epochs asked for, of one epoch
    where none were given, or until the target for the objectives that end in `_to_target`. All
    times are for every sample of the dataset, so that a batch is not faster for the samples that
    drop_last leaves out.
    `meets_limits` is false where a deadline or a budget is missed.
    """

    global_batch_size: int
    local_batch_size: int
    accumulation_steps: int
    nodes: int
    devices_per_node: int
    step_time_s: float
    step_time_s_lower: float | None = None
    step_time_s_upper: float | None = None
    throughput: float | None = None
    epoch_time_s: float | None = None
    epoch_time_s_lower: float | None = None
    epoch_time_s_upper: float | None = None
    peak_memory_bytes: float | None = None
    peak_memory_bytes_lower: float | None = None
    peak_memory_bytes_upper: float | None = None
    epochs_to_target: float | None = None
    epochs_to_target_lower: float | None = None
    epochs_to_target_upper: float | None = None
    time_to_target_s: float | None = None
    time_to_target_s_lower: float | None = None
    time_to_target_s_upper: float | None = None
    time_s: float | None = None
    time_s_lower: float | None = None
    time_s_upper: float | None = None
    cost_usd: float | None = None
    cost_to_target_usd: float | None = None
    fits: bool = True
    fits_reason: str = ""
    extrapolated: bool = False
    measured: bool = False
    may_not_reach_target: bool = False
    reach_rate: float | None = None
    meets_limits: bool = True
    on_pareto: bool = False

    def __post_init__(self) -> None:
        """Check the configuration once; the numbers come from the predictors."""
        for name in _CONFIGURATION:
            check_int(name, getattr(self, name))

    @property
    def world_size(self) -> int:
        """Data-parallel ranks."""
        return self.nodes * self.devices_per_node

    @property
    def layout(self) -> str:
        """`local x accumulation x world`."""
        return f"{self.local_batch_size} x {self.accumulation_steps} x {self.world_size}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingPoint(Spec):
    """One cluster's place in strong scaling (one global batch) or weak scaling (one local batch).

    `speedup` is samples per second over those of the smallest cluster; `efficiency` that over the
    number of times more ranks.
    """

    scaling: Scaling
    nodes: int
    devices_per_node: int
    global_batch_size: int
    local_batch_size: int
    step_time_s: float
    throughput: float
    speedup: float
    efficiency: float
    extrapolated: bool
    fits: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """Which batch size, on how many devices, and why."""

    global_batch_size: int
    local_batch_size: int
    accumulation_steps: int
    nodes: int
    devices_per_node: int
    objective: Objective
    basis: str
    curve: tuple[CurvePoint, ...]
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    level: float = 0.9
    workload: str = ""
    hardware: str = ""
    knee_rule: str = ""
    advice: tuple[str, ...] = ()
    scaling: tuple[ScalingPoint, ...] = ()

    def __post_init__(self) -> None:
        """The objective is one of ours, and the choice stands on the curve."""
        check_choice("objective", self.objective, Objective)
        if not any(self._is_choice(point) for point in self.curve):
            raise InvalidInputError(
                f"the curve of a recommendation must hold its choice, {self.global_batch_size}"
            )

    @property
    def world_size(self) -> int:
        """Data-parallel ranks."""
        return self.nodes * self.devices_per_node

    @property
    def choice(self) -> CurvePoint:
        """The chosen point of the curve."""
        return next(point for point in self.curve if self._is_choice(point))

    @property
    def pareto(self) -> tuple[CurvePoint, ...]:
        """Points that no other point beats in both time and cost, the fastest first."""
        front = [point for point in self.curve if point.on_pareto]
        return tuple(sorted(front, key=lambda point: (point.time_s or 0.0, point.world_size)))

    def to_frame(self) -> pd.DataFrame:
        """The curve, one row a candidate, None as NaN."""
        import pandas as pd

        names = [entry.name for entry in dataclasses.fields(CurvePoint)]
        return pd.DataFrame([point.to_dict() for point in self.curve], columns=names)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types with `kind` and `schema_version`."""
        data: dict[str, Any] = {
            "kind": RECOMMENDATION_KIND,
            "schema_version": RECOMMENDATION_SCHEMA_VERSION,
        }
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            data[entry.name] = list(value) if isinstance(value, tuple) else value
        data["curve"] = [point.to_dict() for point in self.curve]
        data["scaling"] = [point.to_dict() for point in self.scaling]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; another kind or a newer schema raises SchemaError."""
        check_document(data, kind=RECOMMENDATION_KIND, version=RECOMMENDATION_SCHEMA_VERSION)
        fields = {
            key: value for key, value in data.items() if key not in ("kind", "schema_version")
        }
        known = {entry.name for entry in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - known)
        if unknown:
            raise SchemaError(f"Recommendation has no field {unknown[0]!r}: known {sorted(known)}")
        rows = fields.get("curve", [])
        if not isinstance(rows, list):
            raise SchemaError("curve must be a list of rows")
        fields["curve"] = tuple(CurvePoint.from_dict(row) for row in rows)
        scaling = fields.get("scaling", [])
        if not isinstance(scaling, list):
            raise SchemaError("scaling must be a list of rows")
        fields["scaling"] = tuple(ScalingPoint.from_dict(row) for row in scaling)
        for name in ("reasons", "warnings", "advice"):
            fields[name] = tuple(str(line) for line in fields.get(name, ()))
        try:
            return cls(**fields)
        except TypeError as error:
            raise SchemaError(f"Recommendation is incomplete: {error}") from error

    def __str__(self) -> str:
        """The choice, the curve around it, the reasons and the warnings, as plain text."""
        return "\n".join(
            [
                self.headline,
                "",
                *self._table(),
                "",
                *(f"because  {reason}" for reason in self.reasons),
                *(f"advice   {text}" for text in self.advice),
                *(f"warning  {warning}" for warning in self.warnings),
                *self._scaling_table(),
            ]
        ).rstrip()

    @property
    def headline(self) -> str:
        """The choice in one line."""
        return (
            f"choice: global batch size {self.global_batch_size} "
            f"({self.local_batch_size} local x {self.accumulation_steps} accumulation x "
            f"{_count(self.world_size, 'rank')}: {_count(self.nodes, 'node')} of "
            f"{_count(self.devices_per_node, 'device')}), objective {self.objective}"
        )

    def _is_choice(self, point: CurvePoint) -> bool:
        return all(getattr(point, name) == getattr(self, name) for name in _CONFIGURATION)

    def _table(self) -> list[str]:
        """Aligned rows around the choice; columns that hold nothing are left out."""
        shown = self._points_around()
        header = ["batch", "local x acc x world", "nodes", "step ms", "epoch s"]
        header += [f"{self.level:.0%} interval", "memory", "to target"]
        header += [f"cost, {self.basis}", "fits", ""]
        lines = _aligned([header, *(self._cells(point) for point in shown)])
        hidden = len(self.curve) - len(shown)
        return lines + ([f"(more candidates in the curve: {hidden})"] if hidden else [])

    def _scaling_table(self) -> list[str]:
        """Strong and weak scaling over the clusters, where there are several."""
        if not self.scaling:
            return []
        header = ["scaling", "nodes", "ranks", "batch", "local", "step ms", "samples/s"]
        header += ["speedup", "efficiency", ""]
        rows = [
            [
                point.scaling,
                str(point.nodes),
                str(point.nodes * point.devices_per_node),
                str(point.global_batch_size),
                str(point.local_batch_size),
                three_digits(point.step_time_s * 1e3),
                three_digits(point.throughput),
                f"{point.speedup:.2f}",
                f"{point.efficiency:.0%}",
                ", ".join(
                    word
                    for word, said in (
                        ("extrapolated", point.extrapolated),
                        ("does not fit", not point.fits),
                    )
                    if said
                ),
            ]
            for point in self.scaling
        ]
        return ["", *_aligned([header, *rows])]

    @property
    def ranking(self) -> tuple[CurvePoint, ...]:
        """Every (nodes, batch) pair that fits and meets the limits, the best first.

        By cost for the objectives that count it, else by time.
        """
        field = "time_s"
        if self.objective.startswith("min_cost"):
            to_target = self.objective.endswith("to_target")
            field = "cost_to_target_usd" if to_target else "cost_usd"
        known = [p for p in self.curve if p.fits and p.meets_limits and getattr(p, field)]
        return tuple(sorted(known, key=lambda p: (getattr(p, field), p.world_size)))

    def _points_around(self) -> list[CurvePoint]:
        points = sorted(
            self.curve, key=lambda p: (p.nodes, p.devices_per_node, p.global_batch_size)
        )
        at = next(i for i, point in enumerate(points) if self._is_choice(point))
        near = set(range(max(0, at - _ROWS_AROUND), at + _ROWS_AROUND + 1))
        front = [i for i, point in enumerate(points) if point.on_pareto][: 2 * _ROWS_AROUND]
        return [point for i, point in enumerate(points) if i in near or i in front]

    def _cells(self, point: CurvePoint) -> list[str]:
        marks = [
            "<- choice" if self._is_choice(point) else "",
            "pareto" if point.on_pareto else "",
            "measured" if point.measured else "",
            "extrapolated" if point.extrapolated else "",
            "may not reach the target" if point.may_not_reach_target else "",
            "" if point.meets_limits else "misses a limit",
        ]
        low, high = point.epoch_time_s_lower, point.epoch_time_s_upper
        to_target = self.objective.endswith("to_target")
        cost = point.cost_to_target_usd if to_target else point.cost_usd
        return [
            str(point.global_batch_size),
            point.layout,
            str(point.nodes) if any(other.nodes > 1 for other in self.curve) else "",
            three_digits(point.step_time_s * 1e3),
            three_digits(point.epoch_time_s),
            "" if low is None or high is None else f"{three_digits(low)} - {three_digits(high)}",
            _bytes(point.peak_memory_bytes),
            f"{three_digits(point.time_to_target_s)} s" if to_target else "",
            "" if cost is None else f"${three_digits(cost)}",
            "yes" if point.fits else "no",
            ", ".join(filter(None, marks)),
        ]


def _aligned(rows: list[list[str]]) -> list[str]:
    """Lines of columns; those that hold nothing but their header are left out."""
    columns = [c for c in zip(*rows, strict=True) if any(c[1:]) or c[0] == rows[0][0]]
    widths = [max(map(len, column)) for column in columns]
    return [
        "  ".join(
            cell.ljust(width) if position == len(widths) - 1 else cell.rjust(width)
            for position, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in zip(*columns, strict=True)
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def three_digits(value: float | None) -> str:
    """Three significant digits, thousands with commas."""
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _bytes(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"
