"""Results -> MLflow: a profile as nested runs, curves, tables, figures and words.

The parent run holds the curves (`log_metric` with the batch size as step, so that MLflow draws
them over the batch size), the table as artifact and as dataset, the figure and the description;
each probe is a nested run. Nothing here runs inside a timed step.
"""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow_tula.plots.overlays import Overlay, overlays
from mlflow_tula.predictors.bundle import PredictorBundle
from mlflow_tula.recommend.recommendation import Recommendation
from mlflow_tula.registry import RegisteredPredictor
from mlflow_tula.registry.measurements import FIT_METRICS, profile_dataset
from mlflow_tula.runs import PREFIX, Run, log_batch, start_run
from mlflow_tula.specs import HardwareSpec, Workload
from mlflow_tula.stores import quiet_mlflow, store_errors
from mlflow_tula.table import Measurement, ProfileTable
from mlflow_tula.tracking.background import Background
from mlflow_tula.tracking.descriptions import describe_profile
from mlflow_tula.tracking.observed_tags import spec_tags
from mlflow_tula.tracking.profile_files import write_documents, write_figures

__all__ = [
    "ProbeLogger",
    "Run",
    "log_profile",
    "log_registration",
    "log_workload",
    "start_run",
]

_logger = logging.getLogger(__name__)

CURVES = ("step_time_s", "epoch_time_s", "throughput", "peak_memory_bytes")
"""Quantities of which measured and predicted values are logged over the batch size."""

_TABLE = "profile_table.json"
_COUNTS = ("local_batch_size", "nodes", "devices_per_node", "accumulation_steps")


class ProbeLogger:
    """Logs each probe as a nested run, as soon as it is finished.

    Use as `profile(..., on_event=ProbeLogger(run))`, or call `log` with a Measurement. A store
    that fails here costs a warning, not the sweep; `log_profile` logs what is missing at the end.
    """

    def __init__(self, run: Run) -> None:
        """Log below this run."""
        self.run = run
        self.logged: list[Measurement] = []
        self.before = _logged_before(run) if run.continued else frozenset()

    def __call__(self, event: Any) -> None:
        """Take a ProfileEvent; only finished probes matter."""
        measurement = getattr(event, "measurement", None)
        if measurement is None or getattr(event, "kind", "") != "probe_finished":
            return
        try:
            details = dict(getattr(event, "details", None) or {})
            self.log(measurement, step_times_s=details.pop("step_times_s", ()), details=details)
        except Exception as error:
            _logger.warning("a probe could not be logged to MLflow yet: %s", error)

    def log(
        self,
        row: Measurement,
        *,
        step_times_s: Sequence[float] = (),
        details: Mapping[str, object] | None = None,
    ) -> str:
        """Log one probe and return its run's id.

        Args:
            row: what was measured.
            step_times_s: each step's time, drawn over the steps.
            details: what a row has no column for; numbers become metrics, words tags.
        """
        run_id = _log_probe(self.run, row, step_times_s, details or {})
        self.logged.append(row)
        return run_id


def _logged_before(run: Run) -> frozenset[tuple[str, ...]]:
    """The probes that a run which goes on holds already, as the texts of their counts."""
    condition = (
        f"tags.`mlflow.parentRunId` = '{run.run_id}' AND tags.`tula.command` = 'probe' "
        "AND status != 'KILLED'"
    )
    with store_errors("search for the probes of a run"):
        children = run.client.search_runs([run.experiment_id], condition)
    return frozenset(
        tuple(child.data.params.get(PREFIX + name, "") for name in _COUNTS) for child in children
    )


