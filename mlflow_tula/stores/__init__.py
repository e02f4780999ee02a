"""MLflow stores: does it answer, is it initialised, what went wrong, in one line without secrets.

`check_store()` is called before any work, so that a dead server or an old ./mlruns costs seconds
and not a sweep. A sqlite store is made beside its place and linked into it: MLflow's own first
creation races (of 8 processes 7 can fail), and one that is killed leaves a file that nothing opens
again. Afterwards several writers lose nothing. On PostgreSQL an advisory lock does the same.
"""

from __future__ import annotations

import logging
import os
import socket
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote, urlsplit

import mlflow
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from mlflow_tula.errors import StoreError
from mlflow_tula.redaction import masked
from mlflow_tula.specs import check_name, slugify
from mlflow_tula.stores.making import is_older, make_sqlite, making_lock, sqlite_path
from mlflow_tula.stores.words import first_line, older_tables, quiet_mlflow, store_errors

__all__ = [
    "DEFAULT_EXPERIMENT",
    "answers",
    "check_store",
    "ensure_experiment",
    "masked",
    "quiet_mlflow",
    "sqlite_path",
    "store_errors",
    "store_exists",
    "store_identity",
]

_logger = logging.getLogger(__name__)

DEFAULT_EXPERIMENT = "tula"
"""The experiment of a command that is started alone, outside `mlflow run`."""

_KIND = {"mlflow.experimentKind": "custom_model_development"}
"""MLflow's pages show such an experiment as one of trainings, and not of language models."""

_CONNECT_TIMEOUT_S = 4.0
_DATABASE_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}


def check_store(*, write: bool = True) -> str:
    """Raise StoreError unless the tracking store and the registry answer; takes milliseconds.

    Args:
        write: also ask whether it can be written, and initialise a sqlite store that is new.

    Returns:
        The tracking URI, masked, for people.
    """
    tracking = mlflow.get_tracking_uri()
    addresses = dict.fromkeys([tracking, mlflow.get_registry_uri()])
    for uri in addresses:
        _check_address(uri)
    if write or store_exists():
        action = f"open the store {masked(tracking)}"
        with making_lock(tracking), store_errors(action), quiet_mlflow():
            for path in filter(None, map(sqlite_path, addresses)):
                _check_sqlite(path, write=write)
            client = MlflowClient()
            # The registry first: it makes all tables under MLflow's own lock.
            client.search_registered_models(max_results=1)
            if write:
                client.search_experiments(max_results=1)
    return masked(tracking)


def store_exists() -> bool:
    """False for a sqlite file that is not there yet, with nothing registered either."""
    path = sqlite_path(mlflow.get_registry_uri())
    return path is None or (path.is_file() and path.stat().st_size > 0)


def _check_address(uri: str) -> None:
    """Raise StoreError for a store that cannot work, without MLflow's minutes of retries."""
    scheme = urlsplit(uri).scheme.split("+")[0]
    if scheme in {"", "file"}:
        _check_file_store(uri)
    elif scheme in {"http", "https"}:
        # MLflow's default of 7 retries with growing pauses is minutes on a dead server, and so is
        # its two minutes' patience with one that hangs.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        _check_server(uri)
    elif scheme in _DATABASE_PORTS:
        _check_port(uri, _DATABASE_PORTS[scheme])


def _check_file_store(uri: str) -> None:
    """MLflow 3.13 and later refuse the file store unless it is allowed by name."""
    setting = getattr(mlflow.environment_variables, "MLFLOW_ALLOW_FILE_STORE", None)
    if setting is None or setting.get():
        return
    folder = Path(unquote(urlsplit(uri).path) or "mlruns")
    if not folder.is_dir():
        raise StoreError(
            f"the tracking URI {masked(uri)!r} is no folder that exists, and MLflow "
            f"{mlflow.__version__} keeps no store in a folder: give "
            f"sqlite:///{folder.absolute() / 'mlflow.db'}, or a server as http://host:port"
        )
    raise StoreError(
        f"the folder {folder} is an old MLflow file store, which MLflow {mlflow.__version__} no "
        f"longer opens: move it over with `mlflow migrate-filestore --source {folder.parent} "
        "--target sqlite:///mlflow.db` and set MLFLOW_TRACKING_URI=sqlite:///mlflow.db (or set "
        "only the latter to start afresh beside it)"
    )


def _check_sqlite(path: Path, *, write: bool) -> None:
    """Open the file, and take its write lock for a moment where it is to be written."""
    if not write and not path.exists():
        return
    try:
        if write:
            make_sqlite(path)
        mode = "rw" if write else "ro"
        target = f"{path.as_uri()}?mode={mode}"
        with closing(sqlite3.connect(target, uri=True, timeout=20.0)) as database:
            revision = _revision(database)
            older = revision is not None and is_older(revision)
            if write and not older:
                database.execute("BEGIN IMMEDIATE")
                database.execute("CREATE TABLE tula_write_check (x INTEGER)")
                database.rollback()
    except (OSError, sqlite3.Error) as error:
        verb = "written" if write else "read"
        raise StoreError(
            f"the MLflow store {path} cannot be {verb}: {first_line(error)}; use a folder that "
            "can be, or set MLFLOW_TRACKING_URI to another store"
        ) from error
    if older:
        raise StoreError(f"cannot open the store {path}: {older_tables(f'sqlite:///{path}')}")


