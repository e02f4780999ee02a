"""What a version rests on, as MLflow knows it: datasets with digests, numbers on the logged model.

The profile table is an input of the run (context `profile`), and so are the rows on which the gate
compared the version with the champion (context `gate`). The numbers stand on the run and on the
logged model, each with the dataset that it was measured on.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.data.pandas_dataset import from_pandas
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric

from mlflow_tula.predictors.bundle import PredictorBundle
from mlflow_tula.registry.promotion import Verdict
from mlflow_tula.table import ProfileTable

FIT_METRICS = ("step_time_mape", "memory_mape", "convergence_mape", "coverage")
"""Fields of the fit's report that are logged as `fit/<name>`."""


def profile_dataset(table: ProfileTable) -> DatasetInput:
    """The profile table under its own digest, as an input of a run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        facts = from_pandas(table.to_frame(), name=table.workload.slug, digest=table.digest)
        named = facts.to_dict()
    dataset = Dataset(
        name=named["name"],
        digest=named["digest"],
        source_type=named["source_type"],
        source=named["source"],
        schema=named.get("schema"),
        profile=named.get("profile"),
    )
    return DatasetInput(dataset=dataset, tags=[InputTag("mlflow.data.context", "profile")])


def log_evidence(
    client: MlflowClient,
    run_id: str,
    model_id: str,
    bundle: PredictorBundle,
    table: ProfileTable,
    verdict: Verdict,
) -> None:
    """Log datasets, the fit's errors and the gate's numbers to the run and to the logged model."""
    inputs = [profile_dataset(table)]
    report = {f"fit/{name}": getattr(bundle.report, name) for name in FIT_METRICS}
    metrics = _metrics(report, model_id, inputs[0])
    if verdict.held_out is not None:
        inputs.append(_left_out_dataset(table, verdict))
        found = verdict.held_out.metrics().items()
        numbers = {f"held_out/{name}": value for name, value in found}
        metrics += _metrics(numbers, model_id, inputs[-1])
    client.log_inputs(run_id, inputs)
    client.log_batch(run_id, metrics=metrics)


def _left_out_dataset(table: ProfileTable, verdict: Verdict) -> DatasetInput:
    """The rows on which the gate judged: named, counted and with a digest, not stored again."""
    assert verdict.held_out is not None, "only called where something was left out"
    dataset = Dataset(
        name=f"{table.workload.slug} left out",
        digest=verdict.rows_digest,
        source_type="code",
        source=json.dumps({"tags": {"mlflow.source.name": "mlflow_tula.registry.promotion"}}),
        profile=json.dumps({"num_rows": verdict.held_out.rows}),
    )
    return DatasetInput(dataset=dataset, tags=[InputTag("mlflow.data.context", "gate")])


def _metrics(
    numbers: Mapping[str, float | None], model_id: str, given: DatasetInput
) -> list[Metric]:
    """What is known, on the model, measured on this dataset."""
    now = int(time.time() * 1000)
    return [
        Metric(
            name,
            value,
            now,
            0,
            model_id=model_id,
            dataset_name=given.dataset.name,
            dataset_digest=given.dataset.digest,
        )
        for name, value in numbers.items()
        if value is not None and math.isfinite(value)
    ]
