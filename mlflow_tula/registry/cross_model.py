"""The cross-model predictor of a hardware in the registry: `tula.anymodel.<hardware>`.

`refit` fits it to the champions of that hardware whose kernels were counted, and registers it when
something is new; `load_cross_model` reads the champion.
"""

from __future__ import annotations

import json
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
from mlflow.types.schema import ColSpec, Schema

from mlflow_tula.errors import DanglingAliasError, InvalidInputError, NotRegisteredError, TulaError
from mlflow_tula.model_features import ModelFeatures
from mlflow_tula.predictors import cross_model_formulas
from mlflow_tula.predictors.cross_model import LEAST_MODELS, CrossModelPredictor
from mlflow_tula.predictors.transfer import Transfer
from mlflow_tula.registry.finding import CHAMPION, find, load_table, read_document
from mlflow_tula.registry.lookup import find_version
from mlflow_tula.registry.model_files import pip_requirements
from mlflow_tula.specs import HardwareSpec
from mlflow_tula.stores import check_store, ensure_experiment, quiet_mlflow, store_errors
from mlflow_tula.table import ProfileTable

_logger = logging.getLogger(__name__)

DOCUMENT = "cross_model.json"
MOST_WORKLOADS = 200
_DIGESTS = "tula.table_digests"
_OUTPUTS = (
    "step_time_s",
    "step_time_s_lower",
    "step_time_s_upper",
    "allocated_memory_bytes",
    "peak_memory_bytes",
)


def cross_model_name(hardware: HardwareSpec | str) -> str:
    """`tula.anymodel.<hardware slug>`."""
    return f"tula.anymodel.{hardware if isinstance(hardware, str) else hardware.slug}"


def load_cross_model(hardware: HardwareSpec | str) -> tuple[CrossModelPredictor, int]:
    """The champion of a hardware's cross-model predictor, and its version.

    Raises:
        NotRegisteredError: there is none: too few models were profiled there.
    """
    found = find_version(cross_model_name(hardware), CHAMPION, None)
    return CrossModelPredictor.from_dict(read_document(found, DOCUMENT)), int(found.version)


def known_tables(hardware: HardwareSpec | str) -> list[ProfileTable]:
    """The tables of the hardware's champions whose kernels were counted."""
    tables = []
    for one in find(hardware=hardware)[:MOST_WORKLOADS]:
        try:
            table = load_table(one.name, version=one.version)
        except TulaError as error:
            _logger.warning("left out of the cross-model predictor: %s", error)
            continue
        if table.features is not None and table.features.operations:
            tables.append(table)
    return tables


def known_elsewhere(
    workload_slug: str, hardware: HardwareSpec | str
) -> tuple[ProfileTable, CrossModelPredictor, Transfer] | None:
    """The workload's table on other hardware, that hardware's predictor, and what travels here.

    Of several, the one with the smallest error; None where none shares two models with this one.
    """
    slug = hardware if isinstance(hardware, str) else hardware.slug
    here = [(_features(one), one) for one in known_tables(slug)]
    best: tuple[ProfileTable, CrossModelPredictor, Transfer] | None = None
    for one in find(workload_slug):
        if one.hardware_slug == slug:
            continue
        try:
            table = load_table(one.name, version=one.version)
            known, _ = load_cross_model(one.hardware_slug)
            there = [(_features(other), other) for other in known_tables(one.hardware_slug)]
            how = Transfer.fit(here, there)
        except TulaError as error:
            _logger.info("nothing travels from %s: %s", one.hardware_slug, error)
            continue
        if table.features is not None and (best is None or how.deviation < best[2].deviation):
            best = table, known, how
    return best


def refit(hardware: HardwareSpec | str, *, experiment: str | None = None) -> int | None:
    """Fit the hardware's cross-model predictor and register it as champion.

    Returns:
        The version; that of the champion where it was fitted to the very same tables. None where
        fewer than three models with counted kernels are registered.
    """
    check_store()
    tables = known_tables(hardware)
    if len({table.workload.model for table in tables}) < LEAST_MODELS:
        return None
    digests = ",".join(sorted(table.digest for table in tables))
    name = cross_model_name(hardware)
    try:
        champion = find_version(name, CHAMPION, None)
    except (NotRegisteredError, DanglingAliasError):
        pass
    else:
        if (champion.tags or {}).get(_DIGESTS) == digests[:4000]:
            return int(champion.version)
    try:
        known = CrossModelPredictor.fit([(_features(one), one) for one in tables])
    except InvalidInputError as error:
        _logger.info("no cross-model predictor: %s", error)
        return None
    return _register(name, known, _features(tables[0]), digests[:4000], experiment)