def _revision(database: sqlite3.Connection) -> str | None:
    """Which revision of MLflow's tables a file holds; None where it holds none."""
    names = {row[0] for row in database.execute("SELECT name FROM sqlite_master")}
    if "alembic_version" not in names:
        return None
    found = database.execute("SELECT version_num FROM alembic_version").fetchone()
    return None if found is None else str(found[0])


def _check_server(uri: str) -> None:
    """Any answer is a living server: whether it lets us in shows with the first real request."""
    import requests

    try:
        requests.get(f"{uri.rstrip('/')}/health", timeout=_CONNECT_TIMEOUT_S)
    except requests.RequestException as error:
        raise StoreError(
            f"the MLflow server {masked(uri)} does not answer "
            f"({_why(error)}): start it with `mlflow server`, or set MLFLOW_TRACKING_URI to a "
            "store that works, such as sqlite:///mlflow.db"
        ) from error


def answers(timeout_s: float = 2.0) -> bool:
    """Whether the tracking store can be reached at all; never takes longer than `timeout_s`."""
    import requests

    uri = mlflow.get_tracking_uri()
    parts = urlsplit(uri)
    scheme = parts.scheme.split("+")[0]
    try:
        if scheme in {"http", "https"}:
            return requests.get(f"{uri.rstrip('/')}/health", timeout=timeout_s).status_code < 500
        if scheme in _DATABASE_PORTS and parts.hostname is not None:
            place = (parts.hostname, parts.port or _DATABASE_PORTS[scheme])
            socket.create_connection(place, timeout=timeout_s).close()
    except (requests.RequestException, OSError, ValueError):
        return False
    return True


def store_identity() -> str:
    """The tracking store as a text without secrets, the same from whatever folder it is named."""
    uri = mlflow.get_tracking_uri()
    path = sqlite_path(uri)
    return masked(uri) if path is None else f"sqlite:///{path.resolve()}"


def _why(error: Exception) -> str:
    """The cause at the bottom of requests' nest of exceptions, in a few words."""
    text = masked(error)
    for sign, words in (
        ("refused", "connection refused"),
        ("timed out", f"no answer within {_CONNECT_TIMEOUT_S:g} s"),
        ("resolve", "unknown host"),
        ("Name or service", "unknown host"),
        ("certificate", "its certificate cannot be verified"),
    ):
        if sign in text:
            return words
    return text.splitlines()[0][:120] if text else type(error).__name__


def _check_port(uri: str, default_port: int) -> None:
    """A database server must accept a connection; SQLAlchemy would retry for minutes."""
    try:
        parts = urlsplit(uri)
        host, port = parts.hostname, parts.port or default_port
        if host is None:
            return
        socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise StoreError(
            f"the database {masked(uri)} does not answer ({first_line(error)}): start it, or "
            "set MLFLOW_TRACKING_URI to a store that works, such as sqlite:///mlflow.db"
        ) from error


def ensure_experiment(name: str = DEFAULT_EXPERIMENT) -> str:
    """The id of the experiment, created where it does not exist yet.

    MLflow fixes an experiment's artifact folder below the working folder of whoever creates it;
    here it lies beside the sqlite file, wherever the command was started.
    """
    check_name("experiment", name)
    with store_errors(f"create the experiment {name!r}"):
        client = MlflowClient()
        found = client.get_experiment_by_name(name)
        if found is None:
            try:
                where = _artifact_root(name)
                return str(client.create_experiment(name, artifact_location=where, tags=_KIND))
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = client.get_experiment_by_name(name)
    if found is None or found.lifecycle_stage != "active":
        number = "" if found is None else f" -x {found.experiment_id}"
        raise StoreError(
            f"the experiment {name!r} was deleted: bring it back with "
            f"`mlflow experiments restore{number}`, or choose another name"
        )
    return str(found.experiment_id)


def _artifact_root(name: str) -> str | None:
    """A folder beside the sqlite file, or here for a database; None leaves it to the server.

    MLflow would take ./mlruns for a database, and find an old file store in it the next time.
    """
    uri = mlflow.get_tracking_uri()
    path, is_database = sqlite_path(uri), urlsplit(uri).scheme.split("+")[0] in _DATABASE_PORTS
    if path is None and not is_database:
        return None
    here = Path.cwd() if path is None else path.parent
    return str(here / "mlartifacts" / slugify(name))
