"""Writing to the registry: a bundle becomes a version, and the gate decides on the alias.

One registered model is one (workload, hardware) pair, `tula.<model>.<dataset>.<hardware slug>`;
its versions are interchangeable fits of the same thing. Readers never see half a registration: the
model is logged to its run first, the version is created last, and the alias `champion` moves last
of all, if the gate (promotion.py) lets it. The very same bundle is registered once: a second time
gives the version that is there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import mlflow
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_MODEL_VERSIONS

from mlflow_tula.errors import (
    DanglingAliasError,
    InvalidInputError,
    NotRegisteredError,
    SchemaError,
    StoreError,
    TulaError,
)
from mlflow_tula.predictors.bundle import PredictorBundle
from mlflow_tula.recommend import Recommendation, recommend
from mlflow_tula.registry.cross_model import refit
from mlflow_tula.registry.finding import (
    CHAMPION,
    RegisteredPredictor,
    from_version,
    read_document,
)
from mlflow_tula.registry.lookup import find_version
from mlflow_tula.registry.measurements import log_evidence
from mlflow_tula.registry.model_files import (
    BUNDLE_FILE,
    DIGEST_TAG,
    TABLE_FILE,
    bundle_digest,
    log_predictor,
    model_tags,
    version_tags,
)
from mlflow_tula.registry.promotion import Verdict, judge
from mlflow_tula.registry.words import version_description
from mlflow_tula.specs import ClusterSpec
from mlflow_tula.stores import (
    check_store,
    ensure_experiment,
    quiet_mlflow,
    store_errors,
    store_exists,
)
from mlflow_tula.table import ProfileTable

_logger = logging.getLogger(__name__)

_MAX_NAME = 250


def register(
    bundle: PredictorBundle,
    *,
    table: ProfileTable,
    run_id: str | None = None,
    experiment: str | None = None,
    recommendation: Recommendation | None = None,
) -> RegisteredPredictor:
    """Register a bundle as one version; champion if it is no worse than the present one.

    The very same bundle is not registered twice: the version that holds it comes back, with
    `added` false, and is given the alias only where nobody has it.

    Args:
        bundle: what `fit(table)` gave.
        table: the measurements it was fitted to; stored with it and used by the gate.
        run_id: the run to log the model to; the active run, or one of its own, when None.
        experiment: where a run of its own is made; `tula` when None.
        recommendation: what the version recommends, for the first line of its description; that
            of the default objective on the measured numbers of devices when None.

    Raises:
        InvalidInputError: `table` is not what the bundle was fitted to.
        StoreError: the store refuses; then nothing was registered.
    """
    _check_pair(bundle, table)
    check_store()
    name = _checked_name(bundle.workload.registered_name(bundle.hardware))
    known = registered_already(bundle)
    if known is not None:
        return known
    verdict = _judge_against_champion(name, bundle, table)
    choice = recommendation or default_recommendation(bundle)
    action = f"register {name}"
    with _run_for(run_id, experiment, bundle) as target, store_errors(action), quiet_mlflow():
        info = log_predictor(bundle, table, run_id=target)
        client = MlflowClient()
        log_evidence(client, target, info.model_id, bundle, table, verdict)
        created = _ensure_registered_model(client, name, bundle)
        try:
            version = client.create_model_version(
                name,
                source=info.model_uri,
                run_id=target,
                tags=version_tags(bundle, table, verdict),
                description=version_description(bundle, table, verdict, choice),
                model_id=info.model_id,
            )
        except Exception:
            if created:
                _drop_if_empty(client, name)
            raise
        _link(client, info.model_id, name, str(version.version))
        if verdict.promoted:
            client.set_registered_model_alias(name, CHAMPION, version.version)
    if verdict.promoted and table.features is not None:
        _refit_cross_model(bundle, experiment)
    return from_version(
        client.get_model_version(name, version.version),
        alias=CHAMPION if verdict.promoted else None,
    )


def _refit_cross_model(bundle: PredictorBundle, experiment: str | None) -> None:
    """Let models that never ran here profit; what goes wrong there is no fault of the bundle."""
    try:
        refit(bundle.hardware, experiment=experiment)
    except Exception as error:
        _logger.warning("the cross-model predictor was not refitted: %s", error)


def _link(client: MlflowClient, model_id: str, name: str, version: str) -> None:
    """Say on the logged model's page which version it is, as `mlflow.register_model` does."""
    known = json.dumps([{"name": name, "version": version}])
    client.set_logged_model_tags(model_id, {MLFLOW_MODEL_VERSIONS: known})


