"""MLflow runs that end properly: FINISHED, FAILED, or KILLED on Ctrl-C and SIGTERM.

`start_run` resumes the run that `mlflow run` made (MLFLOW_RUN_ID), joins no other experiment then,
and otherwise makes a run of its own. Everything is logged in batches: one call costs as much as a
hundred values.
"""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from mlflow_tula.stores import (
    DEFAULT_EXPERIMENT,
    check_store,
    ensure_experiment,
    masked,
    quiet_mlflow,
    store_errors,
)

_logger = logging.getLogger(__name__)

PREFIX = "tula."
"""Of every parameter: `mlflow run` logs its own under the plain names, in its own spelling."""

MAX_PARAM = 500
_MAX_NOTE = 4500
_BATCH = 900
_PER_KIND = 90
_RANDOM_NAME = re.compile(r"[a-z]+-[a-z]+-\d+")
_TERMINATED = 128 + signal.SIGTERM


class Run:
    """An open MLflow run. Set `interrupted` for a run that was stopped but kept what it had."""

    def __init__(self, run_id: str, experiment_id: str) -> None:
        """Take the run's id and its experiment's."""
        self.run_id = run_id
        self.experiment_id = experiment_id
        self.interrupted = False
        self.client = MlflowClient()

    def tag(self, tags: Mapping[str, object]) -> None:
        """Set tags; None is left out."""
        self.log(tags=tags)

    def params(self, params: Mapping[str, object]) -> None:
        """Log parameters under `tula.`; None is left out, a long one becomes an artifact too.

        A parameter that the run already has keeps its first value, as MLflow demands.
        """
        known = self.client.get_run(self.run_id).data.params
        chosen: dict[str, str] = {}
        for name, value in params.items():
            if value is None:
                continue
            key, text = PREFIX + _clean(name), masked(value)
            if len(text) > MAX_PARAM:
                where = f"params/{_clean(name)}.txt"
                self.client.log_text(self.run_id, text, where)
                note = f"... (cut; the whole text is the artifact {where})"
                text = text[: MAX_PARAM - len(note)] + note
            if key not in known:
                chosen[key] = text
            elif known[key] != text:
                _logger.warning("parameter %s stays %.60s (now: %.60s)", key, known[key], text)
        self.log(params=chosen)

    def metrics(self, metrics: Mapping[str, object], *, step: int = 0) -> None:
        """Log numbers at one step; what is not a finite number is left out."""
        self.log(metrics=[(name, value, step) for name, value in metrics.items()])

    def log(
        self,
        *,
        metrics: Iterable[tuple[str, object, int]] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, object] | None = None,
    ) -> None:
        """Log (name, value, step) metrics, finished parameters and tags, in few requests."""
        log_batch(self.client, self.run_id, metrics=metrics, params=params, tags=tags)

    def describe(self, markdown: str) -> None:
        """Set what people read first on the run's page."""
        if len(markdown) > _MAX_NOTE:
            markdown = markdown[: _MAX_NOTE - 20].rsplit("\n", 1)[0] + "\n\n(cut)"
        self.tag({"mlflow.note.content": markdown})

    def files(self, folder: str | Path) -> None:
        """Log every file of a folder as artifacts of the run."""
        with store_errors("store the run's files"):
            self.client.log_artifacts(self.run_id, str(folder))


def log_batch(
    client: MlflowClient,
    run_id: str,
    *,
    metrics: Iterable[tuple[str, object, int]] = (),
    params: Mapping[str, str] | None = None,
    tags: Mapping[str, object] | None = None,
) -> None:
    """`MlflowClient.log_batch` without its limits: chunks, clean names, finite numbers only."""
    now = int(time.time() * 1000)
    numbers = [
        Metric(_clean(name), value, now, step)
        for name, given, step in metrics
        if (value := _number(given)) is not None
    ]
    texts = [Param(name, value) for name, value in (params or {}).items()]
    notes = [RunTag(key, str(value)) for key, value in (tags or {}).items() if value is not None]
    while numbers or texts or notes:
        with store_errors("log to the run"):
            client.log_batch(
                run_id, metrics=numbers[:_BATCH], params=texts[:_PER_KIND], tags=notes[:_PER_KIND]
            )
        numbers, texts, notes = numbers[_BATCH:], texts[_PER_KIND:], notes[_PER_KIND:]


