"""Champions and their files, cached: what a served request needs of the registry, in microseconds.

A name's champion is looked up again when the last look is two seconds old; for two more seconds
the old answer is given while a thread looks, after that the request waits for the look-up. So a new
champion is served within four seconds, without a restart. Where the registry does not answer, what
was seen last is served, with a warning; what was never seen is a StoreError within seconds, however
long MLflow's client would go on trying.
"""

from __future__ import annotations

import difflib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

import mlflow
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from mlflow_tula.errors import (
    DanglingAliasError,
    NotRegisteredError,
    SchemaError,
    StoreError,
    TulaError,
)
from mlflow_tula.predictors.bundle import PredictorBundle
from mlflow_tula.registry import CHAMPION
from mlflow_tula.registry.lookup import find_version
from mlflow_tula.registry.model_files import BUNDLE_FILE, TABLE_FILE, read_json
from mlflow_tula.stores import masked, store_errors, store_exists
from mlflow_tula.table import ProfileTable

_logger = logging.getLogger(__name__)
T = TypeVar("T")

FRESH_S = 2.0
"""A look-up is taken as true for so long, and given for as long again while another runs."""

ANSWER_S = 6.0
"""How long a request waits for the registry."""

DOWN_S = 2.0
"""After a failure nobody waits for the registry for so long."""

LISTED_S = 5.0
KEPT = 1024
"""Champions in memory, about 30 kB each."""

_WARM_PAUSE_S = 0.01
_MOST_WAITING = 16
_SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Champion:
    """The version that answers for a registered name; `source` tells versions apart for good."""

    name: str
    version: int
    source: str
    bundle: PredictorBundle
    warning: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """A registered predictor as its registered model describes it; no version was looked at."""

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


@dataclass(slots=True)
class _Entry:
    """A champion and when the registry last said so."""

    champion: Champion
    checked_s: float


class Catalogue:
    """Reads the registry that MLflow is set to; safe to use from many threads."""

    def __init__(
        self, *, fresh_s: float = FRESH_S, answer_s: float = ANSWER_S, kept: int = KEPT
    ) -> None:
        """Nothing is read yet.

        Args:
            fresh_s: seconds for which a look-up is taken as true.
            answer_s: seconds that a request waits for the registry.
            kept: champions in memory; about 30 kB each.
        """
        self._fresh_s, self._answer_s, self._kept = fresh_s, answer_s, kept
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._tables: OrderedDict[str, ProfileTable] = OrderedDict()
        self._waiting: dict[str, Future[Any]] = {}
        self._down: tuple[float, str] = (0.0, "")
        self._listed: tuple[float, tuple[Listed, ...]] | None = None

    def champion(self, name: str) -> Champion:
        """The champion of a registered name.

        Raises:
            NotRegisteredError: there is none; says what there is instead.
            DanglingAliasError: the alias points to a deleted version.
            StoreError: the registry does not answer, and nothing was seen before.
        """
        entry = self._entry(name)
        age = float("inf") if entry is None else time.monotonic() - entry.checked_s
        if entry is not None and age < 2 * self._fresh_s:
            if age >= self._fresh_s:
                self._start(name, lambda: self._fetch(name, entry))
            return entry.champion
        try:
            return self._asked(name, lambda: self._fetch(name, entry))
        except NotRegisteredError as error:
            self._forget(name)
            raise NotRegisteredError(self._instead(name, str(error))) from error
        except (DanglingAliasError, SchemaError):
            self._forget(name)
            raise
        except StoreError as error:
            if entry is None:
                raise
            _logger.warning("%s is served as last seen: %s", name, error)
            seen = f"version {entry.champion.version}, the champion as last seen {age:.0f} s ago"
            return replace(entry.champion, warning=f"the registry does not answer: this is {seen}")

    def warm(self) -> None:
        """Read every champion there is room for, in the background and in small pieces.

        The first questions after a start then find their files in memory.
        """

        def work() -> None:
            try:
                names = [one.name for one in self.listed() if one.version is not None]
            except StoreError as error:
                _logger.info("not warmed up: %s", error)
                return
            for name in names[: self._kept]:
                try:
                    self.champion(name)
                except TulaError as error:
                    _logger.info("%s is not ready to be served: %s", name, error)
                time.sleep(_WARM_PAUSE_S)

        threading.Thread(target=work, name="tula-warm", daemon=True).start()

    def table(self, champion: Champion) -> ProfileTable:
        """The measurements that a champion was fitted to; raises as `champion` does."""
        key = f"{champion.name} {champion.source}"
        with self._lock:
            if key in self._tables:
                self._tables.move_to_end(key)
                return self._tables[key]
        table = self._asked(f"table {key}", lambda: _read_table(champion))
        with self._lock:
            self._tables[key] = table
            while len(self._tables) > self._kept // 16:
                self._tables.popitem(last=False)
        return table

    def listed(self, *, within_s: float = LISTED_S) -> tuple[Listed, ...]:
        """Every registered predictor, by name; no older than `within_s`.

        Raises:
            StoreError: the registry does not answer.
        """
        found = self._listed
        if found is not None and time.monotonic() - found[0] < within_s:
            return found[1]
        models = self._asked("the list of predictors", _list_models)
        self._listed = (time.monotonic(), models)
        return models

    def _entry(self, name: str) -> _Entry | None:
        with self._lock:
            entry = self._entries.get(name)
            if entry is not None:
                self._entries.move_to_end(name)
            return entry

    def _forget(self, name: str) -> None:
        with self._lock:
            self._entries.pop(name, None)

    def _fetch(self, name: str, known: _Entry | None) -> Champion:
        """Look the alias up, and read the bundle where the version is another."""
        try:
            version = find_version(name, CHAMPION, None)
        except DanglingAliasError:
            raise
        except StoreError as error:
            self._down = (time.monotonic() + DOWN_S, str(error))
            raise
        champion = None if known is None else known.champion
        if champion is None or (champion.version, champion.source) != _identity(version):
            champion = _read_champion(version)
        with self._lock:
            self._entries[name] = _Entry(champion, time.monotonic())
            self._entries.move_to_end(name)
            while len(self._entries) > self._kept:
                self._entries.popitem(last=False)
        return champion

    def _asked(self, key: str, work: Callable[[], T]) -> T:
        """What `work` returns, within the time that a request may wait."""
        until, why = self._down
        if time.monotonic() < until:
            raise StoreError(why)
        future = self._start(key, work)
        try:
            return future.result(timeout=self._answer_s)
        except LateError as error:
            if future.done():  # a timeout of the store's own
                raise
            why = (
                f"the registry {masked(mlflow.get_registry_uri())} has not answered within "
                f"{self._answer_s:g} s: see whether it runs (`tula doctor`), and ask again"
            )
            self._down = (time.monotonic() + DOWN_S, why)
            raise StoreError(why) from error

    def _start(self, key: str, work: Callable[[], T]) -> Future[T]:
        """Do `work` in a thread, once where several ask at the same time."""
        with self._lock:
            running = self._waiting.get(key)
            if running is not None:
                return running
            future: Future[T] = Future()
            if len(self._waiting) >= _MOST_WAITING:
                future.set_exception(
                    StoreError(
                        f"the registry {masked(mlflow.get_registry_uri())} is too slow: "
                        f"{_MOST_WAITING} look-ups wait for it; ask again"
                    )
                )
                return future
            self._waiting[key] = future
        # Not a pool: its threads would be waited for when the process ends.
        threading.Thread(
            target=self._run, args=(key, work, future), name="tula-registry", daemon=True
        ).start()
        return future

    def _run(self, key: str, work: Callable[[], T], future: Future[T]) -> None:
        """The thread: every outcome, a bug too, goes to those who wait."""
        try:
            result = work()
        except BaseException as error:
            with self._lock:
                self._waiting.pop(key, None)
            future.set_exception(error)
            return
        with self._lock:
            self._waiting.pop(key, None)
        future.set_result(result)

    def _instead(self, name: str, otherwise: str) -> str:
        """What is not registered, and what there is instead."""
        _, workload, hardware = split_name(name)
        try:
            known = self.listed(within_s=60.0)
        except StoreError:
            return otherwise
        if any(one.name == name for one in known):
            return f"{name} has no champion: choose one with `tula registry promote {name}`"
        here = sorted(one.hardware for one in known if one.workload == workload)
        if here:
            return f"{workload} is not registered for hardware {hardware!r}; it is for {_few(here)}"
        near = difflib.get_close_matches(
            workload, {one.workload for one in known}, n=3, cutoff=0.75
        )
        there = near or sorted({one.workload for one in known})
        return (
            f"unknown workload {workload!r}: {'did you mean ' if near else 'registered: '}"
            f"{_few(there) if there else 'nothing yet'}{'?' if near else ''}"
        )


