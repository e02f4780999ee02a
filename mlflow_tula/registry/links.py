"""The links of a hardware as a registered model of their own: `tula.link.<hardware slug>`.

The communication probe's rows and what was fitted to them are stored once for each hardware, and
every model that is profiled there starts from them. A version is added where the link was measured
anew; the newest is the champion, for a link is a fact of today.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.models import Model
from mlflow.models.signature import ModelSignature
from mlflow.types.schema import ColSpec, Schema

from mlflow_tula.documents import check_document
from mlflow_tula.errors import NotRegisteredError, SchemaError
from mlflow_tula.predictors.link import Link
from mlflow_tula.predictors.link import fit as fit_link
from mlflow_tula.registry.finding import CHAMPION
from mlflow_tula.registry.lookup import find_version
from mlflow_tula.registry.model_files import pip_requirements, read_json
from mlflow_tula.specs import HardwareSpec
from mlflow_tula.stores import quiet_mlflow, store_errors, store_exists
from mlflow_tula.table import LinkMeasurement, LinkScope

LINK_FILE = "link.json"
LINK_KIND, LINK_SCHEMA_VERSION = "tula.link", 1
SCOPES: tuple[LinkScope, ...] = ("intra_node", "inter_node")


def link_name(hardware: HardwareSpec) -> str:
    """`tula.link.<hardware slug>`."""
    return f"tula.link.{hardware.slug}"


def fit_links(rows: Sequence[LinkMeasurement]) -> dict[str, Link]:
    """Latency and bandwidth of each link class that the rows identify."""
    found = {scope: fit_link(rows, scope) for scope in SCOPES}
    return {scope: link for scope, link in found.items() if link is not None}


def load_links(hardware: HardwareSpec) -> tuple[LinkMeasurement, ...]:
    """The communication probe's rows of this hardware.

    Raises:
        NotRegisteredError: its link was never registered.
        SchemaError: the document is of a newer version, or not ours.
        StoreError: the store does not answer.
    """
    if not store_exists():
        raise NotRegisteredError(f"{link_name(hardware)} is not registered")
    found = find_version(link_name(hardware), CHAMPION, None)
    with store_errors(f"find the files of {found.name}"):
        address = MlflowClient().get_model_version_download_uri(found.name, found.version)
    document = read_json(address, LINK_FILE)
    check_document(document, kind=LINK_KIND, version=LINK_SCHEMA_VERSION)
    rows = document.get("measurements")
    if not isinstance(rows, list):
        raise SchemaError("measurements of a link document must be a list")
    return tuple(LinkMeasurement.from_dict(row) for row in rows)


def register_links(
    hardware: HardwareSpec, rows: Sequence[LinkMeasurement], *, run_id: str
) -> str | None:
    """Register the links of a hardware; None where no link can be fitted or nothing is new.

    Args:
        hardware: whose links.
        rows: of the communication probe.
        run_id: the run that measured them.

    Returns:
        `<name> version <number>`.
    """
    links = fit_links(rows)
    try:
        known = load_links(hardware)
    except (NotRegisteredError, SchemaError):
        known = ()
    # a class that was not measured this time is still what it was
    scopes = {row.scope for row in rows}
    rows = (*(row for row in known if row.scope not in scopes), *rows)
    if not links or set(rows) == set(known):
        return None
    name, client = link_name(hardware), MlflowClient()
    document = link_document(hardware, rows)
    with store_errors(f"register {name}"), quiet_mlflow():
        info = _log(document, run_id)
        try:
            client.create_registered_model(
                name, tags=_tags(hardware), description=_description(hardware)
            )
        except MlflowException as error:
            if error.error_code not in {"RESOURCE_ALREADY_EXISTS", "ALREADY_EXISTS"}:
                raise
        version = client.create_model_version(
            name,
            source=info.model_uri,
            run_id=run_id,
            tags={**_tags(hardware), **_numbers(document["links"])},
            description=_words(document["links"]),
            model_id=info.model_id,
        )
        client.set_registered_model_alias(name, CHAMPION, version.version)
    return f"{name} version {version.version}"


def link_document(hardware: HardwareSpec, rows: Sequence[LinkMeasurement]) -> dict[str, Any]:
    """Hardware, rows and fits as plain JSON types."""
    return {
        "kind": LINK_KIND,
        "schema_version": LINK_SCHEMA_VERSION,
        "hardware": hardware.to_dict(),
        "links": {scope: link.to_dict() for scope, link in fit_links(rows).items()},
        "measurements": [
            {key: value for key, value in row.to_dict().items() if value is not None}
            for row in rows
        ],
    }


def _log(document: dict[str, Any], run_id: str) -> Any:
    """The document and the script that answers from it, as a model of the run."""
    client = MlflowClient()
    entry = client.create_logged_model(
        client.get_run(run_id).info.experiment_id, name="link", source_run_id=run_id
    )
    try:
        with tempfile.TemporaryDirectory(prefix="tula-") as scratch:
            path = Path(scratch) / LINK_FILE
            path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
            return Model.log(
                artifact_path=None,
                name="link",
                flavor=mlflow.pyfunc,
                run_id=run_id,
                model_id=entry.model_id,
                python_model=str(Path(__file__).with_name("link_model.py")),
                artifacts={"link": str(path)},
                signature=_signature(),
                input_example=_example(),
                pip_requirements=pip_requirements(),
            )
    except BaseException:
        client.finalize_logged_model(entry.model_id, "FAILED")
        raise


def _example() -> Any:
    import pandas as pd

    names = ("nodes", "devices_per_node", "num_messages")
    ones = {name: np.ones(1, np.int64) for name in names}
    return pd.DataFrame({"message_bytes": np.full(1, 2**20, np.int64), **ones})


def _signature() -> ModelSignature:
    optional = ("nodes", "devices_per_node", "num_messages")
    return ModelSignature(
        inputs=Schema(
            [
                ColSpec("long", "message_bytes"),
                *(ColSpec("long", name, required=False) for name in optional),
            ]
        ),
        outputs=Schema([ColSpec("double", "time_s")]),
    )


def _tags(hardware: HardwareSpec) -> dict[str, str]:
    return {
        "tula.hardware": hardware.slug,
        "tula.fingerprint": hardware.fingerprint,
        "tula.device_type": hardware.device_type,
        "tula.device_name": hardware.device_name,
        "tula.predicts": "link",
    }


def _numbers(links: dict[str, dict[str, float]]) -> dict[str, str]:
    return {
        f"tula.{scope}.{key}": f"{value:.6g}"
        for scope, link in links.items()
        for key, value in link.items()
    }


def _description(hardware: HardwareSpec) -> str:
    return (
        f"Seconds of an all-reduce within and between nodes of **{hardware.device_name}** x "
        f"{hardware.devices_per_node}. Every model that is profiled on this hardware starts from "
        f"the alias `{CHAMPION}`."
    )


def _words(links: dict[str, dict[str, float]]) -> str:
    names = {"intra_node": "within a node", "inter_node": "between nodes"}
    return "\n".join(
        f"- {names[scope]}: {1e6 * link['latency_s']:.0f} us and "
        f"{8e-9 * link['bandwidth_bytes_per_s']:.3g} Gbit/s "
        f"(fitted within {link['relative_error']:.1%})"
        for scope, link in links.items()
    )
