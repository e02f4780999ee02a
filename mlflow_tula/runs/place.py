"""Where a command keeps what a later one of the same kind goes on from."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlflow
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from mlflow_tula.errors import TulaError
from mlflow_tula.files import read_json, write_json
from mlflow_tula.outbox import OUTBOX_NAME, Outbox
from mlflow_tula.processes import is_alive, process_tags
from mlflow_tula.stores import store_identity

_logger = logging.getLogger(__name__)

_RUN_FILE = "run.{command}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a command keeps what the next one goes on from.

    `request` is what was asked; only the same request goes on with the same run. `resume` False
    makes a new run.
    """

    folder: Path
    request: Mapping[str, object]
    resume: bool = True

    @property
    def digest(self) -> str:
        """Of the request, so that no secret in it lands on the disk."""
        text = json.dumps({key: str(value) for key, value in self.request.items()}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def run_file(self, command: str) -> Path:
        """The file that names the run of a command that has not ended well yet."""
        return self.folder / _RUN_FILE.format(command=command)

    def outbox(self, run_id: str) -> Outbox:
        """What waits for the store of this run."""
        return Outbox(self.folder / OUTBOX_NAME / run_id)

    def remember(self, command: str, run_id: str) -> None:
        """Name the run that the same command goes on with if this one does not end well."""
        document = {"run_id": run_id, "store": store_identity(), "request": self.digest}
        write_json(self.run_file(command), document)

    def forget(self, command: str) -> None:
        """The run has ended well."""
        self.run_file(command).unlink(missing_ok=True)


def send_waiting(place: Place) -> None:
    """What earlier commands could not tell the store; it answers, so it is told now."""
    for box in sorted((place.folder / OUTBOX_NAME).glob("*/")):
        waiting = Outbox(box)
        try:
            if len(waiting):
                left = waiting.send(MlflowClient())
                _logger.info("%s calls of an earlier command are still waiting", left)
        except TulaError as error:
            _logger.warning("what waits in %s was not sent: %s", box, error)


def broken_off(place: Place, command: str, experiment: str | None) -> str | None:
    """The run of the same command in this folder that did not end well, if there is one."""
    path = place.run_file(command)
    if os.environ.get("MLFLOW_RUN_ID") or mlflow.active_run() is not None:
        return None  # `mlflow run`, or the caller, has made one
    if not place.resume or not path.exists():
        return None
    try:
        note = read_json(path, made_by=f"tula {command}")
        if (note.get("store"), note.get("request")) != (store_identity(), place.digest):
            return None
        run = MlflowClient().get_run(str(note.get("run_id")))
        known = MlflowClient().get_experiment_by_name(experiment) if experiment else None
    except (TulaError, MlflowException) as error:
        _logger.info("no run to go on with in %s: %s", path, error)
        return None
    tags = run.data.tags
    ended = run.info.status == "FINISHED" or run.info.lifecycle_stage != "active"
    elsewhere = known is not None and known.experiment_id != run.info.experiment_id
    # On another host, or in a process that lives, somebody may be at work in it.
    busy = run.info.status == "RUNNING" and (
        tags.get("tula.host") != process_tags()["tula.host"]
        or is_alive(tags.get("tula.pid"), tags.get("tula.pid_started"))
    )
    return None if ended or elsewhere or busy else str(run.info.run_id)
