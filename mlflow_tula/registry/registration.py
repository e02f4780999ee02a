"""Bundle <-> registered model version: register, load, find, resolve.

One registered model is one (workload, hardware) pair, `tula.<model>.<dataset>.<hardware slug>`;
its versions are interchangeable fits of the same thing. Readers never see half a registration: the
model is logged to its run first, the version is created last, and the alias `champion` moves last
of all, if the gate (promotion.py) lets it.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlflow
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion, RegisteredModel
from mlflow.exceptions import MlflowException

from mlflow_tula.errors import InvalidInputError, NotRegisteredError, SchemaError, StoreError
from mlflow_tula.predictors.bundle import PredictorBundle
from mlflow_tula.registry.lookup import find_version, version_of_alias
from mlflow_tula.registry.model_files import (
    BUNDLE_FILE,
    TABLE_FILE,
    log_predictor,
    model_tags,
    read_json,
    version_description,
    version_tags,
)
from mlflow_tula.registry.promotion import Verdict, judge
from mlflow_tula.specs import HardwareSpec, Spec, Workload, slugify
from mlflow_tula.stores import (
    check_store,
    ensure_experiment,
    quiet_mlflow,
    store_errors,
    store_exists,
)
from mlflow_tula.table import ProfileTable

_logger = logging.getLogger(__name__)

CHAMPION = "champion"
_MAX_NAME = 250
_SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisteredPredictor(Spec):
    """One registered version: where it is, what it is for, and what the gate said.

    `alias` is "champion" where this version is the champion; `step_time_mape` is the leave-one-out
    error as a fraction.
    """

    name: str
    version: int
    alias: str | None = None
    promoted: bool = False
    reason: str = ""
    workload_slug: str = ""
    hardware_slug: str = ""
    fingerprint: str = ""
    device_name: str = ""
    table_digest: str = ""
    step_time_mape: float | None = None
    memory_mape: float | None = None
    run_id: str | None = None

    @property
    def uri(self) -> str:
        """What `mlflow.pyfunc.load_model` takes."""
        return f"models:/{self.name}@{self.alias}" if self.alias else self.version_uri

    @property
    def version_uri(self) -> str:
        """The same for exactly this version."""
        return f"models:/{self.name}/{self.version}"


def register(
    bundle: PredictorBundle,
    *,
    table: ProfileTable,
    run_id: str | None = None,
    experiment: str | None = None,
) -> RegisteredPredictor:
    """Register a bundle as one version; champion if it is no worse than the present one.

    Args:
        bundle: what `fit(table)` gave.
        table: the measurements it was fitted to; stored with it and used by the gate.
        run_id: the run to log the model to; the active run, or one of its own, when None.
        experiment: where a run of its own is made; `tula` when None.

    Raises:
        InvalidInputError: `table` is not what the bundle was fitted to.
        StoreError: the store refuses; then nothing was registered.
    """
    _check_pair(bundle, table)
    check_store()
    name = _checked_name(bundle.workload.registered_name(bundle.hardware))
    verdict = _judge_against_champion(name, bundle, table)
    action = f"register {name}"
    with _run_for(run_id, experiment, bundle) as target, store_errors(action), quiet_mlflow():
        info = log_predictor(bundle, table, run_id=target)
        client = MlflowClient()
        created = _ensure_registered_model(client, name, bundle)
        try:
            version = client.create_model_version(
                name,
                source=info.model_uri,
                run_id=target,
                tags=version_tags(bundle, table, verdict),
                description=version_description(bundle, table, verdict),
                model_id=info.model_id,
            )
        except Exception:
            if created:
                _drop_if_empty(client, name)
            raise
        if verdict.promoted:
            client.set_registered_model_alias(name, CHAMPION, version.version)
    return _from_version(
        client.get_model_version(name, version.version),
        alias=CHAMPION if verdict.promoted else None,
    )


def load(name: str, alias: str = CHAMPION, *, version: int | None = None) -> PredictorBundle:
    """The bundle of a registered version.

    Args:
        name: the registered model, `tula.<model>.<dataset>.<hardware>`.
        alias: which version, by alias.
        version: which version, by number, in place of the alias.

    Raises:
        NotRegisteredError: no such model, version or alias.
        SchemaError: the stored bundle is of a newer schema, or not ours.
        StoreError: the store does not answer, or its file is gone.
    """
    found = find_version(name, alias, version)
    try:
        return PredictorBundle.from_dict(_read_json(found, BUNDLE_FILE))
    except SchemaError as error:
        raise SchemaError(f"{name} version {found.version}: {error}") from error


def load_table(name: str, alias: str = CHAMPION, *, version: int | None = None) -> ProfileTable:
    """The measurements that a registered version was fitted to; raises as `load` does."""
    found = find_version(name, alias, version)
    try:
        return ProfileTable.from_dict(_read_json(found, TABLE_FILE))
    except SchemaError as error:
        raise SchemaError(f"{name} version {found.version}: {error}") from error


def find(
    workload_slug: str | None = None, hardware: HardwareSpec | str | None = None
) -> list[RegisteredPredictor]:
    """What is registered: of each model its champion, or its newest version without one.

    Args:
        workload_slug: `<model>.<dataset>` only; every workload when None.
        hardware: only this hardware, or its slug; all when None.
    """
    if not store_exists():
        return []
    conditions = []
    if workload_slug is not None:
        conditions.append(f"tags.`tula.workload` = '{_harmless(workload_slug)}'")
    if hardware is not None:
        slug = hardware if isinstance(hardware, str) else hardware.slug
        conditions.append(f"tags.`tula.hardware` = '{_harmless(slug)}'")
    if not conditions:
        conditions = ["name LIKE 'tula.%'"]
    with store_errors("search the registry"):
        client, token = MlflowClient(), None
        models: list[RegisteredModel] = []
        while token is not None or not models:
            page = client.search_registered_models(" AND ".join(conditions), page_token=token)
            models += page
            token = page.token
            if not token:
                break
        shown = [_best_version(client, model) for model in models]
    # Others may register models of their own under `tula.`: they predict no workload.
    found = [one for one in shown if one is not None and one.workload_slug]
    return sorted(found, key=lambda one: one.name)


def resolve(
    workload: Workload | str,
    hardware: HardwareSpec,
    *,
    alias: str = CHAMPION,
    profile_with: str | None = None,
) -> RegisteredPredictor:
    """The registered predictor of this workload on this hardware.

    Args:
        workload: the workload, or its slug `<model>.<dataset>`.
        hardware: this machine, as `mlflow_tula.hardware.detect()` sees it.
        alias: which version.
        profile_with: the command that profiles it, for the message; None guesses it.

    Raises:
        NotRegisteredError: nothing is registered; names the command that profiles, and what is
            registered for other hardware.
    """
    slug = workload if isinstance(workload, str) else workload.slug
    name = f"tula.{slug}.{hardware.slug}"
    try:
        return _from_version(find_version(name, alias, None), alias=alias)
    except NotRegisteredError as error:
        if find(slug, hardware):
            raise  # it is registered, only not under this alias
        text = _nothing_registered(slug, hardware, profile_with)
        raise NotRegisteredError(text) from error


def _nothing_registered(slug: str, hardware: HardwareSpec, profile_with: str | None) -> str:
    """What is missing, the command that makes it, and what there is instead."""
    model, _, dataset = slug.partition(".")
    option = "" if dataset in {"", "digits"} else f" --dataset {dataset}"
    text = (
        f"nothing is registered for {slug} on this hardware ({hardware.slug}): profile it with "
        f"`{profile_with or f'tula main --model {model}{option}'}`"
    )
    elsewhere = [one.hardware_slug for one in find(slug) if one.hardware_slug != hardware.slug]
    if elsewhere:
        return f"{text}; {slug} is registered for other hardware: {_listed(elsewhere)}"
    others = [one.workload_slug for one in find(hardware=hardware)]
    if others:
        near = difflib.get_close_matches(slug, others, n=1, cutoff=0.7)
        hint = f" (did you mean {near[0]}?)" if near else ""
        return f"{text}; on this hardware there is {_listed(others)}{hint}"
    rest = [one.name for one in find()]
    return f"{text}; registered for others: {_listed(rest) if rest else 'nothing yet'}"


def _listed(names: list[str]) -> str:
    """A few names, and how many more."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(sorted(names)[:_SHOWN]) + more


