"""What the registry says of champions, and what lies in their files; nothing is kept here.

all_champions    every champion in one query, where the registry is MLflow's own database
read_champion    the bundle of a version
list_models      registered predictors, and hardware whose other models speak for a new one
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from mlflow_tula.errors import SchemaError, StoreError
from mlflow_tula.predictors.bundle import PredictorBundle
from mlflow_tula.registry import CHAMPION
from mlflow_tula.registry.model_files import BUNDLE_FILE, TABLE_FILE, read_json
from mlflow_tula.stores import masked, store_errors, store_exists
from mlflow_tula.table import ProfileTable

_logger = logging.getLogger(__name__)

Identity = tuple[int, str]
"""Number and source of a version: what tells it apart for good."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Champion:
    """The version that answers for a registered name; `source` tells versions apart for good.

    `answers` is the registered model that really answers: the cross-model predictor of the
    hardware, where the workload itself was never profiled there; else the same name.
    """

    name: str
    version: int
    source: str
    bundle: PredictorBundle
    warning: str = ""
    answers: str = ""

    @property
    def asked(self) -> str:
        """The registered model whose version this is."""
        return self.answers or self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """A registered predictor as its registered model describes it; no version was looked at.

    `foreseen`: nothing is registered, but other models of the hardware may speak for it.
    """

    name: str
    workload: str
    hardware: str
    model: str
    dataset: str
    device_name: str
    device_type: str
    fingerprint: str
    version: int | None
    updated_s: float
    foreseen: bool = False


def split_name(name: str) -> tuple[str, str, str]:
    """(`tula`, `<model>.<dataset>`, `<hardware>`) of a registered name."""
    first, _, rest = name.partition(".")
    workload, _, hardware = rest.rpartition(".")
    return first, workload, hardware


def identity(version: ModelVersion) -> Identity:
    """What tells a version apart."""
    return int(version.version), f"{version.source} {version.creation_timestamp}"


def read_champion(name: str, who: Identity) -> Champion:
    """The bundle of a version."""
    number, source = who
    document = _read(name, number, source.partition(" ")[0], BUNDLE_FILE)
    try:
        bundle = PredictorBundle.from_dict(document)
    except SchemaError as error:
        raise SchemaError(f"{name} version {number}: {error}") from error
    return Champion(name=name, version=number, source=source, bundle=bundle)


def read_table(champion: Champion) -> ProfileTable:
    """The measurements that a champion was fitted to."""
    source = champion.source.partition(" ")[0]
    return ProfileTable.from_dict(_read(champion.name, champion.version, source, TABLE_FILE))


def _read(name: str, version: int, source: str, file: str) -> dict[str, Any]:
    """One document of a version's model."""
    with store_errors(f"find the files of {name}"):
        return read_json(within_server(_address(name, version, source)), file)


def _address(name: str, version: int, source: str) -> str:
    """Where the files of a version lie.

    The logged model knows, and is asked first: MLflow's own way loads the whole registered model.
    """
    client = MlflowClient()
    if source.startswith("models:/m-"):
        try:
            found = client.get_logged_model(source.removeprefix("models:/"))
            return str(found.artifact_location)
        except MlflowException as error:
            _logger.debug("no logged model %s: %s", source, error)
    return str(client.get_model_version_download_uri(name, str(version)))


def within_server(address: str) -> str:
    """Where the files lie for the tracking server itself, which others ask for them over HTTP."""
    parts = urlsplit(address)
    root = os.environ.get("_MLFLOW_SERVER_ARTIFACT_DESTINATION")
    if parts.scheme != "mlflow-artifacts" or not root:
        return address
    if ".." in parts.path.split("/"):
        raise StoreError(f"the model's address {masked(address)} leaves the artifact folder")
    return f"{root.rstrip('/')}/{parts.path.lstrip('/')}"


def all_champions() -> dict[str, Identity] | None:
    """Every champion's identity, in one query where the registry is MLflow's own database.

    MLflow's interface has only the look-up of one alias (1 to 3 ms), and a search that takes a
    second for a thousand models. None where the registry is of another kind, or MLflow's tables
    are no longer those that are known here: then each name is looked up.
    """
    try:
        from mlflow.store.model_registry.dbmodels.models import (
            SqlModelVersion,
            SqlRegisteredModelAlias,
        )
        from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore

        store: Any = MlflowClient()._get_registry_client().store
        if store.__class__ is not SqlAlchemyStore:
            return None
        alias: Any = SqlRegisteredModelAlias
        version: Any = SqlModelVersion
        same = (
            (alias.name == version.name)
            & (alias.version == version.version)
            & (alias.workspace == version.workspace)
        )
        with store.ManagedSessionMaker() as session:
            rows = (
                session.query(alias.name, alias.version, version.source, version.creation_time)
                .join(version, same)
                .filter(alias.alias == CHAMPION, alias.name.like("tula.%"))
                .filter(alias.workspace == store._get_active_workspace())
                .all()
            )
    except Exception as error:
        _logger.debug("champions are looked up one by one: %s", error)
        return None
    return {name: (int(number), f"{source} {created}") for name, number, source, created in rows}


def list_models() -> tuple[Listed, ...]:
    """All registered predictors, one search a thousand of them; then what can be foreseen."""
    if not store_exists():
        return ()
    found: list[Listed] = []
    speaking: set[str] = set()
    with store_errors("list the registered predictors"):
        client, token = MlflowClient(), None
        while True:
            page = client.search_registered_models(
                "name LIKE 'tula.%'", max_results=1000, page_token=token
            )
            for model in page:
                one = _listed(model)
                if one is not None:
                    found.append(one)
                elif (model.tags or {}).get("tula.kind") == "cross_model" and model.aliases:
                    speaking.add(model.name.rpartition(".")[2])
            token = page.token
            if not token:
                break
    return tuple(sorted([*found, *_foreseen(found, speaking)], key=lambda one: one.name))


def _listed(model: Any) -> Listed | None:
    """What the tags of a registered model say; None of a model that predicts no workload."""
    tags = model.tags or {}
    if not tags.get("tula.workload") or not tags.get("tula.hardware"):
        return None
    number = (model.aliases or {}).get(CHAMPION)
    return Listed(
        name=model.name,
        workload=tags["tula.workload"],
        hardware=tags["tula.hardware"],
        model=tags.get("tula.model", ""),
        dataset=tags.get("tula.dataset", ""),
        device_name=tags.get("tula.device_name", ""),
        device_type=tags.get("tula.device_type", ""),
        fingerprint=tags.get("tula.fingerprint", ""),
        version=None if number is None else int(number),
        updated_s=float(model.last_updated_timestamp or 0) / 1000,
    )


def _foreseen(found: list[Listed], speaking: set[str]) -> list[Listed]:
    """Workloads on hardware where they were never profiled, and other models were."""
    there = {one.name for one in found}
    machines = {one.hardware: one for one in found if one.hardware in speaking}
    workloads = {one.workload: one for one in found if one.version is not None}
    return [
        replace(
            machine,
            name=f"tula.{workload}.{hardware}",
            workload=workload,
            model=one.model,
            dataset=one.dataset,
            version=None,
            foreseen=True,
        )
        for workload, one in workloads.items()
        for hardware, machine in machines.items()
        if f"tula.{workload}.{hardware}" not in there
    ]
