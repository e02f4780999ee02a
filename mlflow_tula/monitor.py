"""Drift: does a training, running or finished, take the time and memory that were predicted?

Protocol: the median step time of the last steps (the first few, which warm up, are left out)
against the interval that the registered predictor gives for the run's own configuration. Inside it
is `within`; outside it `slower` or `faster`. The same for peak memory, `more` or `less`.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from mlflow_tula.errors import InvalidInputError, NotRegisteredError, TulaWarning
from mlflow_tula.registry import load
from mlflow_tula.registry.lookup import require_store
from mlflow_tula.runs import PREFIX
from mlflow_tula.specs import Spec
from mlflow_tula.stores import store_errors

if TYPE_CHECKING:
    from mlflow.entities import Run

Drift = Literal["within", "slower", "faster"]
MemoryDrift = Literal["within", "more", "less"]

STEP_TIMES = ("step/step_time_s", "step_time_s")
"""Metrics that may hold step times: of each step, else of each epoch."""

LATEST = "latest"
"""In the place of a run's id: the newest training."""

_WINDOW = 200
_WARM_UP = 3
_MODEL_OF_SOURCE = re.compile(r"models:/(?P<name>[^@/ ]+)@\S+ \(version (?P<version>\d+)\)")
_COUNTS = ("global_batch_size", "nodes", "devices_per_node", "accumulation_steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class Report(Spec):
    """What a run takes against what was predicted for it; seconds and bytes."""

    run_id: str
    predictor: str
    global_batch_size: int
    num_steps: int
    step_time_s: float
    predicted_s: float
    lower_s: float
    upper_s: float
    drift: Drift
    extrapolated: bool = False
    peak_memory_bytes: float | None = None
    predicted_bytes: float | None = None
    memory_drift: MemoryDrift | None = None

    @property
    def ratio(self) -> float:
        """Measured over predicted step time."""
        return self.step_time_s / self.predicted_s

    def __str__(self) -> str:
        """One sentence."""
        text = (
            f"{self.drift}: {1e3 * self.step_time_s:.4g} ms a step at batch "
            f"{self.global_batch_size}, predicted {1e3 * self.predicted_s:.4g} ms "
            f"({1e3 * self.lower_s:.4g} to {1e3 * self.upper_s:.4g}), over {self.num_steps} steps"
        )
        if self.memory_drift in ("more", "less"):
            text += f"; {self.memory_drift} memory than predicted"
        return text


def monitor(run_id: str, *, level: float = 0.9, tag: bool = True) -> Report:
    """Compare a training run with its prediction.

    Args:
        run_id: the MLflow run, of `tula train` or of any training that logs step times;
            "latest" is the newest of `tula train`.
        level: probability of the interval.
        tag: set `tula.drift`, `tula.drift_ratio` and `tula.drift_predictor` on the run.

    Raises:
        InvalidInputError: no such run, or it does not say what was run.
        NotRegisteredError: no predictor for its workload on its hardware.
    """
    require_store()  # or MLflow would make one, to look for a run in it
    client = MlflowClient()
    run = _latest_training(client) if run_id == LATEST else _get_run(client, run_id)
    name, version = _predictor(run)
    asked = _configuration(run)
    times = _step_times(client, run)
    bundle = load(name, version=version)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TulaWarning)
        row = bundle.predict(_frame(asked), level=level).iloc[0]
    measured = median(times)
    report = Report(
        run_id=run.info.run_id,
        predictor=f"models:/{name}/{version}" if version else f"models:/{name}@champion",
        global_batch_size=asked["global_batch_size"],
        num_steps=len(times),
        step_time_s=measured,
        predicted_s=float(row["step_time_s"]),
        lower_s=float(row["step_time_s_lower"]),
        upper_s=float(row["step_time_s_upper"]),
        drift=_verdict(measured, row, "step_time_s", "faster", "slower"),
        extrapolated=bool(row["extrapolated"]),
        **_memory(run, row),
    )
    if tag:
        _tag(client, report)
    return report