def _check_pair(bundle: PredictorBundle, table: ProfileTable) -> None:
    """Raise unless the bundle was fitted to this table."""
    if not isinstance(bundle, PredictorBundle) or not isinstance(table, ProfileTable):
        raise InvalidInputError(
            "register takes a PredictorBundle and the ProfileTable it was fitted to, not "
            f"{type(bundle).__name__} and {type(table).__name__}"
        )
    if bundle.table_digest != table.digest:
        raise InvalidInputError(
            f"the bundle was fitted to table {bundle.table_digest or '(none)'}, not to this one "
            f"({table.digest}): register what fit(table) gives"
        )


def _checked_name(name: str) -> str:
    """The name, if MLflow's databases can hold it."""
    if len(name) > _MAX_NAME:
        raise InvalidInputError(
            f"the registered name would have {len(name)} characters, at most {_MAX_NAME} are "
            f"possible: give the model or dataset a shorter name than {name[:60]!r}..."
        )
    return name


def _harmless(slug: str) -> str:
    """A slug that cannot break out of a search filter."""
    return ".".join(slugify(part) for part in slug.split("."))


def _judge_against_champion(name: str, bundle: PredictorBundle, table: ProfileTable) -> Verdict:
    """The gate's verdict; a champion that cannot be read is replaced, a newer one is kept."""
    try:
        current = find_version(name, CHAMPION, None)
    except NotRegisteredError:
        return judge(bundle, table, None)
    label = f"version {current.version} (the champion)"
    try:
        champion = PredictorBundle.from_dict(_read_json(current, BUNDLE_FILE))
        champion_table = ProfileTable.from_dict(_read_json(current, TABLE_FILE))
    except SchemaError as error:
        return Verdict(promoted=False, reason=f"not promoted: {label} cannot be read: {error}")
    except StoreError as error:
        return Verdict(promoted=True, reason=f"promoted: the files of {label} are gone: {error}")
    return judge(bundle, table, champion, champion_table, champion_name=label)


