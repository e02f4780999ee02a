"""Champions and their files, cached: what a served request needs of the registry, in microseconds.

A name's champion is looked up again when the last look is two seconds old; for two more seconds
the old answer is given while a thread looks, after that the request waits for the look-up. So a new
champion is served within four seconds, without a restart. In MLflow's own database one query looks
at all champions. A workload without a predictor on a hardware is answered by the other models there
(foreseen.py), which is worked out once and kept for a while. Where the registry does not answer,
what was seen last is served, with a warning; what was never seen is a StoreError within seconds,
however long MLflow's client would go on trying.
"""

from __future__ import annotations

import difflib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import mlflow

from mlflow_tula.errors import (
    DanglingAliasError,
    NotRegisteredError,
    SchemaError,
    StoreError,
    TulaError,
)
from mlflow_tula.registry import CHAMPION
from mlflow_tula.registry.lookup import find_version
from mlflow_tula.serving.champions import (
    Champion,
    Identity,
    Listed,
    all_champions,
    identity,
    list_models,
    read_champion,
    read_table,
    split_name,
)
from mlflow_tula.serving.foreseen import foresee
from mlflow_tula.stores import masked
from mlflow_tula.table import ProfileTable

_logger = logging.getLogger(__name__)
T = TypeVar("T")

FRESH_S = 2.0
"""A look-up is taken as true for so long, and given for as long again while another runs."""

ANSWER_S = 6.0
"""How long a request waits for the registry."""

DOWN_S = 2.0
"""After a failure nobody waits for the registry for so long."""

FORESEEN_S = 60.0
"""What other models say is worked out again after so long."""

LISTED_S = 5.0
KEPT = 1024
"""Champions in memory, about 30 kB each."""

_WARM_PAUSE_S = 0.005
_MOST_WAITING = 16
_ALL = "all champions"
_ONE_BY_ONE_S = 60.0
_SHOWN = 5


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
        self._foreseen: OrderedDict[str, _Entry] = OrderedDict()
        self._waiting: dict[str, Future[Any]] = {}
        self._down: tuple[float, str] = (0.0, "")
        self._one_by_one_until = 0.0
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
                if self._at_once:
                    self._start(_ALL, self._look_at_all)
                else:
                    self._start(name, lambda: self._fetch(name, entry))
            return entry.champion
        try:
            if entry is not None and self._at_once and self._asked(_ALL, self._look_at_all):
                entry = self._entry(name)
                if entry is not None and time.monotonic() - entry.checked_s < self._fresh_s:
                    return entry.champion
            return self._asked(name, lambda: self._fetch(name, entry))
        except NotRegisteredError as error:
            self._forget(name)
            return self._other_models(name, str(error))
        except (DanglingAliasError, SchemaError):
            self._forget(name)
            raise
        except StoreError as error:
            if entry is None:
                raise
            _logger.warning("%s is served as last seen: %s", name, error)
            seen = f"version {entry.champion.version}, the champion as last seen {age:.0f} s ago"
            return replace(entry.champion, warning=f"the registry does not answer: this is {seen}")

    @property
    def _at_once(self) -> bool:
        """Whether one query may tell of all champions."""
        return time.monotonic() >= self._one_by_one_until

    def _look_at_all(self) -> bool:
        """Confirm what is in memory by one query; False where each name must be looked up."""
        began = time.monotonic()
        found = all_champions()
        if found is None:
            self._one_by_one_until = began + _ONE_BY_ONE_S
            return False
        with self._lock:
            entries = list(self._entries.items())
        for name, entry in entries:
            champion = entry.champion
            same = found.get(name) == (champion.version, champion.source)
            entry.checked_s = began if same else float("-inf")
        return True

    def _other_models(self, name: str, otherwise: str) -> Champion:
        """What the other models of the hardware say, or an error that says what there is."""
        with self._lock:
            entry = self._foreseen.get(name)
        if entry is not None and time.monotonic() - entry.checked_s < FORESEEN_S:
            return entry.champion
        try:
            registered = self.listed(within_s=60.0)
        except StoreError as error:
            raise NotRegisteredError(otherwise) from error
        future = self._start(f"foreseen {name}", lambda: self._foresee(name, registered))
        try:
            return future.result(timeout=self._answer_s)
        except LateError as error:
            if future.done():
                raise
            raise StoreError(
                f"{name} is being foreseen from other models, which takes longer than "
                f"{self._answer_s:g} s: ask again"
            ) from error
        except NotRegisteredError as error:
            text = "; ".join(filter(None, [self._instead(name, otherwise), str(error)]))
            raise NotRegisteredError(text) from error

    def _foresee(self, name: str, registered: tuple[Listed, ...]) -> Champion:
        """Work it out and keep it, also where nobody waits any more: who asks again finds it."""
        champion = foresee(name, registered)
        with self._lock:
            self._foreseen[name] = _Entry(champion, time.monotonic())
            while len(self._foreseen) > self._kept // 16:
                self._foreseen.popitem(last=False)
        return champion

    def warm(self) -> None:
        """Read every champion there is room for, in the background and in small pieces.

        The first questions after a start then find their files in memory.
        """

        def work() -> None:
            try:
                began, known = time.monotonic(), all_champions() or {}
                names = list(known) or [o.name for o in self.listed() if o.version is not None]
            except StoreError as error:
                _logger.info("not warmed up: %s", error)
                return
            for name in [one for one in names if _names_a_workload(one)][: self._kept]:
                try:
                    if name not in known:
                        self.champion(name)
                    elif self._entry(name) is None:
                        self._take(name, known[name], None, began)
                except TulaError as error:
                    _logger.info("%s is not ready to be served: %s", name, error)
                time.sleep(_WARM_PAUSE_S)

        threading.Thread(target=work, name="tula-warm", daemon=True).start()

    def table(self, champion: Champion) -> ProfileTable:
        """The measurements that a champion was fitted to; raises as `champion` does."""
        if champion.answers:  # nothing was measured
            bundle = champion.bundle
            return ProfileTable(workload=bundle.workload, hardware=bundle.hardware)
        key = f"{champion.name} {champion.source}"
        with self._lock:
            if key in self._tables:
                self._tables.move_to_end(key)
                return self._tables[key]
        table = self._asked(f"table {key}", lambda: read_table(champion))
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
        models = self._asked("the list of predictors", list_models)
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
        return self._take(name, identity(version), known, time.monotonic())

    def _take(self, name: str, who: Identity, known: _Entry | None, checked_s: float) -> Champion:
        """Keep the champion that the registry told of, its bundle read where it is another."""
        champion = None if known is None else known.champion
        if champion is None or (champion.version, champion.source) != who:
            champion = read_champion(name, who)
        with self._lock:
            self._entries[name] = _Entry(champion, checked_s)
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
            known = [one for one in self.listed(within_s=60.0) if not one.foreseen]
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


def _names_a_workload(name: str) -> bool:
    """Whether this is `tula.<model>.<dataset>.<hardware>`."""
    return name.count(".") >= 3


def _few(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
