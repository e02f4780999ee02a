"""Finding one version in MLflow's registry, and saying what is wrong where there is none."""

from __future__ import annotations

import mlflow
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from mlflow_tula.errors import DanglingAliasError, NotRegisteredError
from mlflow_tula.stores import masked, store_errors, store_exists

ABSENT = {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}
"""Error codes of a missing model or version, and of a missing alias."""


def find_version(name: str, alias: str, version: int | None) -> ModelVersion:
    """The version of this number, or of this alias when the number is None.

    Raises:
        NotRegisteredError: there is none.
        StoreError: the store does not answer.
        DanglingAliasError: the alias points to a deleted version.
    """
    asked = f"alias {alias!r}" if version is None else f"version {version}"
    require_store()
    with store_errors(f"look up {name}"):
        client = MlflowClient()
        try:
            if version is None:
                return client.get_model_version_by_alias(name, alias)
            return client.get_model_version(name, str(version))
        except MlflowException as error:
            if error.error_code not in ABSENT:
                raise
            if version is None:
                _refuse_dangling(client, name, alias)
            raise NotRegisteredError(
                f"{name} has no {asked} in the registry: see `tula registry list`, or register one"
            ) from error


def require_store() -> None:
    """Raise NotRegisteredError where there is no store yet: then nothing is registered either."""
    if not store_exists():
        raise NotRegisteredError(
            f"nothing is registered yet: no store at {masked(mlflow.get_registry_uri())}"
        )


def dangling(name: str, alias: str, number: int) -> str:
    """What is wrong with an alias of a deleted version, and the way out."""
    return str(DanglingAliasError(name, alias, number))


def _refuse_dangling(client: MlflowClient, name: str, alias: str) -> None:
    """Raise DanglingAliasError where the alias exists and its version does not."""
    try:
        aliases = client.get_registered_model(name).aliases or {}
    except MlflowException as error:
        if error.error_code not in ABSENT:
            raise
        return
    if alias in aliases:
        raise DanglingAliasError(name, alias, int(aliases[alias]))