def _log_probe(
    run: Run,
    row: Measurement,
    step_times_s: Sequence[float] = (),
    details: Mapping[str, object] | None = None,
) -> str:
    """A nested run: what was asked, every number, each step's time, and how it ended."""
    client, now = run.client, int(time.time() * 1000)
    asked = {name: getattr(row, name) for name in (*_COUNTS, "global_batch_size")}
    name = f"probe {row.local_batch_size} x {row.accumulation_steps} x {row.world_size}"
    with store_errors("log a probe"):
        child = client.create_run(
            run.experiment_id,
            start_time=now - int(1000 * (row.probe_time_s or 0.0)),
            run_name=name,
            tags={"mlflow.parentRunId": run.run_id, "tula.command": "probe"},
        )
    run_id = str(child.info.run_id)
    metrics: list[tuple[str, object, int]] = [(key, value, 0) for key, value in asked.items()]
    numbers = {key: value for key, value in row.to_dict().items() if key not in asked}
    metrics += [(key, value, 0) for key, value in numbers.items()]
    metrics += [("each/step_time_s", value, step) for step, value in enumerate(step_times_s, 1)]
    metrics += [(f"details/{key}", value, 0) for key, value in (details or {}).items()]
    words = {key: value for key, value in (details or {}).items() if isinstance(value, str)}
    log_batch(
        client,
        run_id,
        metrics=metrics,
        params={PREFIX + key: str(value) for key, value in asked.items()},
        tags={
            **{f"tula.{key}": value[:500] for key, value in words.items()},
            "tula.status": row.status,
            "tula.reason": row.reason[:500] or None,
        },
    )
    with store_errors("close a probe"), quiet_mlflow():
        client.set_terminated(run_id, status="FINISHED" if row.status == "ok" else "FAILED")
    return run_id


