"""A folder of calls that wait."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock
from mlflow import MlflowClient

from mlflow_tula.errors import SchemaError, StoreError
from mlflow_tula.files import read_json, write_json
from mlflow_tula.outbox.calls import is_away, send_call
from mlflow_tula.stores import quiet_mlflow, store_identity

_logger = logging.getLogger(__name__)

OUTBOX_NAME = "outbox"
_FORMAT = 1
_OPERATIONS, _SENT, _FILES, _LOCK = "operations.jsonl", "sent.json", "files", ".lock"
_LOCAL_ID = "waiting-"


class Outbox:
    """A folder of calls that wait; one process at a time holds it."""

    def __init__(self, folder: Path) -> None:
        """Take a folder; it is made when the first call has to wait."""
        self.folder = folder
        self._lock = FileLock(folder / _LOCK)

    def __len__(self) -> int:
        """How many calls wait."""
        return len(self._lines()) - int(self._sent()["sent"])

    def keep(self, operation: Mapping[str, Any], files: Path | None = None) -> None:
        """Append a call, flushed to the disk.

        Raises:
            StoreError: the disk does not take it.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            document = dict(operation)
            if files is not None:
                document["files"] = f"{time.time_ns()}"
                shutil.copytree(files, self.folder / _FILES / document["files"])
            if not (self.folder / _SENT).exists():
                self._tick(self._sent())
            with (self.folder / _OPERATIONS).open("ab") as file:
                file.write(json.dumps(document).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StoreError(
                f"cannot keep in {self.folder} what the store does not take: "
                f"{error.strerror or error}; free some space"
            ) from error

    def send(self, client: MlflowClient) -> int:
        """Send what waits, in order; stops at the first call that nobody answers.

        Returns:
            How many are left.

        Raises:
            StoreError: it was kept for another store than the present one.
        """
        if not len(self):
            return 0
        with self._lock:
            state = self._sent()
            if state["store"] != store_identity():
                raise StoreError(
                    f"{self.folder} waits for the store {state['store']}, not {store_identity()}: "
                    "set MLFLOW_TRACKING_URI to it"
                )
            for operation in self._lines()[state["sent"] :]:
                try:
                    with quiet_mlflow():
                        send_call(client, operation, state["runs"], self.folder / _FILES)
                except Exception as error:
                    if is_away(error):
                        return len(self)
                    # It would be refused again for ever, and hold up all that follows.
                    _logger.warning("the store refuses a call (%s): %s", operation["call"], error)
                state["sent"] += 1
                self._tick(state)
            self._clear()
        self._drop_folder()
        return 0

    def local_id(self) -> str:
        """An id for a run that is made later."""
        return f"{_LOCAL_ID}{uuid.uuid4().hex}"

    def _lines(self) -> list[dict[str, Any]]:
        """The calls; what a kill cut off at the end is no line."""
        try:
            *lines, _ = (self.folder / _OPERATIONS).read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        try:
            return [json.loads(line) for line in lines]
        except (ValueError, RecursionError) as error:
            raise SchemaError(f"{self.folder / _OPERATIONS} is damaged: remove it") from error

    def _sent(self) -> dict[str, Any]:
        path = self.folder / _SENT
        if not path.exists():
            return {"format": _FORMAT, "store": store_identity(), "sent": 0, "runs": {}}
        state = read_json(path, made_by="tula profile")
        if state.get("format") != _FORMAT or not isinstance(state.get("runs"), dict):
            raise SchemaError(f"{path} is of another version of mlflow_tula: upgrade, or remove it")
        return state

    def _tick(self, state: Mapping[str, Any]) -> None:
        write_json(self.folder / _SENT, state)

    def _clear(self) -> None:
        for name in (_OPERATIONS, _SENT):
            (self.folder / name).unlink(missing_ok=True)
        shutil.rmtree(self.folder / _FILES, ignore_errors=True)

    def _drop_folder(self) -> None:
        (self.folder / _LOCK).unlink(missing_ok=True)
        for folder in (self.folder, self.folder.parent):
            try:
                folder.rmdir()
            except OSError:
                return


def find_outboxes(folder: Path) -> list[Outbox]:
    """Every outbox at or below a folder in which calls wait, the oldest first."""
    found = sorted(folder.rglob(_OPERATIONS), key=lambda path: path.stat().st_mtime)
    return [box for box in (Outbox(path.parent) for path in found) if len(box)]
