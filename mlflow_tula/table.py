"""Measurement and ProfileTable: what was measured, one row a trial, as versioned JSON.

A `Measurement` is one (local batch size, nodes, devices per node, accumulation steps) with its
times and bytes; a row that ran out of memory or crashed is kept with its status and reason. A
`ProfileTable` is all rows of one workload on one hardware, with the all-reduce microbenchmark
(`links`) where there was one. Repeated rows are allowed and welcome.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from mlflow_tula.documents import check_document, read_csv, shown, shown_names
from mlflow_tula.errors import InvalidInputError, SchemaError, TableError
from mlflow_tula.model_features import ModelFeatures
from mlflow_tula.specs import (
    HardwareSpec,
    Spec,
    Workload,
    check_choice,
    check_real,
)

if TYPE_CHECKING:
    import pandas as pd

TABLE_SCHEMA_VERSION = 1
MAX_ROWS = 100_000
MIN_TIME_S, MAX_TIME_S = 1e-9, 1e9
"""A nanosecond and 30 years: what lies beyond is no measurement, and no sum of it is one."""
MAX_OTHER = 1e18
MAX_REASON = 2000

Status = Literal["ok", "oom", "failed"]
LinkScope = Literal["intra_node", "inter_node"]
Compression = Literal["bf16"]

SLOW_RATIO = 1.3
"""A rank's own time over the median of the others' above which it is named. Two equally fast gloo
ranks on two cores differed by 1.02 to 1.25 from probe to probe on a busy machine, once by 1.6."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement(Spec):
    """One timed trial; times are seconds per optimizer update, bytes are the largest on a rank.

    `step_time_s` is the median over steps and the maximum over ranks; `step_time_std_s` the
    spread over steps. `compute_time_s`, `sync_time_s`, `data_time_s` and `optimizer_time_s` are
    its parts, where they were measured. `peak_memory_bytes` is what the feasibility limit applies
    to (reserved on CUDA; on a CPU what the process holds without a model, plus the larger of
    allocated bytes and resident growth); `allocated_memory_bytes` (live tensors) and
    `device_used_bytes` (on a CPU the kernel's resident peak) are other numbers. `cpu_time_ratio`
    is process time over wall time and thread: far below its quiet value it tells contention.
    `backward_time_s` is the part of compute that synchronisation can hide behind. None of
    `gradient_compression` and `bucket_bytes` is DDP's own: fp32 gradients in buckets of 25 MiB.
    `slowest_rank_ratio` is that rank's own time, without its wait for the others, over the median
    of theirs; `reason` names it where that is much.
    """

    local_batch_size: int
    step_time_s: float | None = None
    nodes: int = 1
    devices_per_node: int = 1
    accumulation_steps: int = 1
    status: Status = "ok"
    reason: str = ""
    step_time_std_s: float | None = None
    num_steps: int | None = None
    compute_time_s: float | None = None
    sync_time_s: float | None = None
    data_time_s: float | None = None
    optimizer_time_s: float | None = None
    peak_memory_bytes: int | None = None
    allocated_memory_bytes: int | None = None
    device_used_bytes: int | None = None
    gradient_norm: float | None = None
    gradient_variability: float | None = None
    noise_scale: float | None = None
    cpu_time_ratio: float | None = None
    probe_time_s: float | None = None
    backward_time_s: float | None = None
    gradient_compression: Compression | None = None
    bucket_bytes: int | None = None
    slowest_rank: int | None = None
    slowest_rank_ratio: float | None = None

    def __post_init__(self) -> None:
        """Check every field once; an `ok` row has a positive step time."""
        self._take_int("local_batch_size")
        self._take_int("nodes", maximum=10**6)
        self._take_int("devices_per_node", maximum=10**4)
        self._take_int("accumulation_steps", maximum=10**6)
        check_choice("status", self.status, Status)
        if self.gradient_compression is not None:
            check_choice("gradient compression", self.gradient_compression, Compression)
        self._take_reason()
        if self.status == "ok" and self.step_time_s is None:
            raise InvalidInputError("step_time_s is needed in a row of status ok, and is missing")
        if self.step_time_s is not None:
            object.__setattr__(self, "step_time_s", _seconds("step_time_s", self.step_time_s))
        for name in _OPTIONAL_REALS:
            if getattr(self, name) is not None:
                most = MAX_TIME_S if name.endswith("_s") else MAX_OTHER
                checked = check_real(name, getattr(self, name), maximum=most)
                object.__setattr__(self, name, checked)
        for name in _OPTIONAL_INTS:
            if getattr(self, name) is not None:
                self._take_int(name, minimum=0, maximum=2**60)
        if self.step_time_s is not None and (self.sync_time_s or 0.0) > self.step_time_s:
            raise InvalidInputError(
                f"sync_time_s is a part of step_time_s: it must be at most {self.step_time_s:g}, "
                f"not {self.sync_time_s:g}; leave it out where it was not measured, and give both "
                "in seconds"
            )

    def _take_reason(self) -> None:
        """Whatever a crash said, as text; what is endless is cut."""
        if not isinstance(self.reason, str):
            raise InvalidInputError(f"reason must be a string, not {shown(self.reason)}")
        if len(self.reason) > MAX_REASON:
            object.__setattr__(self, "reason", self.reason[: MAX_REASON - 3] + "...")

    @property
    def world_size(self) -> int:
        """Data-parallel ranks of the trial."""
        return self.nodes * self.devices_per_node

    @property
    def global_batch_size(self) -> int:
        """Local batch size x accumulation steps x world size."""
        return self.local_batch_size * self.accumulation_steps * self.world_size