def _features(table: ProfileTable) -> ModelFeatures:
    assert table.features is not None, "known_tables leaves out the others"
    return table.features


def _register(
    name: str,
    known: CrossModelPredictor,
    example: ModelFeatures,
    digests: str,
    experiment: str | None,
) -> int:
    """Log the model to a run of its own, create the version, move the alias last."""
    with store_errors(f"register {name}"), quiet_mlflow():
        client = MlflowClient()
        where = ensure_experiment() if experiment is None else ensure_experiment(experiment)
        run = client.create_run(where, run_name=f"fit {name}")
        status = "FAILED"
        try:
            info = _log_model(run.info.run_id, known, example)
            for key, value in _errors(known).items():
                client.log_metric(run.info.run_id, key, value)
            _create_model(client, name, known)
            version = client.create_model_version(
                name,
                source=info.model_uri,
                run_id=run.info.run_id,
                model_id=info.model_id,
                tags={
                    _DIGESTS: digests,
                    "tula.kind": "cross_model",
                    "tula.hardware": known.hardware.slug,
                    **{f"tula.{key}": f"{value:.6g}" for key, value in _errors(known).items()},
                },
                description=_description(known),
            )
            client.set_registered_model_alias(name, CHAMPION, version.version)
            status = "FINISHED"
        finally:
            client.set_terminated(run.info.run_id, status=status)
    return int(version.version)


def _errors(known: CrossModelPredictor) -> dict[str, float]:
    """What was seen of models that were left out."""
    found = {
        "left_out_step_time_error": known.step_time_error,
        "left_out_memory_error": known.memory_error,
        "left_out_coverage": known.coverage,
    }
    return {key: value for key, value in found.items() if value is not None}


def _description(known: CrossModelPredictor) -> str:
    """Markdown: what it answers, from what, how well."""
    errors = "".join(f"- {key.replace('_', ' ')}: {v:.1%}\n" for key, v in _errors(known).items())
    return (
        f"Step time and memory of models that never ran on {known.hardware.device_name}, from "
        f"{len(known.models)} that did: {', '.join(known.models)}.\n\n{errors}"
    )


def _create_model(client: MlflowClient, name: str, known: CrossModelPredictor) -> None:
    """The registered model; another process may have been faster."""
    text = (
        f"Any model on **{known.hardware.device_name}** x {known.hardware.devices_per_node}: what "
        "`tula recommend` asks where a workload was never profiled here."
    )
    tags = {"tula.kind": "cross_model", "tula.hardware": known.hardware.slug}
    try:
        client.create_registered_model(name, tags=tags, description=text)
    except MlflowException as error:
        if error.error_code not in {"RESOURCE_ALREADY_EXISTS", "ALREADY_EXISTS"}:
            raise


def _log_model(run_id: str, known: CrossModelPredictor, example: ModelFeatures) -> Any:
    """The script, the document and the equation; nothing is pickled."""
    import pandas as pd

    with tempfile.TemporaryDirectory(prefix="tula-") as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(scratch)
        document = json.dumps(known.to_dict(), indent=1, sort_keys=True) + "\n"
        (folder / DOCUMENT).write_text(document, encoding="utf-8")
        formulas = Path(cross_model_formulas.__file__)
        shutil.copy(formulas, folder / formulas.name)
        frame = pd.DataFrame(
            {"local_batch_size": [8, 64], "features": [json.dumps(example.to_dict())] * 2}
        )
        return Model.log(
            artifact_path=None,
            name="cross_model",
            flavor=mlflow.pyfunc,
            run_id=run_id,
            python_model=str(Path(__file__).with_name("cross_model_script.py")),
            artifacts={
                "cross_model": str(folder / DOCUMENT),
                "formulas": str(folder / formulas.name),
            },
            signature=ModelSignature(
                inputs=Schema([ColSpec("long", "local_batch_size"), ColSpec("string", "features")]),
                outputs=Schema([ColSpec("double", name) for name in _OUTPUTS]),
            ),
            input_example=frame,
            pip_requirements=pip_requirements(),
        )