@contextmanager
def _run_for(run_id: str | None, experiment: str | None, bundle: PredictorBundle) -> Iterator[str]:
    """The run to log to: the given one, the active one, or a new one that is closed again."""
    active = mlflow.active_run()
    if run_id is not None:
        yield run_id
        return
    if active is not None:
        yield str(active.info.run_id)
        return
    with store_errors("create a run"):
        client = MlflowClient()
        where = ensure_experiment() if experiment is None else ensure_experiment(experiment)
        created = client.create_run(where, run_name=f"register {bundle.workload.slug}")
    status = "FAILED"
    try:
        yield str(created.info.run_id)
        status = "FINISHED"
    finally:
        with quiet_mlflow():
            client.set_terminated(created.info.run_id, status=status)


def _ensure_registered_model(client: MlflowClient, name: str, bundle: PredictorBundle) -> bool:
    """Create the registered model unless it is there; whether this call created it."""
    text = (
        f"Step time, memory and cost of **{bundle.workload.slug}** on "
        f"**{bundle.hardware.device_name}** x {bundle.hardware.devices_per_node}, by batch size. "
        f"Alias `{CHAMPION}` is the version that `tula recommend` asks."
    )
    try:
        client.create_registered_model(
            name, tags=model_tags(bundle.workload, bundle.hardware), description=text
        )
    except MlflowException as error:
        if error.error_code not in {"RESOURCE_ALREADY_EXISTS", "ALREADY_EXISTS"}:
            raise
        return False
    return True


def _drop_if_empty(client: MlflowClient, name: str) -> None:
    """Take back a registered model that got no version."""
    try:
        if not client.search_model_versions(f"name = '{name}'", max_results=1):
            client.delete_registered_model(name)
    except MlflowException as error:
        _logger.warning("could not remove the empty registered model %s: %s", name, error)


def _best_version(client: MlflowClient, model: RegisteredModel) -> RegisteredPredictor | None:
    """The champion of a registered model, or its newest version, or None when it has none."""
    champion = version_of_alias(client, model, CHAMPION)
    if champion is not None:
        return _from_version(champion, alias=CHAMPION)
    newest = max(model.latest_versions or [], key=lambda one: int(one.version), default=None)
    return None if newest is None else _from_version(newest, alias=None)


def _read_json(version: ModelVersion, name: str) -> dict[str, Any]:
    """One document of a version's model."""
    with store_errors(f"find the files of {version.name}"):
        address = MlflowClient().get_model_version_download_uri(version.name, version.version)
    return read_json(address, name)


def _from_version(version: ModelVersion, *, alias: str | None) -> RegisteredPredictor:
    """What the tags of a version say."""
    tags = version.tags or {}

    def number(key: str) -> float | None:
        try:
            return float(tags[key])
        except (KeyError, ValueError):
            return None

    return RegisteredPredictor(
        name=version.name,
        version=int(version.version),
        alias=alias,
        promoted=tags.get("tula.gate") == "promoted",
        reason=tags.get("tula.gate_reason", ""),
        workload_slug=tags.get("tula.workload", ""),
        hardware_slug=tags.get("tula.hardware", ""),
        fingerprint=tags.get("tula.fingerprint", ""),
        device_name=tags.get("tula.device_name", ""),
        table_digest=tags.get("tula.table_digest", ""),
        step_time_mape=number("tula.step_time_mape"),
        memory_mape=number("tula.memory_mape"),
        run_id=version.run_id or None,
    )
