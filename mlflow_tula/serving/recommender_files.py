"""Register the recommender: a models-from-code model that holds no predictor, only the way to ask.

`ensure_recommender` is called whenever a predictor is registered by a command, and does something
once per release: the first time, and when the package has become another.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import mlflow
import mlflow.pyfunc
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.models.model import Model
from mlflow.models.signature import ModelSignature
from mlflow.types.schema import Array, ColSpec, DataType, Schema, TensorSpec

import mlflow_tula
from mlflow_tula.errors import DanglingAliasError, NotRegisteredError
from mlflow_tula.registry import CHAMPION
from mlflow_tula.registry.lookup import find_version
from mlflow_tula.registry.model_files import pip_requirements
from mlflow_tula.serving.catalogue import Catalogue
from mlflow_tula.serving.champions import split_name
from mlflow_tula.serving.questions import FIELDS
from mlflow_tula.serving.recommender import WHO
from mlflow_tula.stores import check_store, ensure_experiment, quiet_mlflow, store_errors

_logger = logging.getLogger(__name__)

RECOMMENDER = "tula.recommender"
"""The registered name; no predictor has it, because it names no workload."""

_MODEL = "recommender"
_SCRIPT = Path(__file__).with_name("recommender_model.py")
_DIGEST = "tula.code_digest"
_LEFT_OUT = (
    "cli",
    "comparing",
    "integrations",
    "launch",
    "methods",
    "plots",
    "plugin",
    "probing",
    "tracking",
    "training",
    "workloads",
)
"""Rooms that the recommender never enters; they need torch, click or a user at a keyboard."""

_EXAMPLE = {
    "model": "vgg11",
    "dataset": "digits",
    "hardware": "4x-tesla-t4-1a2b3c4d",
    "objective": "min_cost",
    "epochs": 90.0,
    "usd_per_device_hour": 0.35,
    "nodes": 1,
    "devices_per_node": 1,
}
_OUTPUTS: dict[str, DataType | Array] = {
    "name": DataType.string,
    "version": DataType.long,
    "global_batch_size": DataType.long,
    "local_batch_size": DataType.long,
    "accumulation_steps": DataType.long,
    "nodes": DataType.long,
    "devices_per_node": DataType.long,
    "objective": DataType.string,
    "step_time_s": DataType.double,
    "epoch_time_s": DataType.double,
    "peak_memory_bytes": DataType.double,
    "time_s": DataType.double,
    "time_s_lower": DataType.double,
    "time_s_upper": DataType.double,
    "cost_usd": DataType.double,
    "extrapolated": DataType.boolean,
    "reasons": Array(DataType.string),
    "warnings": Array(DataType.string),
}
_OPTIONAL = {"peak_memory_bytes", "time_s", "time_s_lower", "time_s_upper", "cost_usd"}


def ensure_recommender(example: str | None = None, *, force: bool = False) -> tuple[int, bool]:
    """The champion of `tula.recommender`, registered if there is none of this release.

    Args:
        example: the registered predictor that the input example asks.
        force: register a new version in any case.

    Returns:
        The version, and whether this call registered it.

    Raises:
        StoreError: the store refuses.
    """
    check_store()
    digest = code_digest()
    if not force:
        try:
            champion = find_version(RECOMMENDER, CHAMPION, None)
        except (NotRegisteredError, DanglingAliasError):
            pass
        else:
            if (champion.tags or {}).get(_DIGEST) == digest:
                return int(champion.version), False
    return _register(digest, _example(example)), True


def code_digest() -> str:
    """What tells two releases of the recommender apart."""
    text = _SCRIPT.read_bytes() + mlflow_tula.__version__.encode()
    return hashlib.sha256(text).hexdigest()[:12]


def _example(name: str | None) -> dict[str, Any]:
    """A question that shows the most used columns."""
    if name is None:
        # One with a champion is answered; so is the example when MLflow tries it out.
        known = [one.name for one in Catalogue().listed() if one.version is not None]
        if not known:
            return _EXAMPLE
        name = known[0]
    _, workload, hardware = split_name(name)
    model, _, dataset = workload.partition(".")
    return {**_EXAMPLE, "model": model, "dataset": dataset, "hardware": hardware}


def _register(digest: str, example: dict[str, Any]) -> int:
    """Log the model, register it, and make it the champion; it belongs to no run."""
    with store_errors(f"register {RECOMMENDER}"), quiet_mlflow():
        client = MlflowClient()
        info = _log_model(client, ensure_experiment(), example)
        _create_model(client)
        version = client.create_model_version(
            RECOMMENDER,
            source=info.model_uri,
            model_id=info.model_id,
            tags={_DIGEST: digest, "tula.version": mlflow_tula.__version__},
            description=(
                f"The recommender of mlflow_tula {mlflow_tula.__version__}: asks the registry's "
                "champions when a request comes, and holds none itself."
            ),
        )
        client.set_registered_model_alias(RECOMMENDER, CHAMPION, version.version)
    return int(version.version)


def _create_model(client: MlflowClient) -> None:
    """The registered model; another process may have been faster."""
    fields = "\n".join(f"| `{name}` | {text} |" for name, text in {**WHO, **FIELDS}.items())
    text = (
        "Which batch size to take, on how many devices: a decision a row.\n\n"
        f"`mlflow models serve -m models:/{RECOMMENDER}@{CHAMPION} --env-manager local`\n\n"
        f"| column | |\n|---|---|\n{fields}\n"
    )
    try:
        client.create_registered_model(
            RECOMMENDER, tags={"tula.kind": "recommender"}, description=text
        )
    except MlflowException as error:
        if error.error_code not in {"RESOURCE_ALREADY_EXISTS", "ALREADY_EXISTS"}:
            raise


def _log_model(client: MlflowClient, experiment_id: str, example: dict[str, Any]) -> Any:
    """The script with the code it needs; nothing is pickled."""
    import pandas as pd

    entry = client.create_logged_model(experiment_id, name=_MODEL)
    with tempfile.TemporaryDirectory(prefix="tula-") as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log = logging.getLogger("mlflow.models.model")
        level = log.level
        # A store without predictors cannot answer the example, and that is no news.
        log.setLevel(logging.ERROR)
        try:
            return Model.log(
                artifact_path=None,
                name=_MODEL,
                flavor=mlflow.pyfunc,
                model_id=entry.model_id,
                python_model=str(_SCRIPT),
                code_paths=[str(copy_code(Path(scratch)))],
                signature=signature(),
                input_example=pd.DataFrame([example]),
                pip_requirements=requirements(),
                metadata={"tula_version": mlflow_tula.__version__},
            )
        except BaseException:
            client.finalize_logged_model(entry.model_id, "FAILED")
            raise
        finally:
            log.setLevel(level)


def signature() -> ModelSignature:
    """The columns of an answer. Those of a question are not MLflow's to check: see the script."""
    outputs: list[ColSpec | TensorSpec] = [
        ColSpec(kind, name, required=name not in _OPTIONAL) for name, kind in _OUTPUTS.items()
    ]
    return ModelSignature(outputs=Schema(outputs))


def requirements() -> list[str]:
    """What the recommender imports apart from this package, which it brings along."""
    return [
        *pip_requirements(),
        "filelock>=3.12",
        "nvidia-ml-py>=12.535",
        "psutil>=5.9",
        "scipy>=1.12",
    ]


def copy_code(folder: Path) -> Path:
    """The package without the rooms that the recommender never enters, as it lies here.

    Where mlflow_tula is installed, MLflow has imported that one before it reads the model's.
    """
    source = Path(mlflow_tula.__file__).parent
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", *_LEFT_OUT)
    target = folder / source.name
    shutil.copytree(source, target, ignore=ignore)
    return target