@contextmanager
def start_run(
    name: str,
    *,
    command: str,
    experiment: str | None = None,
    tags: Mapping[str, object] | None = None,
) -> Iterator[Run]:
    """Open a run for the block, and close it with the status that fits how the block ended.

    Args:
        name: the run's name.
        command: which verb of `tula` this is; a tag.
        experiment: where a new run goes; ignored inside `mlflow run`, which has chosen already.
        tags: more tags.

    Yields:
        The run; an active MLflow run as well, for code that logs by itself.
    """
    check_store()
    with store_errors("open a run"):
        run = _open(name, experiment)
    status = "FAILED"
    try:
        with sigterm_raises():
            run.tag({**process_tags(), **git_tags(run), "tula.command": command, **(tags or {})})
            yield run
        status = "KILLED" if run.interrupted else "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    except SystemExit as error:
        status = {0: "FINISHED", None: "FINISHED", _TERMINATED: "KILLED"}.get(error.code, "FAILED")  # type: ignore[arg-type]
        raise
    finally:
        _close(run, status)


def _open(name: str, experiment: str | None) -> Run:
    """Resume the project's run, or join the user's experiment, or make both."""
    if os.environ.get("MLFLOW_RUN_ID"):
        active = mlflow.start_run()
        if _RANDOM_NAME.fullmatch(active.info.run_name or ""):
            mlflow.set_tag("mlflow.runName", name)
    elif mlflow.active_run() is not None:
        active = mlflow.start_run(run_name=name, nested=True)
    else:
        chosen = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if chosen is None and os.environ.get("MLFLOW_EXPERIMENT_ID"):
            active = mlflow.start_run(run_name=name)
        else:
            where = ensure_experiment(chosen or DEFAULT_EXPERIMENT)
            active = mlflow.start_run(run_name=name, experiment_id=where)
    # A worker that inherits it would resume this run, and finish it.
    os.environ.pop("MLFLOW_RUN_ID", None)
    return Run(active.info.run_id, active.info.experiment_id)


def _close(run: Run, status: str) -> None:
    """End the run; a store that has gone away must not hide the error that is on its way.

    What interrupts a block may come while a nested run is being logged: that one ends with it.
    """
    try:
        with quiet_mlflow():
            mlflow.end_run(status=status)
            if status != "FINISHED":
                children = f"tags.`mlflow.parentRunId` = '{run.run_id}' AND status = 'RUNNING'"
                for child in run.client.search_runs([run.experiment_id], children):
                    if "tula.pid" not in child.data.tags:
                        run.client.set_terminated(child.info.run_id, status=status)
    except Exception as error:
        _logger.warning("the run could not be closed as %s: %s", status, error)


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM (and a closed terminal) into SystemExit, so that blocks unwind and clean up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(_TERMINATED)

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {name: signal.getsignal(getattr(signal, name)) for name in names}
    # Somebody else's handler stays: it has its reasons.
    ours = [name for name in names if before[name] is signal.SIG_DFL]
    for name in ours:
        signal.signal(getattr(signal, name), leave)
    try:
        yield
    finally:
        for name in ours:
            signal.signal(getattr(signal, name), before[name])


def process_tags() -> dict[str, object]:
    """Who runs this: what is needed to tell a run that goes on from one whose process died."""
    import psutil

    try:
        version = metadata.version("mlflow-tula")
    except metadata.PackageNotFoundError:
        version = "unknown"
    return {
        "tula.host": socket.gethostname(),
        "tula.pid": os.getpid(),
        "tula.pid_started": f"{psutil.Process().create_time():.3f}",
        "tula.version": version,
    }


def git_tags(run: Run | None = None) -> dict[str, object]:
    """Commit, branch and whether files were changed, of the repository in the working folder.

    `mlflow.source.git.commit` is set where MLflow did not (it looks at the script's folder, which
    for an installed command is no repository).
    """
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return {}
    tags: dict[str, object] = {
        "tula.git.commit": commit,
        "tula.git.branch": _git("rev-parse", "--abbrev-ref", "HEAD"),
        "tula.git.dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }
    known = {} if run is None else run.client.get_run(run.run_id).data.tags
    if "mlflow.source.git.commit" not in known:
        tags["mlflow.source.git.commit"] = commit
    return tags


def _git(*arguments: str) -> str | None:
    """Standard output of a git command in the working folder, or None without git."""
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _clean(name: str) -> str:
    """A name that MLflow takes."""
    return re.sub(r"[^\w./ -]+", "_", name)[:240]


def _number(value: Any) -> float | None:
    """A finite float, or None."""
    if value is None or isinstance(value, (str, bytes)):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
