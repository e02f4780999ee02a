"""Open a run and close it with the status that fits how its block ended."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import mlflow

from mlflow_tula.processes import process_tags
from mlflow_tula.runs.place import Place, broken_off, send_waiting
from mlflow_tula.runs.run import Run
from mlflow_tula.runs.tags import git_tags
from mlflow_tula.stores import (
    DEFAULT_EXPERIMENT,
    check_store,
    ensure_experiment,
    quiet_mlflow,
    store_errors,
)

_logger = logging.getLogger(__name__)

_RANDOM_NAME = re.compile(r"[a-z]+-[a-z]+-\d+")
_TERMINATED = 128 + signal.SIGTERM
_PATIENCE_S = 5.0


@contextmanager
def start_run(
    name: str,
    *,
    command: str,
    experiment: str | None = None,
    tags: Mapping[str, object] | None = None,
    place: Place | None = None,
) -> Iterator[Run]:
    """Open a run for the block, and close it with the status that fits how the block ended.

    Args:
        name: the run's name.
        command: which verb of `tula` this is; a tag.
        experiment: where a new run goes; ignored inside `mlflow run`, which has chosen already.
        tags: more tags.
        place: where to look for a run of the same command that was broken off, and where to keep
            what a store that goes away does not take.

    Yields:
        The run; an active MLflow run as well, for code that logs by itself.
    """
    with sigterm_raises():
        check_store()
        if place is not None:
            send_waiting(place)
        with store_errors("open a run"):
            run = _open(name, command, experiment, place)
        status = "FAILED"
        try:
            run.tag({**git_tags(run), **(tags or {})})
            yield run
            status = "KILLED" if run.interrupted else "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        except SystemExit as error:
            status = {0: "FINISHED", None: "FINISHED", _TERMINATED: "KILLED"}.get(
                error.code,  # type: ignore[arg-type]
                "FAILED",
            )
            raise
        finally:
            _close(run, status)
            if place is not None and status == "FINISHED":
                place.forget(command)


def _open(name: str, command: str, experiment: str | None, place: Place | None) -> Run:
    """Go on with a run that was broken off, or open the one that fits."""
    first = {"tula.command": command, **{key: str(text) for key, text in process_tags().items()}}
    earlier = None if place is None else broken_off(place, command, experiment)
    if earlier is not None:
        active = mlflow.start_run(run_id=earlier)
    else:
        active = _fitting_run(name, experiment, first)
    run_id = str(active.info.run_id)
    # A worker that inherits it would resume this run, and finish it.
    os.environ.pop("MLFLOW_RUN_ID", None)
    run = Run(
        run_id,
        active.info.experiment_id,
        continued=earlier is not None,
        outbox=None if place is None else place.outbox(run_id),
    )
    run.tag(first)
    if run.continued:
        _close_children(run, "KILLED")
    if place is not None:
        place.remember(command, run_id)
    return run


def _fitting_run(name: str, experiment: str | None, tags: Mapping[str, str]) -> Any:
    """Resume the project's run, or join the user's experiment, or make both."""
    if os.environ.get("MLFLOW_RUN_ID"):
        active = mlflow.start_run()
        if _RANDOM_NAME.fullmatch(active.info.run_name or ""):
            mlflow.set_tag("mlflow.runName", name)
        return active
    if mlflow.active_run() is not None:
        return mlflow.start_run(run_name=name, nested=True, tags=dict(tags))
    chosen = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME")
    if chosen is None and os.environ.get("MLFLOW_EXPERIMENT_ID"):
        return mlflow.start_run(run_name=name, tags=dict(tags))
    where = ensure_experiment(chosen or DEFAULT_EXPERIMENT)
    # With the process in its tags from the start: `tula doctor` must know whose it is.
    return mlflow.start_run(run_name=name, experiment_id=where, tags=dict(tags))


def _close(run: Run, status: str) -> None:
    """End the run; a store that has gone away must not hide the error that is on its way.

    What interrupts a block may come while a nested run is being logged: that one ends with it.
    """
    try:
        with quiet_mlflow():
            if run.client.flush(_PATIENCE_S):
                mlflow.end_run(status=status)
                if status != "FINISHED":
                    _close_children(run, status)
                return
            run.client.set_terminated(run.run_id, status=status)
            _forget_active_run()
        _say_what_waits(run)
    except Exception as error:
        _logger.warning("the run could not be closed as %s: %s", status, error)


def _say_what_waits(run: Run) -> None:
    outbox = run.client.outbox
    if outbox is not None:
        _logger.warning(
            "the MLflow store did not come back: %s calls wait, and `tula sync %s` (or the same "
            "command again) sends them",
            len(outbox),
            outbox.folder.parent.parent,
        )


def _close_children(run: Run, status: str) -> None:
    """End what is nested in the run and still says RUNNING: its process was this run's."""
    children = f"tags.`mlflow.parentRunId` = '{run.run_id}' AND status = 'RUNNING'"
    for child in run.client.search_runs([run.experiment_id], children):
        if "tula.pid" not in child.data.tags:
            run.client.set_terminated(child.info.run_id, status=status)


def _forget_active_run() -> None:
    """Take the run off MLflow's stack; its one request must not wait for a store that is away."""
    hasty = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "2"}
    before = {name: os.environ.get(name) for name in hasty}
    os.environ.update(hasty)
    try:
        with suppress(Exception):
            mlflow.end_run()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


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