_OPTIONAL_REALS = (
    "step_time_std_s",
    "compute_time_s",
    "sync_time_s",
    "data_time_s",
    "optimizer_time_s",
    "gradient_norm",
    "gradient_variability",
    "noise_scale",
    "cpu_time_ratio",
    "probe_time_s",
    "backward_time_s",
    "slowest_rank_ratio",
)
_OPTIONAL_INTS = (
    "num_steps",
    "peak_memory_bytes",
    "allocated_memory_bytes",
    "device_used_bytes",
    "bucket_bytes",
    "slowest_rank",
)
COLUMNS = tuple(entry.name for entry in dataclasses.fields(Measurement))


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkMeasurement(Spec):
    """One timed all-reduce of `message_bytes` over nodes x devices_per_node ranks, seconds.

    `num_buckets` of a gradient that was sent as DDP sends it; None: one plain message. With
    `compression` the time holds both casts. `cpu_time_s` is what a rank's own cores did for it.
    """

    scope: LinkScope
    nodes: int
    devices_per_node: int
    message_bytes: int
    time_s: float
    num_buckets: int | None = None
    compression: Compression | None = None
    cpu_time_s: float | None = None

    def __post_init__(self) -> None:
        """Check every field once."""
        check_choice("link scope", self.scope, LinkScope)
        self._take_int("nodes", maximum=10**6)
        self._take_int("devices_per_node", maximum=10**4)
        self._take_int("message_bytes")
        object.__setattr__(self, "time_s", _seconds("time_s", self.time_s))
        if self.num_buckets is not None:
            self._take_int("num_buckets", maximum=10**6)
        if self.compression is not None:
            check_choice("gradient compression", self.compression, Compression)
        if self.cpu_time_s is not None:
            check_real("cpu_time_s", self.cpu_time_s, maximum=MAX_TIME_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileTable:
    """All measurements of one workload on one hardware, and its counted kernels if known."""

    workload: Workload
    hardware: HardwareSpec
    measurements: tuple[Measurement, ...] = ()
    links: tuple[LinkMeasurement, ...] = field(default=())
    features: ModelFeatures | None = None

    @property
    def ok(self) -> tuple[Measurement, ...]:
        """The rows that gave a step time."""
        return tuple(row for row in self.measurements if row.status == "ok")

    @property
    def digest(self) -> str:
        """Twelve hex digits of the whole content: equal tables, equal digests."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def with_rows(self, rows: Iterable[Measurement]) -> ProfileTable:
        """A new table with `rows` appended."""
        return dataclasses.replace(self, measurements=(*self.measurements, *rows))

    @classmethod
    def from_frame(
        cls, frame: pd.DataFrame, *, workload: Workload, hardware: HardwareSpec
    ) -> ProfileTable:
        """Check and take a frame of one row a trial.

        Args:
            frame: columns `local_batch_size` and `step_time_s` (seconds), and any other field of
                Measurement; missing ones take its defaults, NaN means "not measured".
            workload: what was trained.
            hardware: on what.

        Raises:
            TableError: a column that is missing, unknown or holds a bad value, by name and row.
        """
        names = [str(name) for name in frame.columns]
        for needed in ("local_batch_size", "step_time_s"):
            if needed not in names:
                raise TableError(
                    f"column {needed!r} is missing; the table has {shown_names(names) or 'none'}"
                )
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise TableError(f"column {shown(doubled[0])} stands twice; keep one of them")
        unknown = [name for name in names if name not in COLUMNS]
        if unknown:
            raise TableError(
                f"column {shown(unknown[0])} is unknown; known columns are {', '.join(COLUMNS)}"
            )
        if not len(frame):
            raise TableError("the table has no rows; give at least one measured batch size")
        if len(frame) > MAX_ROWS:
            raise TableError(f"the table has {len(frame)} rows; at most {MAX_ROWS} are read")
        rows = []
        for number, record in enumerate(frame.to_dict("records"), start=1):
            present = {str(k): _plain(v) for k, v in record.items() if not is_missing(v)}
            try:
                rows.append(Measurement(**present))
            except TypeError as error:
                raise TableError(f"row {number}: local_batch_size is missing") from error
            except InvalidInputError as error:
                raise TableError(f"row {number}: {error}") from error
        return cls(workload=workload, hardware=hardware, measurements=tuple(rows))

    @classmethod
    def from_csv(
        cls, path: str | Path, *, workload: Workload, hardware: HardwareSpec
    ) -> ProfileTable:
        """Read a CSV with the columns of `from_frame`; errors name the file."""
        frame = read_csv(path, max_rows=MAX_ROWS)
        try:
            return cls.from_frame(frame, workload=workload, hardware=hardware)
        except TableError as error:
            raise TableError(f"{path}: {error}") from error

    def to_frame(self) -> pd.DataFrame:
        """One row a trial, every field of Measurement a column, None as NaN."""
        import pandas as pd

        return pd.DataFrame([row.to_dict() for row in self.measurements], columns=list(COLUMNS))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types with `schema_version`; what is None is left out."""
        counted = {} if self.features is None else {"features": self.features.to_dict()}
        return {
            "schema_version": TABLE_SCHEMA_VERSION,
            "kind": "tula.profile_table",
            "workload": self.workload.to_dict(),
            "hardware": self.hardware.to_dict(),
            "measurements": [_known(row) for row in self.measurements],
            "links": [_known(row) for row in self.links],
            **counted,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; a newer schema or another kind of document raises SchemaError."""
        check_document(data, kind="tula.profile_table", version=TABLE_SCHEMA_VERSION)
        rows, links = data.get("measurements", []), data.get("links", [])
        counted = data.get("features")
        for name, found in (("measurements", rows), ("links", links)):
            if not isinstance(found, list) or len(found) > MAX_ROWS:
                raise SchemaError(f"{name} must be a list of at most {MAX_ROWS:,} rows")
        return cls(
            workload=Workload.from_dict(data.get("workload", {})),
            hardware=HardwareSpec.from_dict(data.get("hardware", {})),
            measurements=tuple(Measurement.from_dict(row) for row in rows),
            links=tuple(LinkMeasurement.from_dict(row) for row in links),
            features=None if counted is None else ModelFeatures.from_dict(counted),
        )


def _seconds(name: str, value: object) -> float:
    """A time that passed between two readings of a clock."""
    seconds = check_real(name, value, maximum=MAX_TIME_S, strict=True)
    if seconds < MIN_TIME_S:
        raise InvalidInputError(f"{name} must be at least {MIN_TIME_S:g} s, not {seconds:g}")
    return seconds


def is_missing(value: object) -> bool:
    """None, NaN, NaT (which differ from themselves), pandas.NA and empty cells."""
    if value is None or type(value).__name__ == "NAType":
        return True
    return bool(value != value or value == "")


def _plain(value: Any) -> Any:
    """A numpy scalar as its Python type; strings that hold numbers stay strings."""
    return value.item() if hasattr(value, "item") else value


def _known(row: Spec) -> dict[str, Any]:
    """The fields of a row that are not None."""
    return {key: value for key, value in row.to_dict().items() if value is not None}
