"""PredictorBundle: every fitted predictor of one workload on one hardware, and how good the fit is.

The bundle is a versioned JSON document; `predict` evaluates that document with the very file
(`inference.py`) that a registered model ships, so that both always agree.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

from mlflow_tula.documents import check_document, shown
from mlflow_tula.errors import (
    ExtrapolationWarning,
    InvalidInputError,
    MayNotReachTargetWarning,
    SchemaError,
    TulaError,
)
from mlflow_tula.predictors.checks import check_bundle
from mlflow_tula.predictors.convergence import ConvergencePredictor
from mlflow_tula.predictors.memory import MemoryPredictor
from mlflow_tula.predictors.step_time import StepTimePredictor
from mlflow_tula.specs import (
    HardwareSpec,
    Pricing,
    Spec,
    Workload,
    check_choice,
    check_int,
    check_real,
    check_text,
)

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

BUNDLE_KIND = "tula.predictor_bundle"
BUNDLE_SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class FitReport(Spec):
    """How the predictors were fitted: forms and why, errors, rows, warnings.

    The `*_mape` are leave-one-out mean absolute percentage errors as fractions (0.05 = 5 %), None
    where there were too few rows to leave one out. `coverage` is the share of left-out step times
    inside their 90 % interval.
    """

    step_time_form: str = ""
    memory_form: str = ""
    convergence_form: str = ""
    step_time_mape: float | None = None
    memory_mape: float | None = None
    convergence_mape: float | None = None
    coverage: float | None = None
    rows_used: int = 0
    rows_oom: int = 0
    rows_failed: int = 0
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check every field once; JSON knows lists only, a stored report comes back as a tuple."""
        for name in ("step_time_form", "memory_form", "convergence_form"):
            check_text(name, getattr(self, name), maximum=2000)
        for name in ("step_time_mape", "memory_mape", "convergence_mape", "coverage"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_real(name, getattr(self, name)))
        for name in ("rows_used", "rows_oom", "rows_failed"):
            self._take_int(name, minimum=0)
        if not isinstance(self.warnings, (list, tuple)):
            raise InvalidInputError(f"warnings must be a list, not {shown(self.warnings)}")
        object.__setattr__(self, "warnings", tuple(str(text) for text in self.warnings))

    def __str__(self) -> str:
        """What a person reads: one line a fact."""
        lines = [f"step time: {self.step_time_form}{_percent(self.step_time_mape)}"]
        if self.memory_form:
            lines.append(f"memory: {self.memory_form}{_percent(self.memory_mape)}")
        if self.convergence_form:
            lines.append(f"convergence: {self.convergence_form}{_percent(self.convergence_mape)}")
        lines.append(
            f"rows: {self.rows_used} used, {self.rows_oom} out of memory, {self.rows_failed} failed"
        )
        return "\n".join([*lines, *(f"warning: {text}" for text in self.warnings)])


def _percent(mape: float | None) -> str:
    """A leave-one-out error as people read it."""
    return "" if mape is None else f" (leave-one-out error {100 * mape:.1f} %)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Probed(Spec):
    """What was run, as (local batch size, world size): feasibility is a map, not a threshold."""

    ok: tuple[tuple[int, int], ...] = ()
    oom: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        """Lists of a JSON document become tuples."""
        for name in ("ok", "oom"):
            try:
                pairs = tuple((int(local), int(world)) for local, world in getattr(self, name))
            except (TypeError, ValueError) as error:
                raise SchemaError(f"probed.{name} must list [local batch, world size]") from error
            object.__setattr__(self, name, pairs)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"ok": [list(p) for p in self.ok], "oom": [list(p) for p in self.oom]}


