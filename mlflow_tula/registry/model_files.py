"""What lies in a registered model: the script, `bundle.json`, `table.json` and the formula files.

`log_predictor` writes them as an MLflow model of a run; `read_json` reads one back, straight from
the folder where the store is local, without importing a flavor or building a model.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import mlflow
import mlflow.pyfunc
from mlflow import MlflowClient
from mlflow.models.model import Model, ModelInfo
from mlflow.models.signature import ModelSignature
from mlflow.types.schema import ColSpec, ParamSchema, ParamSpec, Schema, TensorSpec

from mlflow_tula import predictors
from mlflow_tula.documents import MAX_JSON_BYTES, parse_json, read_bytes
from mlflow_tula.errors import SchemaError, StoreError
from mlflow_tula.predictors.bundle import BUNDLE_SCHEMA_VERSION, PredictorBundle
from mlflow_tula.registry.promotion import Verdict
from mlflow_tula.registry.pyfunc_model import COLUMNS, PARAMETERS
from mlflow_tula.specs import HardwareSpec, Workload
from mlflow_tula.stores import masked, quiet_mlflow
from mlflow_tula.table import ProfileTable

MODEL_NAME = "predictor"
BUNDLE_FILE = "bundle.json"
TABLE_FILE = "table.json"
DIGEST_TAG = "tula.bundle_digest"
_TYPES = {"int64": "long", "float64": "double", "bool": "boolean"}


def log_predictor(bundle: PredictorBundle, table: ProfileTable, *, run_id: str) -> ModelInfo:
    """Log the bundle as an MLflow model of the run; nothing is registered yet."""
    client = MlflowClient()
    # Made here, in the run's experiment: MLflow would take the active one's, whichever that is.
    entry = client.create_logged_model(
        client.get_run(run_id).info.experiment_id,
        name=MODEL_NAME,
        source_run_id=run_id,
        params={key: str(value) for key, value in bundle.workload.to_dict().items()},
        tags=model_tags(bundle.workload, bundle.hardware),
    )
    try:
        return _write_model(bundle, table, run_id=run_id, model_id=entry.model_id)
    except BaseException:
        client.finalize_logged_model(entry.model_id, "FAILED")
        raise


def _write_model(
    bundle: PredictorBundle, table: ProfileTable, *, run_id: str, model_id: str
) -> ModelInfo:
    """Fill the logged model with the script and its artifacts."""
    with tempfile.TemporaryDirectory(prefix="tula-") as scratch:
        folder = Path(scratch)
        (folder / BUNDLE_FILE).write_text(_dumped(bundle.to_dict()), encoding="utf-8")
        (folder / TABLE_FILE).write_text(_dumped(table.to_dict()), encoding="utf-8")
        copy_formulas(folder / "predictors")
        with quiet_mlflow(), warnings.catch_warnings():
            # MLflow hints at integer columns that may be missing; ours may not.
            warnings.filterwarnings("ignore", message=".*integer column.*")
            info: ModelInfo = Model.log(
                artifact_path=None,
                name=MODEL_NAME,
                flavor=mlflow.pyfunc,
                run_id=run_id,
                model_id=model_id,
                python_model=str(Path(__file__).with_name("pyfunc_model.py")),
                artifacts={
                    "bundle": str(folder / BUNDLE_FILE),
                    "table": str(folder / TABLE_FILE),
                    "predictors": str(folder / "predictors"),
                },
                signature=signature(bundle),
                input_example=input_example(bundle),
                pip_requirements=pip_requirements(),
                metadata={"tula_version": _own_version(), "table_digest": table.digest},
            )
            return info


def copy_formulas(folder: Path) -> None:
    """Copy the files that predict with numpy and pandas alone."""
    source = Path(predictors.__file__).parent
    folder.mkdir(parents=True, exist_ok=True)
    for name in predictors.PORTABLE_FILES:
        shutil.copy(source / name, folder / name)


def input_example(bundle: PredictorBundle) -> Any:
    """Two questions near what was measured, as a frame."""
    import pandas as pd

    smallest = min((local for local, _ in bundle.probed.ok), default=32)
    frame = pd.DataFrame({name: [1, 1] for name in COLUMNS}, dtype="int64")
    frame["global_batch_size"] = [smallest, 2 * smallest]
    return frame


def signature(bundle: PredictorBundle) -> ModelSignature:
    """Whole numbers in, one row of predictions out; the parameters of pyfunc_model.py."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answer = bundle.predict(input_example(bundle))
    outputs: list[ColSpec | TensorSpec] = [
        ColSpec(_TYPES.get(str(kind), "string"), str(name)) for name, kind in answer.dtypes.items()
    ]
    inputs: list[ColSpec | TensorSpec] = [
        ColSpec("long", name, required=needed) for name, needed in COLUMNS.items()
    ]
    params = [
        ParamSpec(name, kind, int(default) if kind == "long" else default)
        for name, (kind, default) in PARAMETERS.items()
    ]
    return ModelSignature(
        inputs=Schema(inputs), outputs=Schema(outputs), params=ParamSchema(params)
    )