def split_name(name: str) -> tuple[str, str, str]:
    """(`tula`, `<model>.<dataset>`, `<hardware>`) of a registered name."""
    first, _, rest = name.partition(".")
    workload, _, hardware = rest.rpartition(".")
    return first, workload, hardware


def _few(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _identity(version: ModelVersion) -> tuple[int, str]:
    return int(version.version), f"{version.source} {version.creation_timestamp}"


def _read_champion(version: ModelVersion) -> Champion:
    """The bundle of a version."""
    number, source = _identity(version)
    document = _read(version.name, number, version.source or "", BUNDLE_FILE)
    try:
        bundle = PredictorBundle.from_dict(document)
    except SchemaError as error:
        raise SchemaError(f"{version.name} version {number}: {error}") from error
    return Champion(name=version.name, version=number, source=source, bundle=bundle)


def _read_table(champion: Champion) -> ProfileTable:
    source = champion.source.partition(" ")[0]
    return ProfileTable.from_dict(_read(champion.name, champion.version, source, TABLE_FILE))


def _read(name: str, version: int, source: str, file: str) -> dict[str, Any]:
    """One document of a version's model."""
    with store_errors(f"find the files of {name}"):
        return read_json(_within_server(_address(name, version, source)), file)


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


def _within_server(address: str) -> str:
    """Where the files lie for the tracking server itself, which others ask for them over HTTP."""
    parts = urlsplit(address)
    root = os.environ.get("_MLFLOW_SERVER_ARTIFACT_DESTINATION")
    if parts.scheme != "mlflow-artifacts" or not root:
        return address
    if ".." in parts.path.split("/"):
        raise StoreError(f"the model's address {masked(address)} leaves the artifact folder")
    return f"{root.rstrip('/')}/{parts.path.lstrip('/')}"


def _list_models() -> tuple[Listed, ...]:
    """All registered predictors: one search a thousand of them."""
    if not store_exists():
        return ()
    found: list[Listed] = []
    with store_errors("list the registered predictors"):
        client, token = MlflowClient(), None
        while True:
            page = client.search_registered_models(
                "name LIKE 'tula.%'", max_results=1000, page_token=token
            )
            for model in page:
                tags = model.tags or {}
                number = (model.aliases or {}).get(CHAMPION)
                if tags.get("tula.workload") and tags.get("tula.hardware"):
                    found.append(
                        Listed(
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
                    )
            token = page.token
            if not token:
                break
    return tuple(sorted(found, key=lambda one: one.name))