def log_workload(
    run: Run,
    workload: Workload,
    hardware: HardwareSpec,
    settings: Mapping[str, object] | None = None,
) -> None:
    """Tags and parameters that say what runs on what; for profiling and training alike.

    Args:
        run: where to.
        workload: what is trained.
        hardware: on what.
        settings: options of the command, logged as parameters `tula.<name>`; numbers as metrics
            `settings/<name>` too, since parameters are strings in searches.
    """
    machine = {
        name: getattr(hardware, name)
        for name in ("device_type", "device_name", "device_memory_bytes", "devices_per_node")
    }
    run.params({**workload.to_dict(), **machine, **(settings or {})})
    run.tag(
        {
            **spec_tags(workload.to_dict(), hardware),
            "tula.cpu_model": hardware.cpu_model or None,
            "tula.backend": hardware.backend or None,
            "tula.torch_version": hardware.torch_version or None,
            "tula.driver_version": hardware.driver_version or None,
        }
    )
    numbers = {**workload.to_dict(), **machine, **(settings or {})}
    run.metrics(
        {
            f"settings/{name}": value
            for name, value in numbers.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
    )


def log_profile(
    run: Run,
    table: ProfileTable,
    bundle: PredictorBundle | None = None,
    recommendation: Recommendation | None = None,
    *,
    probes: ProbeLogger | None = None,
    registered: RegisteredPredictor | None = None,
    settings: Mapping[str, object] | None = None,
    memory_limit_bytes: float | None = None,
    notes: Sequence[str] = (),
    nested: bool = True,
) -> None:
    """Log everything a profile gave; called once, when the sweep (or what came of it) is over.

    Args:
        run: the parent run.
        table: what was measured, also after Ctrl-C.
        bundle: what was fitted to it, if anything could be.
        recommendation: the decision, if there is one.
        probes: who has logged probes already; the others become nested runs now.
        registered: the registered version, for the description.
        settings: options of the command.
        memory_limit_bytes: the limit that was used, when it is not the device's memory.
        notes: further lines of the description.
        nested: make a nested run of every probe that has none yet.
    """
    with tempfile.TemporaryDirectory(prefix="tula-") as scratch, Background() as store:
        folder = Path(scratch)
        store.do(log_workload, run, table.workload, table.hardware, settings)
        if nested:
            store.do(_log_missing_probes, run, table, probes)
        pairs = overlays(table, bundle, recommendation) if bundle is not None else ()
        curves = _curve_metrics(pairs)
        # What `register` has logged to this run already is not logged again.
        told = registered is not None and registered.added and registered.run_id == run.run_id
        summary = _summary(table, None if told else bundle, recommendation)
        tags = {"tula.table_digest": table.digest}
        store.do(run.log, metrics=[*curves, *summary], tags=tags)
        words = _registered(registered)
        note = describe_profile(table, bundle, recommendation, registered=words, notes=notes)
        store.do(run.describe, note)
        store.do(_log_table, run, table)
        store.do(run.files, write_documents(folder / "doc", table, bundle, recommendation))
        if bundle is not None:
            drawn = write_figures(folder, table, bundle, recommendation, memory_limit_bytes)
            for full in drawn:
                store.do(run.files, full)


def _log_missing_probes(run: Run, table: ProfileTable, probes: ProbeLogger | None) -> None:
    """Nested runs for the rows that nobody has logged yet."""
    logged = list(probes.logged) if probes is not None else []
    before = probes.before if probes is not None else frozenset()
    for row in table.measurements:
        if row in logged:
            logged.remove(row)
        elif tuple(str(getattr(row, name)) for name in _COUNTS) not in before:
            _log_probe(run, row)


def log_registration(run: Run, registered: RegisteredPredictor) -> None:
    """Note on the run, and in its description, which version came of it and what the gate said."""
    tags = run.client.get_run(run.run_id).data.tags
    note = tags.get("mlflow.note.content", "")
    line = f"- registered as {_registered(registered)}"
    if line not in note:
        head, next_steps, tail = note.partition("\n\n**Next**")
        run.describe(f"{head}\n{line}{next_steps}{tail}".lstrip("\n"))
    name, suffix = tags.get("mlflow.runName", ""), f" v{registered.version}"
    # Where several runs are compared, their names alone tell their curves apart.
    ours = name.endswith(registered.workload_slug)
    run.tag(
        {
            "mlflow.runName": name + suffix if ours and name else None,
            "tula.registered_model": registered.name,
            "tula.registered_version": registered.version,
            "tula.gate": "promoted" if registered.promoted else "kept",
            "tula.gate_reason": registered.reason[:500],
        }
    )


def _registered(registered: RegisteredPredictor | None) -> str:
    """The registered version in words."""
    if registered is None:
        return ""
    return f"`{registered.name}` version {registered.version}: {registered.reason}"


def _curve_metrics(pairs: Sequence[Overlay]) -> list[tuple[str, object, int]]:
    """`<quantity>/<layout>/measured` and `predicted` (with its ends) over the batch size."""
    found: list[tuple[str, object, int]] = []
    for pair in pairs:
        for quantity in CURVES:
            name = f"{quantity}/{pair.name}"
            rows = pair.measured
            values = rows[quantity] if quantity in rows else _throughput(pair)
            for size, value in zip(rows["global_batch_size"], values, strict=True):
                found.append((f"{name}/measured", value, int(size)))
            for end in ("", "_lower", "_upper"):
                columns = (pair.predicted["global_batch_size"], pair.predicted[quantity + end])
                found += [
                    (f"{name}/predicted{end}", value, int(size))
                    for size, value in zip(*columns, strict=True)
                ]
    return found


def _throughput(pair: Overlay) -> Any:
    """Samples per second of the measured rows."""
    return pair.measured["global_batch_size"] / pair.measured["step_time_s"].astype(float)


def _summary(
    table: ProfileTable,
    bundle: PredictorBundle | None,
    recommendation: Recommendation | None,
) -> list[tuple[str, object, int]]:
    """The numbers by which runs are compared and searched."""
    numbers: dict[str, object] = {
        "trials_ok": len(table.ok),
        "trials_oom": sum(row.status == "oom" for row in table.measurements),
        "trials_failed": sum(row.status == "failed" for row in table.measurements),
        "profiling_time_s": sum(row.probe_time_s or 0.0 for row in table.measurements),
    }
    if bundle is not None:
        for name in FIT_METRICS:
            numbers[f"fit/{name}"] = getattr(bundle.report, name)
    if recommendation is not None:
        for name in (*_COUNTS, "global_batch_size"):
            numbers[f"choice/{name}"] = getattr(recommendation, name)
        for name in ("step_time_s", "epoch_time_s", "peak_memory_bytes", "time_s", "cost_usd"):
            numbers[f"choice/{name}"] = getattr(recommendation.choice, name)
    return [(name, value, 0) for name, value in numbers.items()]


def _log_table(run: Run, table: ProfileTable) -> None:
    """The table for MLflow's table view, and as the run's input with its digest."""
    frame = table.to_frame()
    with store_errors("log the profile table"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # MLflow would append to a table that is there already, from before a resume.
        there = {one.path for one in run.client.list_artifacts(run.run_id)}
        if _TABLE not in there:
            run.client.log_table(run.run_id, data=frame, artifact_file=_TABLE)
        run.client.log_inputs(run.run_id, [profile_dataset(table)])