def pip_requirements() -> list[str]:
    """What the model needs to predict: no torch, and no package that has to be published first."""
    major, minor = mlflow.__version__.split(".")[:2]
    return [f"mlflow>={major}.{minor},<{int(major) + 1}", "numpy>=1.26", "pandas>=2.2"]


def read_json(model_uri: str, name: str) -> dict[str, Any]:
    """One JSON document of a logged model.

    Args:
        model_uri: where the model's folder is, as the registry's download address says.
        name: file name among its artifacts.

    Raises:
        StoreError: the file is gone or cannot be fetched.
        SchemaError: it is no JSON object within the limits of documents.py.
    """
    try:
        content = _read_bytes(model_uri, f"artifacts/{name}")
    except (OSError, mlflow.exceptions.MlflowException) as error:
        reason = (masked(error).splitlines() or [type(error).__name__])[0]
        raise StoreError(
            f"cannot read {name} of the registered model at {masked(model_uri)}: {reason}; "
            "profile and register it again"
        ) from error
    data = parse_json(content, f"{name} of the registered model")
    if not isinstance(data, dict):
        raise SchemaError(f"{name} of the registered model must be a JSON object")
    return data


def _read_bytes(model_uri: str, path: str) -> bytes:
    """What the file holds: read in place from a local folder, downloaded from elsewhere."""
    parts = urlsplit(model_uri)
    if parts.scheme in {"", "file"}:
        return read_bytes(Path(unquote(parts.path)) / path, MAX_JSON_BYTES)
    with tempfile.TemporaryDirectory(prefix="tula-") as scratch:
        fetched = mlflow.artifacts.download_artifacts(
            artifact_uri=f"{model_uri.rstrip('/')}/{path}", dst_path=scratch
        )
        return read_bytes(fetched, MAX_JSON_BYTES)


def model_tags(workload: Workload, hardware: HardwareSpec) -> dict[str, str]:
    """What the registered model is for: the same for all of its versions."""
    return {
        "tula.workload": workload.slug,
        "tula.model": workload.model,
        "tula.dataset": workload.dataset,
        "tula.precision": workload.precision,
        "tula.optimizer": workload.optimizer,
        "tula.strategy": workload.strategy,
        "tula.hardware": hardware.slug,
        "tula.fingerprint": hardware.fingerprint,
        "tula.device_type": hardware.device_type,
        "tula.device_name": hardware.device_name,
    }


def version_tags(bundle: PredictorBundle, table: ProfileTable, verdict: Verdict) -> dict[str, str]:
    """The model's tags, and what tells this version from the others."""
    report = bundle.report
    tags = {
        **model_tags(bundle.workload, bundle.hardware),
        "tula.schema_version": str(BUNDLE_SCHEMA_VERSION),
        "tula.table_digest": table.digest,
        DIGEST_TAG: bundle_digest(bundle),
        "tula.gate": "promoted" if verdict.promoted else "kept",
        "tula.gate_reason": verdict.reason[:500],
    }
    for key in ("step_time_mape", "memory_mape", "convergence_mape"):
        if (value := getattr(report, key)) is not None:
            tags[f"tula.{key}"] = f"{value:.6g}"
    return tags


def bundle_digest(bundle: PredictorBundle) -> str:
    """The same for the same predictors: of what `bundle.json` holds."""
    return hashlib.sha256(_dumped(bundle.to_dict()).encode()).hexdigest()[:16]


def _dumped(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def _own_version() -> str:
    """The installed version, for people who look into the model."""
    try:
        return metadata.version("mlflow-tula")
    except metadata.PackageNotFoundError:
        return "unknown"
