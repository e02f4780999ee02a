"""Versions of a registered predictor: list, compare, promote, roll back, prune.

`register` (registry.py) adds a version and lets the gate decide. What a person does afterwards is
here: the same gate (promotion.py) judges a promotion by hand, and what happened is written to the
version's tags and description, from which the history is read again:

    tula.gate              promoted | kept | rolled_back
    tula.gate_reason       why, in one sentence
    tula.champion_since    when it became champion by hand (else: when it was registered)
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion, RegisteredModel
from mlflow.exceptions import MlflowException

from mlflow_tula.documents import shown
from mlflow_tula.errors import (
    DanglingAliasError,
    InvalidInputError,
    NotRegisteredError,
    StoreError,
    WorkFailedError,
)
from mlflow_tula.hardware import detect
from mlflow_tula.registry import CHAMPION, find, load, load_table
from mlflow_tula.registry.evaluation import Evaluation, evaluate_bundle
from mlflow_tula.registry.lookup import ABSENT, require_store
from mlflow_tula.registry.promotion import Verdict, judge
from mlflow_tula.registry.words import with_gate
from mlflow_tula.specs import Spec, check_int, slugify
from mlflow_tula.stores import store_errors
from mlflow_tula.table import Measurement

MAX_NAME = 250
MAX_COMPARED = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Version(Spec):
    """One version of a registered predictor; errors are fractions, times seconds since 1970."""

    name: str
    version: int
    champion: bool = False
    aliases: tuple[str, ...] = ()
    gate: str = ""
    reason: str = ""
    created_s: float = 0.0
    champion_since_s: float = 0.0
    step_time_mape: float | None = None
    memory_mape: float | None = None
    table_digest: str = ""
    run_id: str | None = None
    description: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison(Spec):
    """How one version does on every row of the versions compared, and on rows not its own."""

    version: Version
    all_rows: Evaluation
    unseen_rows: Evaluation


def registered_name(text: str) -> str:
    """A registered name in full, from itself or from `model/dataset` (this machine's hardware)."""
    text = text.strip().removeprefix("models:/").split("@")[0]
    full = text.startswith("tula.")
    if full and re.fullmatch(r"tula(\.[a-z0-9_-]+){1,6}", text) and len(text) <= MAX_NAME:
        return text
    model, separator, dataset = text.replace("/", ".", 1).partition(".")
    if full or not separator or not model or not dataset:
        raise InvalidInputError(
            f"a registered predictor is named tula.<model>.<dataset>.<hardware>, or model/dataset "
            f"for this machine, not {shown(text)}"
        )
    return f"tula.{slugify(model)}.{slugify(dataset)}.{detect().slug}"


def list_versions(name: str) -> list[Version]:
    """Every version of a registered model, the newest first.

    Raises:
        NotRegisteredError: no such model, or it has no version.
        DanglingAliasError: the alias points to a version that was deleted.
    """
    model, found = _fetch(name)
    champion = _champion_number(model)
    numbers = {int(one.version) for one in found}
    if champion is not None and champion not in numbers:
        raise DanglingAliasError(name, CHAMPION, champion)
    return _sorted(model, found)


def newest(name: str) -> int:
    """The number of the newest version, also where the alias is broken."""
    return max(int(one.version) for one in _fetch(name)[1])


def promote(name: str, version: int, *, force: bool = False) -> Verdict:
    """Make a version the champion, if the gate finds it no worse than the present one.

    Args:
        name: the registered model.
        version: which version.
        force: promote it whatever the gate says.

    Raises:
        NotRegisteredError: no such model or version.
        WorkFailedError: the gate says no; nothing was changed.
    """
    check_int("version", version)
    model, found = _fetch(name)
    present = {one.version: one for one in _sorted(model, found)}
    _require(name, version, present)
    current = _champion_number(model)
    if current == version:
        return Verdict(promoted=True, reason=f"version {version} is the champion already")
    verdict = _judged(name, version, current if current in present else None, force=force)
    if not verdict.promoted and not force:
        raise WorkFailedError(f"version {version} of {name}: {verdict.reason} (--force overrules)")
    reason = f"promoted by hand: {verdict.reason}" if force else verdict.reason
    _crown(name, present[version], reason)
    return replace(verdict, promoted=True, reason=reason)


def rollback(name: str) -> Version:
    """Give the alias back to the champion before the present one; returns that version.

    Raises:
        NotRegisteredError: no such model, or no champion.
        InvalidInputError: there was no champion before it.
    """
    versions = list_versions(name)
    current = next((one for one in versions if one.champion), None)
    if current is None:
        raise NotRegisteredError(
            f"{name} has no champion to roll back from: choose one with `tula registry promote "
            f"{name} --version {versions[0].version}`"
        )
    earlier = [
        one
        for one in versions
        if one.gate == "promoted"
        and (one.champion_since_s, one.version) < (current.champion_since_s, current.version)
    ]
    if not earlier:
        raise InvalidInputError(
            f"version {current.version} of {name} is its first champion: there is none before it"
        )
    before = max(earlier, key=lambda one: (one.champion_since_s, one.version))
    reason = f"champion again: version {current.version} was rolled back"
    with store_errors(f"roll back {name}"):
        client = MlflowClient()
        client.set_registered_model_alias(name, CHAMPION, str(before.version))
        _note(client, current, "rolled_back", f"rolled back to version {before.version}")
        _note(client, before, "promoted", reason)
    return before


def retire(name: str) -> None:
    """Take the alias `champion` away; every version stays."""
    _fetch(name)
    with store_errors(f"take the alias of {name} away"):
        MlflowClient().delete_registered_model_alias(name, CHAMPION)


def prune(name: str, *, keep: int = 5, delete: bool = False) -> list[Version]:
    """Delete old versions: all but the newest `keep`, those with an alias, and the last champion.

    Args:
        name: the registered model.
        keep: how many of the newest stay.
        delete: really delete; otherwise only say which would go. Artifacts of the runs stay.

    Returns:
        The versions that were, or would be, deleted, the oldest first.
    """
    check_int("keep", keep)
    versions = list_versions(name)
    crowned = [one for one in versions if one.gate == "promoted" and not one.champion]
    last = max(crowned, key=lambda one: one.champion_since_s, default=None)
    old = [
        one
        for one in reversed(versions[keep:])
        if not one.aliases and (last is None or one.version != last.version)
    ]
    if delete:
        with store_errors(f"delete versions of {name}"):
            for one in old:
                MlflowClient().delete_model_version(name, str(one.version))
    return old


def compare(name: str, versions: Sequence[int] | None = None) -> list[Comparison]:
    """Ask several versions for the measurements of all of them, the newest version first.

    Args:
        name: the registered model.
        versions: which ones; the newest ten when None.
    """
    present = list_versions(name)
    known = {one.version: one for one in present}
    for number in versions or ():
        _require(name, check_int("version", number), known)
    chosen = [one for one in present if versions is None or one.version in versions]
    chosen = chosen[:MAX_COMPARED]
    tables = {one.version: load_table(name, version=one.version) for one in chosen}
    rows = list(dict.fromkeys(row for table in tables.values() for row in table.ok))
    found = []
    for one in chosen:
        bundle = load(name, version=one.version)
        own = set(tables[one.version].ok)
        unseen: list[Measurement] = [row for row in rows if row not in own]
        found.append(
            Comparison(
                version=one,
                all_rows=evaluate_bundle(bundle, rows),
                unseen_rows=evaluate_bundle(bundle, unseen),
            )
        )
    return found


def _fetch(name: str) -> tuple[RegisteredModel, list[ModelVersion]]:
    """The registered model with its versions (whose own `aliases` MLflow leaves empty)."""
    require_store()
    with store_errors(f"look up {name}"):
        client = MlflowClient()
        try:
            model = client.get_registered_model(name)
        except MlflowException as error:
            if error.error_code not in ABSENT:
                raise
            raise NotRegisteredError(_no_such_model(name)) from error
        found, token = [], None
        while True:
            page = client.search_model_versions(f"name = '{name}'", page_token=token)
            found += list(page)
            token = page.token
            if not token:
                break
    if not found:
        raise NotRegisteredError(f"{name} has no version: `tula register` makes one")
    return model, found


def _no_such_model(name: str) -> str:
    """What there is instead."""
    import difflib

    known = [one.name for one in find()]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known[:5]
    return f"{name} is not registered; there is {', '.join(near) if near else 'nothing yet'}"


def _sorted(model: RegisteredModel, found: list[ModelVersion]) -> list[Version]:
    """As our own type, the newest first."""
    aliases: dict[int, list[str]] = {}
    for alias, number in (model.aliases or {}).items():
        aliases.setdefault(int(number), []).append(alias)
    listed = [_version(one, tuple(sorted(aliases.get(int(one.version), [])))) for one in found]
    return sorted(listed, key=lambda one: -one.version)


def _version(found: ModelVersion, aliases: tuple[str, ...]) -> Version:
    """What MLflow and our tags say of one version."""
    tags = found.tags or {}

    def number(key: str) -> float | None:
        try:
            return float(tags[key])
        except (KeyError, ValueError):
            return None

    created = float(found.creation_timestamp or 0) / 1000
    return Version(
        name=found.name,
        version=int(found.version),
        champion=CHAMPION in aliases,
        aliases=aliases,
        gate=tags.get("tula.gate", ""),
        reason=tags.get("tula.gate_reason", ""),
        created_s=created,
        champion_since_s=number("tula.champion_since") or created,
        step_time_mape=number("tula.step_time_mape"),
        memory_mape=number("tula.memory_mape"),
        table_digest=tags.get("tula.table_digest", ""),
        run_id=found.run_id or None,
        description=found.description or "",
    )


def _champion_number(model: RegisteredModel) -> int | None:
    number = (model.aliases or {}).get(CHAMPION)
    return None if number is None else int(number)


def _require(name: str, version: int, present: dict[int, Version]) -> None:
    if version not in present:
        listed = ", ".join(map(str, sorted(present)))
        raise NotRegisteredError(f"{name} has no version {version}; it has {listed}")


def _judged(name: str, version: int, current: int | None, *, force: bool) -> Verdict:
    """The gate's verdict; with `force` files that cannot be read are no obstacle."""
    try:
        bundle, table = load(name, version=version), load_table(name, version=version)
        if current is None:
            return judge(bundle, table, None)
        return judge(
            bundle,
            table,
            load(name, version=current),
            load_table(name, version=current),
            champion_name=f"version {current} (the champion)",
        )
    except (StoreError, InvalidInputError) as error:
        if not force:
            raise
        return Verdict(promoted=True, reason=f"the gate could not read the files: {error}")


def _crown(name: str, version: Version, reason: str) -> None:
    """Write down why, then move the alias: readers never see a champion without its reason."""
    with store_errors(f"promote version {version.version} of {name}"):
        client = MlflowClient()
        since = f"{time.time():.3f}"
        client.set_model_version_tag(name, str(version.version), "tula.champion_since", since)
        _note(client, version, "promoted", reason)
        client.set_registered_model_alias(name, CHAMPION, str(version.version))


def _note(client: MlflowClient, version: Version, gate: str, reason: str) -> None:
    """The version's tags, and the gate's paragraph in its description."""
    number = str(version.version)
    client.set_model_version_tag(version.name, number, "tula.gate", gate)
    client.set_model_version_tag(version.name, number, "tula.gate_reason", reason[:500])
    text = with_gate(version.description, reason)
    client.update_model_version(version.name, number, description=text)