def _latest_training(client: MlflowClient) -> Run:
    """The newest run of `tula train` in the store."""
    with store_errors("look for the newest training"):
        experiments = [one.experiment_id for one in client.search_experiments()]
        found = client.search_runs(
            experiments,
            filter_string="tags.`tula.command` = 'train'",
            order_by=["attributes.start_time DESC"],
            max_results=1,
        )
    if not found:
        raise InvalidInputError(
            "no run of `tula train` is in this store: train first, or give the id of a run"
        )
    return found[0]


def _get_run(client: MlflowClient, run_id: str) -> Run:
    """The run, or one line that says how to find one."""
    with store_errors(f"read the run {run_id}"):
        try:
            return client.get_run(run_id)
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            raise InvalidInputError(
                f"there is no run {run_id!r} in this store: give the id that `mlflow ui` shows"
            ) from error


def _predictor(run: Run) -> tuple[str, int | None]:
    """The predictor that gave the run its batch size; else that of its workload and hardware."""
    tags = run.data.tags
    if "tula.registered_model" in tags:
        version = tags.get("tula.registered_version", "")
        return tags["tula.registered_model"], int(version) if version.isdigit() else None
    said = _MODEL_OF_SOURCE.search(run.data.params.get(f"{PREFIX}source", ""))
    if said is not None:
        return said["name"], int(said["version"])
    workload, hardware = tags.get("tula.workload"), tags.get("tula.hardware")
    if not workload or not hardware:
        raise NotRegisteredError(
            f"the run {run.info.run_id} does not say what it trains (tags tula.workload and "
            "tula.hardware, or tula.registered_model): set them, or train with `tula train`"
        )
    return f"tula.{workload}.{hardware}", None


def _configuration(run: Run) -> dict[str, int]:
    """Batch size and devices of the run, from its parameters `tula.<name>` or `<name>`."""
    params = run.data.params
    found: dict[str, int] = {}
    for name in _COUNTS:
        text = params.get(f"{PREFIX}{name}", params.get(name, ""))
        if text.strip().isdigit() and int(text) > 0:
            found[name] = int(text)
    if "global_batch_size" not in found:
        text = params.get("batch_size", "")
        if not text.isdigit():
            raise InvalidInputError(
                f"the run {run.info.run_id} has no parameter tula.global_batch_size or batch_size: "
                "log the batch size, or train with `tula train`"
            )
        found["global_batch_size"] = int(text)
    return {name: found.get(name, 1) for name in _COUNTS}


def _step_times(client: MlflowClient, run: Run) -> list[float]:
    """The last step times, without those that warm up."""
    for name in STEP_TIMES:
        if name not in run.data.metrics:
            continue
        with store_errors("read the run's step times"):
            history = client.get_metric_history(run.info.run_id, name)
        values = [one.value for one in sorted(history, key=lambda one: one.step)]
        if len(values) > 2 * _WARM_UP:
            values = values[_WARM_UP:]
        values = [value for value in values if value > 0][-_WINDOW:]
        if values:
            return values
    raise InvalidInputError(
        f"the run {run.info.run_id} has logged no step time yet ({' or '.join(STEP_TIMES)}): ask "
        "again after its first steps"
    )


def _frame(asked: dict[str, int]) -> Any:
    import pandas as pd

    return pd.DataFrame([asked])


def _verdict(measured: float, row: Any, name: str, below: Any, above: Any) -> Any:
    """Where a value lies: in its interval, below or above it."""
    if measured < float(row[f"{name}_lower"]):
        return below
    return above if measured > float(row[f"{name}_upper"]) else "within"


def _memory(run: Run, row: Any) -> dict[str, Any]:
    """The run's peak memory against its prediction, where both are known."""
    measured = run.data.metrics.get("peak_memory_bytes")
    predicted = float(row["peak_memory_bytes"])
    if not measured or predicted != predicted:
        return {}
    return {
        "peak_memory_bytes": measured,
        "predicted_bytes": predicted,
        "memory_drift": _verdict(measured, row, "peak_memory_bytes", "less", "more"),
    }


def _tag(client: MlflowClient, report: Report) -> None:
    """What searches and people see on the run."""
    tags = {
        "tula.drift": report.drift,
        "tula.drift_ratio": f"{report.ratio:.4g}",
        "tula.drift_predictor": report.predictor,
        "tula.drift_memory": report.memory_drift,
    }
    with store_errors("tag the run"):
        for key, value in tags.items():
            if value is not None:
                client.set_tag(report.run_id, key, value)