def default_recommendation(bundle: PredictorBundle) -> Recommendation | None:
    """The knee on the numbers of devices that were measured; None where nothing can be chosen."""
    most = bundle.hardware.devices_per_node
    counts = {world for _, world in bundle.probed.ok if world <= most}
    clusters = [ClusterSpec(devices_per_node=count) for count in sorted(counts or {1})]
    try:
        return recommend(bundle, cluster=clusters)
    except TulaError as error:
        _logger.info("no recommendation for the description: %s", error)
        return None


def registered_already(bundle: PredictorBundle) -> RegisteredPredictor | None:
    """The version that holds this very bundle; it is given the alias where nobody has it."""
    name = _checked_name(bundle.workload.registered_name(bundle.hardware))
    with store_errors(f"register {name}"), quiet_mlflow():
        return _same_bundle(name, bundle) if store_exists() else None


def _same_bundle(name: str, bundle: PredictorBundle) -> RegisteredPredictor | None:
    """As `registered_already`, of versions whose files can be read."""
    client = MlflowClient()
    condition = f"name = '{name}' AND tags.`{DIGEST_TAG}` = '{bundle_digest(bundle)}'"
    for version in client.search_model_versions(condition):
        try:
            if read_document(version, BUNDLE_FILE) != bundle.to_dict():
                continue
        except (StoreError, SchemaError):
            continue
        try:
            champion = find_version(name, CHAMPION, None)
        except (NotRegisteredError, DanglingAliasError):
            champion = None
        if champion is None or _was_to_follow(version, champion):
            client.set_registered_model_alias(name, CHAMPION, version.version)
            champion = version
        is_champion = champion.version == version.version
        said = from_version(version, alias=CHAMPION if is_champion else None)
        text = f"registered already: version {version.version} holds this very bundle"
        if not is_champion:
            text += f" and is no champion ({said.reason}); `tula registry promote` asks again"
        return replace(said, added=False, promoted=is_champion, reason=text)
    return None


def _was_to_follow(version: ModelVersion, champion: ModelVersion) -> bool:
    """Whether a kill came between a version that the gate promoted and its alias.

    Not where the champion became so later, by hand.
    """
    by_hand_s = float((champion.tags or {}).get("tula.champion_since", 0.0))
    return (
        (version.tags or {}).get("tula.gate") == "promoted"
        and "tula.champion_since" not in (version.tags or {})
        and int(version.version) > int(champion.version)
        and by_hand_s < version.creation_timestamp / 1000
    )


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


def _judge_against_champion(name: str, bundle: PredictorBundle, table: ProfileTable) -> Verdict:
    """The gate's verdict; a champion that cannot be read is replaced, a newer one is kept."""
    try:
        current = find_version(name, CHAMPION, None)
    except NotRegisteredError:
        return judge(bundle, table, None)
    except DanglingAliasError as error:
        gone = f"the alias of the champion points to version {error.version}, which was deleted"
        verdict = judge(bundle, table, None)
        return replace(verdict, reason=f"promoted: {gone}")
    label = f"version {current.version} (the champion)"
    try:
        champion = PredictorBundle.from_dict(read_document(current, BUNDLE_FILE))
        champion_table = ProfileTable.from_dict(read_document(current, TABLE_FILE))
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
