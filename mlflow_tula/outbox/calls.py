"""The calls that can wait, as plain JSON, and what it means that nobody answers one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from mlflow_tula.documents import shown
from mlflow_tula.errors import SchemaError

KEY_TAG = "tula.outbox_key"
_AWAY = ("Max retries exceeded", "failed with exception", "Connection", "timed out", "Timeout")
_AWAY_CODES = ("502", "503", "504")


def is_away(error: BaseException | None) -> bool:
    """Whether a store failed because it cannot be reached, and not because it refused."""
    while error is not None:
        kind = type(error)
        where = kind.__module__.split(".")[0]
        if isinstance(error, ConnectionError | TimeoutError):
            return True
        if where in {"requests", "urllib3"} and ("Connection" in kind.__name__ or _says(error)):
            return True
        if where == "sqlalchemy" and kind.__name__ in {"OperationalError", "InterfaceError"}:
            # Of a file: another writer. A full disk or a missing table does not mend itself.
            return "sqlite3" not in str(error) or "locked" in str(error)
        if isinstance(error, MlflowException) and _says(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _says(error: BaseException) -> bool:
    text = str(error)
    return any(sign in text for sign in _AWAY) or (
        "API request" in text and any(code in text for code in _AWAY_CODES)
    )


def send_call(
    client: MlflowClient,
    operation: Mapping[str, Any],
    runs: dict[str, str],
    stored: Path | None,
    files: Path | None = None,
) -> Any:
    """Make one call; `runs` maps the ids of waiting runs to those that they were given."""
    call, given = operation["call"], operation["run_id"]
    if call == "create_run":
        made = _create_run(client, operation, once=stored is not None)
        runs[given] = str(made.info.run_id)
        return made
    run_id = runs.get(given, given)
    if call == "log_batch":
        client.log_batch(
            run_id,
            metrics=[Metric(*one) for one in operation["metrics"]],
            params=[Param(*one) for one in operation["params"]],
            tags=[RunTag(*one) for one in operation["tags"]],
        )
    elif call == "set_terminated":
        client.set_terminated(run_id, operation["status"], operation["end_time"])
    elif call == "log_artifacts":
        folder = files if stored is None else _own_folder(stored, operation["files"])
        client.log_artifacts(run_id, str(folder))
    elif call == "log_text":
        client.log_text(run_id, operation["text"], operation["name"])
    elif call == "log_table":
        import pandas as pd

        data = pd.DataFrame(operation["data"]["data"], columns=operation["data"]["columns"])
        client.log_table(run_id, data=data, artifact_file=operation["name"])
    elif call == "log_inputs":
        datasets = [
            DatasetInput(
                dataset=Dataset(**one["dataset"]),
                tags=[InputTag(key, value) for key, value in one["tags"].items()],
            )
            for one in operation["datasets"]
        ]
        client.log_inputs(run_id, datasets)
    return None


def _own_folder(stored: Path, name: Any) -> Path:
    """A folder that `Outbox.keep` made: nothing in it leads elsewhere on this machine."""
    if not isinstance(name, str) or not re.fullmatch(r"[0-9]+", name):
        raise SchemaError(f"files that wait lie in a numbered folder, not {shown(name)}: not sent")
    folder = stored / name
    if folder.is_symlink() or any(path.is_symlink() for path in folder.rglob("*")):
        raise SchemaError(f"{folder} holds a link, which no command leaves there: not sent")
    return folder


def _create_run(client: MlflowClient, operation: Mapping[str, Any], *, once: bool) -> Any:
    """Make a run; with `once` it is looked for first, as a kill may have come after it was made."""
    tags, experiment = dict(operation["tags"]), operation["experiment_id"]
    # A nested run's parent may have waited as well.
    if once:
        tags[KEY_TAG] = operation["run_id"]
        found = client.search_runs([experiment], f"tags.`{KEY_TAG}` = '{operation['run_id']}'")
        if found:
            return found[0]
    return client.create_run(
        experiment, start_time=operation["start_time"], run_name=operation["run_name"], tags=tags
    )