@dataclass(frozen=True, kw_only=True, slots=True)
class ColdStart(Spec):
    """Where the answers of a bundle come from whose workload was never profiled here.

    `source` is `cross_model` (other models on this hardware) or `transferred` (the same workload
    on `other_hardware`); `models` are those it was learnt from, `local_batch_sizes` those it
    answers for.
    """

    source: Literal["cross_model", "transferred"]
    models: tuple[str, ...]
    local_batch_sizes: tuple[int, ...]
    other_hardware: str = ""

    def __post_init__(self) -> None:
        """Lists of a JSON document become tuples, checked."""
        check_choice("cold start source", self.source, Literal["cross_model", "transferred"])
        sizes = tuple(check_int("local_batch_sizes", size) for size in self.local_batch_sizes)
        if not sizes:
            raise SchemaError("a cold start must answer for one local batch size at least")
        object.__setattr__(self, "local_batch_sizes", sizes)
        object.__setattr__(self, "models", tuple(str(name)[:120] for name in self.models))

    def __str__(self) -> str:
        """One sentence for people."""
        names = ", ".join(self.models[:4]) + (", ..." if len(self.models) > 4 else "")
        others = f"{len(self.models)} other models here ({names})"
        if self.source == "transferred":
            return f"never profiled here: transferred from {self.other_hardware} by {others}"
        return f"never profiled here: predicted from {others}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "source": self.source,
            "models": list(self.models),
            "local_batch_sizes": list(self.local_batch_sizes),
            "other_hardware": self.other_hardware,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictorBundle:
    """Step time, memory and convergence of one workload on one hardware."""

    workload: Workload
    hardware: HardwareSpec
    step_time: StepTimePredictor
    memory: MemoryPredictor | None = None
    convergence: ConvergencePredictor | None = None
    probed: Probed = field(default_factory=Probed)
    report: FitReport = field(default_factory=FitReport)
    table_digest: str = ""
    cold_start: ColdStart | None = None
    _made: dict[str, Any] | None = field(default=None, init=False, repr=False, compare=False)

    def predict(
        self,
        frame: pd.DataFrame,
        *,
        level: float = 0.9,
        memory_limit_bytes: float | None = None,
        dataset_size: int | None = None,
        epochs: float | None = None,
        pricing: Pricing | None = None,
        usd_per_device_hour: float | None = None,
        usd_per_gb_hour: float | None = None,
        inter_node_bandwidth_bytes_per_s: float | None = None,
        inter_node_latency_s: float | None = None,
        gradient_compression: str | None = None,
        bucket_bytes: float | None = None,
    ) -> pd.DataFrame:
        """Answer one question a row; see `inference.predict_frame` for columns and options.

        `pricing` is the same as the two prices. Rows beyond what was measured are marked
        `extrapolated`, and an ExtrapolationWarning says how many there are.

        Raises:
            InvalidInputError: a question that cannot be asked.
        """
        from mlflow_tula.predictors.inference import predict_frame

        if pricing is not None:
            usd_per_device_hour = pricing.usd_per_device_hour
            usd_per_gb_hour = pricing.usd_per_gb_hour
        try:
            out = predict_frame(
                self._document(),
                frame,
                level=level,
                memory_limit_bytes=memory_limit_bytes,
                dataset_size=dataset_size,
                epochs=epochs,
                usd_per_device_hour=usd_per_device_hour,
                usd_per_gb_hour=usd_per_gb_hour,
                inter_node_bandwidth_bytes_per_s=inter_node_bandwidth_bytes_per_s,
                inter_node_latency_s=inter_node_latency_s,
                gradient_compression=gradient_compression,
                bucket_bytes=bucket_bytes,
            )
        except TulaError:
            raise
        except ValueError as error:
            raise InvalidInputError(str(error)) from error
        beyond, doubtful = int(out["extrapolated"].sum()), int(out["may_not_reach_target"].sum())
        if beyond:
            text = f"beyond what was measured: {beyond} of {len(out)} questions"
            warnings.warn(text, ExtrapolationWarning, stacklevel=2)
        if doubtful:
            text = f"{doubtful} of {len(out)} rows have a batch size that may not reach the target"
            warnings.warn(text, MayNotReachTargetWarning, stacklevel=2)
        return out

    def predict_columns(
        self,
        asked: Mapping[str, Sequence[int]],
        *,
        pricing: Pricing | None = None,
        **options: Any,
    ) -> dict[str, NDArray[Any]]:
        """`predict` without frames and warnings, for those who ask often; raises as it does.

        Args:
            asked: `local_batch_size`, `nodes`, `devices_per_node`, `accumulation_steps`.
            pricing: the prices.
            options: those of `predict`.
        """
        from mlflow_tula.predictors.inference import predict_columns

        if pricing is not None:
            options["usd_per_device_hour"] = pricing.usd_per_device_hour
            options["usd_per_gb_hour"] = pricing.usd_per_gb_hour
        try:
            return predict_columns(self._document(), asked, **options)
        except TulaError:
            raise
        except ValueError as error:
            raise InvalidInputError(str(error)) from error

    def step_seconds(self, asked: Mapping[str, Sequence[int]], **options: Any) -> list[float]:
        """`step_time_s` of `predict_columns` alone, for the answer to one further question.

        Args:
            asked: `local_batch_size`, `nodes`, `devices_per_node`, `accumulation_steps`.
            options: `bandwidth_bytes_per_s`, `latency_s`, `gradient_compression`.
        """
        import numpy as np

        from mlflow_tula.predictors.step_time_formulas import step_seconds

        names = ("local_batch_size", "nodes", "devices_per_node", "accumulation_steps")
        setup = [np.asarray(asked[name], float) for name in names]
        seconds: list[float] = step_seconds(
            self._document()["step_time"], setup, **options
        ).tolist()
        return seconds

    def _document(self) -> Mapping[str, Any]:
        """`to_dict`, made once: whoever is given it only reads."""
        if self._made is None:
            object.__setattr__(self, "_made", self.to_dict())
        assert self._made is not None
        return self._made

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; the same fit gives the same bytes (no times, no host names added)."""
        return {
            "kind": BUNDLE_KIND,
            "schema_version": BUNDLE_SCHEMA_VERSION,
            "workload": self.workload.to_dict(),
            "hardware": self.hardware.to_dict(),
            "step_time": self.step_time.to_dict(),
            "memory": None if self.memory is None else self.memory.to_dict(),
            "convergence": None if self.convergence is None else self.convergence.to_dict(),
            "probed": self.probed.to_dict(),
            "report": {**self.report.to_dict(), "warnings": list(self.report.warnings)},
            "table_digest": self.table_digest,
            **({} if self.cold_start is None else {"cold_start": self.cold_start.to_dict()}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; a newer schema or another kind of document raises SchemaError."""
        check_document(data, kind=BUNDLE_KIND, version=BUNDLE_SCHEMA_VERSION)
        for name in ("workload", "hardware", "step_time"):
            if name not in data:
                raise SchemaError(f"a {BUNDLE_KIND} document needs {name!r}, and has none")
        facts: dict[str, Any] = {
            "workload": Workload.from_dict(data["workload"]),
            "hardware": HardwareSpec.from_dict(data["hardware"]),
            "probed": Probed.from_dict(data.get("probed", {})),
            "report": FitReport.from_dict(data.get("report", {})),
        }
        try:
            check_bundle(data)  # before anything is evaluated
        except ValueError as error:
            raise SchemaError(str(error)) from error
        memory, convergence = data.get("memory"), data.get("convergence")
        cold = data.get("cold_start")
        return cls(
            step_time=StepTimePredictor.from_dict(data["step_time"]),
            memory=None if memory is None else MemoryPredictor.from_dict(memory),
            convergence=(
                None if convergence is None else ConvergencePredictor.from_dict(convergence)
            ),
            **facts,
            table_digest=str(data.get("table_digest", "")),
            cold_start=None if cold is None else ColdStart.from_dict(cold),
        )
