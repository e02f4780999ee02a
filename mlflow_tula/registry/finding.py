"""The read side of the registry: what is registered, and for what.

`find` lists, `resolve` answers for a workload on a hardware, `load` and `load_table` read what lies
in a version. Nothing here writes.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion, RegisteredModel

from mlflow_tula.errors import InvalidInputError, NotRegisteredError, SchemaError
from mlflow_tula.predictors.bundle import PredictorBundle
from mlflow_tula.registry.lookup import dangling, find_version
from mlflow_tula.registry.model_files import BUNDLE_FILE, TABLE_FILE, read_json
from mlflow_tula.specs import HardwareSpec, Spec, Workload, slugify
from mlflow_tula.stores import store_errors, store_exists
from mlflow_tula.table import ProfileTable

_logger = logging.getLogger(__name__)

CHAMPION = "champion"
_SHOWN = 5
_PAGE = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisteredPredictor(Spec):
    """One registered version: where it is, what it is for, and what the gate said.

    `alias` is "champion" where this version is the champion; `step_time_mape` is the leave-one-out
    error as a fraction; `added` is false where `register` found the very same bundle there already.
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
    added: bool = True

    @property
    def uri(self) -> str:
        """What `mlflow.pyfunc.load_model` takes."""
        return f"models:/{self.name}@{self.alias}" if self.alias else self.version_uri

    @property
    def version_uri(self) -> str:
        """The same for exactly this version."""
        return f"models:/{self.name}/{self.version}"


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
        return PredictorBundle.from_dict(read_document(found, BUNDLE_FILE))
    except SchemaError as error:
        raise SchemaError(f"{name} version {found.version}: {error}") from error


def load_table(name: str, alias: str = CHAMPION, *, version: int | None = None) -> ProfileTable:
    """The measurements that a registered version was fitted to; raises as `load` does."""
    found = find_version(name, alias, version)
    try:
        return ProfileTable.from_dict(read_document(found, TABLE_FILE))
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
    wanted = " AND ".join(conditions) or "name LIKE 'tula.%'"
    with store_errors("search the registry"):
        client = MlflowClient()
        # Two searches, however many models there are; the versions last, so that none is missing.
        models = _every_page(client.search_registered_models, wanted, max_results=_PAGE)
        versions: dict[str, dict[int, ModelVersion]] = {}
        for one in _every_page(client.search_model_versions, wanted):
            versions.setdefault(one.name, {})[int(one.version)] = one
    shown = [_best_version(model, versions.get(model.name, {})) for model in models]
    # Others may register models of their own under `tula.`: they predict no workload.
    found = [one for one in shown if one is not None and one.workload_slug]
    return sorted(found, key=lambda one: one.name)


def _every_page(search: Callable[..., Any], wanted: str, **options: Any) -> list[Any]:
    """All that a search of MLflow's finds."""
    found: list[Any] = []
    token = None
    while True:
        page = search(wanted, page_token=token, **options)
        found += page
        token = page.token
        if not token:
            return found


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
        return from_version(find_version(name, alias, None), alias=alias)
    except NotRegisteredError as error:
        if find(slug, hardware):
            raise  # it is registered, only not under this alias
        text = _nothing_registered(slug, hardware, profile_with)
        raise NotRegisteredError(text) from error


def for_hardware(workload_slug: str, hardware: str) -> RegisteredPredictor:
    """The predictor of this workload on the hardware that a person names.

    Args:
        workload_slug: `<model>.<dataset>`.
        hardware: a hardware slug, a fingerprint, or a device's name (`Tesla T4`), in any case.

    Raises:
        NotRegisteredError: none is registered for it; says for which hardware there is one.
        InvalidInputError: the device's name fits several.
    """
    known = find(workload_slug)
    exact = [one for one in known if hardware in (one.hardware_slug, one.fingerprint)]
    slug = slugify(hardware)
    named = exact or [one for one in known if slug in (one.hardware_slug, slugify(one.device_name))]
    # A part of a name will do where it means one thing: `t4`, `h200`.
    matches = named or [one for one in known if slug in one.hardware_slug.split("-")]
    if len(matches) == 1:
        return matches[0]
    described = ", ".join(f"{one.hardware_slug} ({one.device_name})" for one in matches or known)
    if matches:
        raise InvalidInputError(
            f"hardware {hardware!r} could be any of {described}: name one by its slug"
        )
    raise NotRegisteredError(
        f"nothing is registered for {workload_slug} on hardware {hardware!r}; registered: "
        f"{described or 'nothing for this workload'}"
    )


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


def _harmless(slug: str) -> str:
    """A slug that cannot break out of a search filter."""
    return ".".join(slugify(part) for part in slug.split("."))


def _best_version(
    model: RegisteredModel, versions: Mapping[int, ModelVersion]
) -> RegisteredPredictor | None:
    """The champion of a registered model, or its newest version, or None when it has none."""
    number = (model.aliases or {}).get(CHAMPION)
    if number is not None and int(number) in versions:
        return from_version(versions[int(number)], alias=CHAMPION)
    if number is not None:
        _logger.warning("%s", dangling(model.name, CHAMPION, int(number)))
    return None if not versions else from_version(versions[max(versions)], alias=None)


def read_document(version: ModelVersion, name: str) -> dict[str, Any]:
    """One document of a version's model."""
    with store_errors(f"find the files of {version.name}"):
        address = MlflowClient().get_model_version_download_uri(version.name, version.version)
    return read_json(address, name)


def from_version(version: ModelVersion, *, alias: str | None) -> RegisteredPredictor:
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
