"""Make a store once, whoever else is about to: sqlite beside its place, PostgreSQL under a lock."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

import mlflow
from filelock import FileLock, Timeout

from mlflow_tula.errors import StoreError
from mlflow_tula.redaction import masked
from mlflow_tula.stores.words import quiet_mlflow, store_errors

_INITIALISE_TIMEOUT_S = 120.0
_ABANDONED_S = 600.0
_LOCK_NUMBER = 7_468_411


def sqlite_path(uri: str) -> Path | None:
    """The file of a sqlite URI as an absolute path; None for other stores and for memory."""
    if not uri.startswith("sqlite:///"):
        return None
    name = unquote(uri.removeprefix("sqlite:///").split("?")[0])
    return None if name in {"", ":memory:"} else Path(name).absolute()


def is_older(revision: str) -> bool:
    """Whether tables of this revision are behind the installed MLflow's.

    Asked before MLflow opens the file: where a table is missing it migrates by itself, and a person
    is to make a copy first.
    """
    from alembic.script import ScriptDirectory

    scripts = ScriptDirectory(str(Path(mlflow.__file__).parent / "store" / "db_migrations"))
    known = {one.revision for one in scripts.walk_revisions()}
    return revision in known and revision not in scripts.get_heads()


def make_sqlite(path: Path) -> None:
    """Make the store with all its tables unless it is there; whoever is first has made it.

    A kill in the middle leaves a file under another name, and processes on one folder need not
    share a temporary folder for a lock.
    """
    if path.exists() and path.stat().st_size > 0:
        return
    from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{path.name}.*.new*"):
        if time.time() - left.stat().st_mtime > _ABANDONED_S:
            left.unlink(missing_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        # Where no file can be made MLflow would try again and again, for an hour.
        scratch.touch()
        with store_errors(f"make the store {path}"), quiet_mlflow():
            made = SqlAlchemyStore(f"sqlite:///{scratch}", DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH)
            made.engine.dispose()
        if path.exists() and path.stat().st_size == 0:
            scratch.replace(path)  # somebody has touched it
            return
        try:
            path.hardlink_to(scratch)
        except FileExistsError:
            return
        except OSError:  # no links on this file system
            scratch.rename(path)
    finally:
        for left in path.parent.glob(f"{scratch.name}*"):
            left.unlink(missing_ok=True)


@contextmanager
def making_lock(uri: str) -> Iterator[None]:
    """Hold the lock under which a store is made; nothing for servers.

    Of a sqlite store it is a file of the person's cache folder, the same whatever TMPDIR says, and
    none beside the store.
    """
    path = sqlite_path(uri)
    if path is None:
        with _database_lock(uri):
            yield
        return
    lock = FileLock(_lock_file(path))
    try:
        lock.acquire(timeout=_INITIALISE_TIMEOUT_S)
    except Timeout as error:
        raise StoreError(
            f"another process has held the lock of the MLflow store {path} for "
            f"{_INITIALISE_TIMEOUT_S:g} s: end it, or remove {lock.lock_file}"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _lock_file(path: Path) -> Path:
    """Where the lock of a store's file is; in the temporary folder where there is no cache."""
    import platformdirs

    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    user = os.getuid() if hasattr(os, "getuid") else "user"
    folder = platformdirs.user_cache_path("mlflow_tula") / "locks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    return (folder if writable else Path(tempfile.gettempdir())) / f"tula-store-{user}-{name}.lock"


@contextmanager
def _database_lock(uri: str) -> Iterator[None]:
    """Hold PostgreSQL's own lock, the same for every machine; nothing for other databases."""
    if urlsplit(uri).scheme.split("+")[0] != "postgresql":
        yield
        return
    import sqlalchemy
    from sqlalchemy.pool import NullPool

    with store_errors(f"open the store {masked(uri)}"):
        connection = sqlalchemy.create_engine(uri, poolclass=NullPool).connect()
    with connection:
        with store_errors(f"lock the store {masked(uri)}"):
            connection.execute(sqlalchemy.text(f"SELECT pg_advisory_lock({_LOCK_NUMBER})"))
        try:
            yield
        finally:
            connection.execute(sqlalchemy.text(f"SELECT pg_advisory_unlock({_LOCK_NUMBER})"))
