"""What MLflow, its database or its server raises, as one line without secrets."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

import mlflow
from mlflow.exceptions import MlflowException

from mlflow_tula.errors import StoreError, TulaError
from mlflow_tula.redaction import masked

_QUIET = {
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
_WAY_OUT = "set MLFLOW_TRACKING_URI to a store that works, such as sqlite:///mlflow.db"


@contextmanager
def store_errors(action: str) -> Iterator[None]:
    """Turn what MLflow, its database or its server raises into a StoreError of one line.

    Args:
        action: what was tried, as the middle of a sentence: `register tula.vgg11.digits`.
    """
    try:
        yield
    except TulaError:
        raise
    except Exception as error:
        if not _is_store_trouble(error):
            raise
        text = _schema_trouble(error) or f"{first_line(error)}; {_WAY_OUT}"
        raise StoreError(f"cannot {action}: {text}") from error


def _schema_trouble(error: Exception) -> str | None:
    """What to do about tables of another MLflow, in one line; None for other trouble."""
    text, uri = str(error), mlflow.get_tracking_uri()
    if "out-of-date database schema" in text:
        return older_tables(uri)
    if "Can't locate revision" in text:
        return (
            f"its tables are of a newer MLflow than {mlflow.__version__}: `pip install -U mlflow`, "
            f"or {_WAY_OUT}"
        )
    return None


def older_tables(uri: str) -> str:
    """What to do about a store whose tables an older MLflow has made."""
    return (
        f"its tables are of an older MLflow than {mlflow.__version__}: back it up, then run "
        f"`mlflow db upgrade {masked(uri)}`"
    )


@contextmanager
def quiet_mlflow() -> Iterator[None]:
    """Hold back MLflow's progress notes and bars, not its warnings.

    With a server MLflow writes the address of every finished run to standard output, where
    `--json` must stand alone; checking a new model draws bars of the files that it copies.
    """
    log = logging.getLogger("mlflow")
    level, before = log.level, {name: os.environ.get(name) for name in _QUIET}
    log.setLevel(max(level, logging.WARNING))
    os.environ.update(_QUIET)
    try:
        yield
    finally:
        log.setLevel(level)
        for name, setting in before.items():
            if setting is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = setting


def _is_store_trouble(error: BaseException) -> bool:
    """Whether the store is at fault, and not our own code."""
    if isinstance(error, (MlflowException, OSError, sqlite3.Error)):
        return True
    return type(error).__module__.split(".")[0] in {"sqlalchemy", "alembic", "requests", "urllib3"}


def first_line(error: BaseException) -> str:
    """The first line that says something, masked and shortened."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = masked(text or type(error).__name__).rstrip(".")
    return text if len(text) <= 300 else text[:297] + "..."
