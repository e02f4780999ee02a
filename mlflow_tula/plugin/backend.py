"""`mlflow run ANY_PROJECT -b tula -P batch_size=auto -c '{"workload": "vgg11/cifar100"}'`.

    resolve `auto` from the registry --> create and tag the run --> run the project --> wait
                                                                        --> status and exit code

Nothing registered, or a question that cannot be answered, ends here with one line and no run. The
project runs in the environment that `mlflow run` was started in, unless `--env-manager` says
otherwise. MLflow's command line does not wait for a plugin's backend and would return 0 whatever
happens, so this one waits, and raises where the project failed.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlflow.projects.backend.abstract_backend import AbstractBackend

# These notes belong into the log of `mlflow run`, which shows MLflow's own loggers and no others.
_logger = logging.getLogger("mlflow.projects.tula")

_GRACE_S = 10.0
_KILLED = {-signal.SIGTERM, -signal.SIGINT, -signal.SIGKILL, 128 + signal.SIGTERM, 130, 137}


class TulaBackend(AbstractBackend):  # type: ignore[misc, unused-ignore]
    """Fills in the batch size, then lets MLflow's local backend run the project."""

    def run(
        self,
        project_uri: str,
        entry_point: str,
        params: Mapping[str, Any] | None,
        version: str | None,
        backend_config: dict[str, Any],
        tracking_uri: str,
        experiment_id: str,
    ) -> Any:
        """Resolve, run and wait; returns MLflow's SubmittedRun of a project that succeeded.

        Raises:
            ExecutionException: a parameter cannot be resolved, or the project failed.
        """
        from mlflow.exceptions import ExecutionException
        from mlflow.projects.utils import fetch_and_validate_project

        from mlflow_tula.errors import TulaError
        from mlflow_tula.plugin.resolve import resolve

        given = dict(params or {})
        work_dir = fetch_and_validate_project(project_uri, version, entry_point, given)
        try:
            answer = resolve(given, _defaults(work_dir, entry_point), backend_config)
        except TulaError as error:
            raise ExecutionException(str(error)) from error
        merged = {**given, **answer.parameters}
        run_id = _create_run(
            project_uri, experiment_id, work_dir, version, entry_point, merged, answer.tags
        )
        if answer.headline:
            _logger.info("=== %s ===", answer.headline)
        with _closing(run_id):
            submitted = _start(work_dir, entry_point, merged, backend_config, experiment_id, run_id)
            code = _wait(submitted.command_proc)
            _set_status(run_id, code)
        if code != 0:
            raise ExecutionException(f"Run (ID '{run_id}') failed with exit code {code}")
        _logger.info("=== Run (ID '%s') succeeded ===", run_id)
        return submitted


def _defaults(work_dir: str, entry_point: str) -> dict[str, str]:
    """What MLproject gives each parameter of the entry point where the caller gives none."""
    from mlflow.projects.utils import load_project

    found = load_project(work_dir).get_entry_point(entry_point)
    parameters = {} if found is None else found.parameters
    return {name: str(one.default) for name, one in parameters.items() if one.default is not None}


def _create_run(
    project_uri: str,
    experiment_id: str,
    work_dir: str,
    version: str | None,
    entry_point: str,
    params: Mapping[str, Any],
    tags: Mapping[str, str],
) -> str:
    """The run, as `mlflow run` would make it, with who runs it and what was decided."""
    from mlflow import MlflowClient
    from mlflow.projects.utils import get_or_create_run
    from mlflow.utils.mlflow_tags import MLFLOW_PROJECT_BACKEND

    from mlflow_tula.runs import log_batch, process_tags

    run = get_or_create_run(
        None, project_uri, experiment_id, work_dir, version, entry_point, params
    )
    run_id = str(run.info.run_id)
    with _closing(run_id):
        # MLflow sets the backend's name only after a run that went well.
        named = {**process_tags(), **tags, MLFLOW_PROJECT_BACKEND: "tula"}
        log_batch(MlflowClient(), run_id, tags=named)
    return run_id


def _start(
    work_dir: str,
    entry_point: str,
    params: Mapping[str, Any],
    backend_config: Mapping[str, Any],
    experiment_id: str,
    run_id: str,
) -> Any:
    """MLflow's local backend in this environment; a SubmittedRun whose process is at work."""
    from mlflow.projects.backend.local import LocalBackend
    from mlflow.projects.utils import (
        MLFLOW_LOCAL_BACKEND_RUN_ID_CONFIG,
        PROJECT_ENV_MANAGER,
        PROJECT_SYNCHRONOUS,
    )

    manager = backend_config.get(PROJECT_ENV_MANAGER) or "local"
    config = {
        **backend_config,
        PROJECT_ENV_MANAGER: manager,
        # "Synchronous" here means: start the command itself, not another `mlflow run`.
        PROJECT_SYNCHRONOUS: True,
        MLFLOW_LOCAL_BACKEND_RUN_ID_CONFIG: run_id,
    }
    with _own_python_first(manager == "local"):
        return LocalBackend().run(
            work_dir, entry_point, dict(params), None, config, "", experiment_id
        )


@contextmanager
def _own_python_first(wanted: bool) -> Iterator[None]:
    """`python` in a project's command is looked up on PATH: make it this very interpreter's."""
    before = os.environ.get("PATH", "")
    if wanted:
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), before])
    try:
        yield
    finally:
        os.environ["PATH"] = before


@contextmanager
def _closing(run_id: str) -> Iterator[None]:
    """No way out of the block leaves the run RUNNING."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        _terminate(run_id, "KILLED")
        raise
    except BaseException:
        _terminate(run_id, "FAILED")
        raise


def _wait(process: Any) -> int:
    """The command's exit code; SIGTERM and Ctrl-C end it with all it has started."""
    from mlflow_tula.runs import sigterm_raises

    with sigterm_raises():
        try:
            return int(process.wait())
        except BaseException:
            _end(process.pid)
            raise


def _end(pid: int) -> None:
    """Terminate a process and its descendants, and kill what does not go."""
    import psutil

    try:
        root = psutil.Process(pid)
        family = [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        return
    for one in family:
        try:
            one.terminate()
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(family, timeout=_GRACE_S)
    for one in alive:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue


def _set_status(run_id: str, code: int) -> None:
    """The status that the exit code says; a status of the project's own stays where they agree."""
    from mlflow import MlflowClient

    status = MlflowClient().get_run(run_id).info.status
    if code == 0 and status in ("RUNNING", "SCHEDULED"):
        _terminate(run_id, "FINISHED")
    elif code != 0 and status not in ("FAILED", "KILLED"):
        _terminate(run_id, "KILLED" if code in _KILLED else "FAILED")


def _terminate(run_id: str, status: str) -> None:
    """Close the run; a store that has gone away must not hide what happened."""
    from mlflow import MlflowClient

    try:
        MlflowClient().set_terminated(run_id, status)
    except Exception as error:
        _logger.warning("the run %s could not be closed as %s: %s", run_id, status, error)
