"""What a folder holds after a crash: tables, checkpoints, registered versions, runs, strays.

Looked at from outside, through the package's and MLflow's own readers, in this process.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
from mlflow import MlflowClient
from mlflow.models import Model

from mlflow_tula.cli.flow import PARTIAL_FILE, TABLE_FILE, read_bundle, read_table

STRAYS = (".*.json.*", ".checkpoint.*.tmp", "*.partial.json", "run.*.json", "operations.jsonl")
"""Nothing of these is left when a command has ended well."""


@dataclass(kw_only=True)
class Look:
    """What was found; `faults` says what is wrong with it."""

    probes: dict[tuple[int, int], float | None] = field(default_factory=dict)
    epoch: int = 0
    versions: int = 0
    champion: int | None = None
    strays: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def store_of(place: Path) -> MlflowClient:
    """MLflow pointed at the folder's own sqlite file."""
    mlflow.set_tracking_uri(f"sqlite:///{place.resolve()}/mlflow.db")
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return MlflowClient()


def empty_store(place: Path) -> None:
    """Make an mlflow.db with all tables and nothing in them."""
    client = store_of(place)
    client.search_registered_models(max_results=1)
    client.search_experiments(max_results=1)


def look(place: Path) -> Look:
    """Read everything that the folder holds."""
    found = Look()
    for part in (_tables, _checkpoint, _registry):
        try:
            part(place, found)
        except Exception as error:
            found.faults.append(f"{part.__name__[1:]}: {type(error).__name__}: {error}"[:300])
    output = place / "tula_output"
    found.strays = [str(one.relative_to(output)) for name in STRAYS for one in output.rglob(name)]
    return found


def _tables(place: Path, found: Look) -> None:
    """Whole JSON everywhere; rows of the partial table and of the last whole one."""
    output = place / "tula_output"
    for name in (TABLE_FILE, PARTIAL_FILE):
        for path in output.rglob(name):
            for row in read_table(path).ok:
                key = (row.local_batch_size, row.nodes * row.devices_per_node)
                found.probes[key] = row.step_time_s
    for path in output.rglob("bundle.json"):
        read_bundle(path)


def _checkpoint(place: Path, found: Look) -> None:
    """The newest checkpoint is whole, or the one before it is."""
    import torch

    epochs, broken, seen = [], [], 0
    for path in (place / "tula_output").rglob("checkpoint*.pt"):
        seen += 1
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)["state"]
            epochs.append(int(state["progress"]["epoch"]))
        except Exception as error:
            broken.append(f"{path.name}: {error}")
    if seen and not epochs:
        found.faults.append(f"no checkpoint is whole: {broken}")
    found.epoch = max(epochs, default=0)


def _registry(place: Path, found: Look) -> None:
    """Every version that is listed is READY, loads, and predicts; the champion is one of them."""
    if not _is_made(place):
        return
    client = store_of(place)
    for model in client.search_registered_models():
        versions = client.search_model_versions(f"name = '{model.name}'")
        for one in versions:
            found.versions += bool(model.tags.get("tula.workload"))
            if one.status != "READY":
                found.faults.append(f"version {one.version} is {one.status}")
            answer = _asked(f"models:/{model.name}/{one.version}")
            numbers = answer.select_dtypes("number").to_numpy(dtype=float, na_value=0.0)
            if not len(answer) or not np.isfinite(numbers).all():
                found.faults.append(f"version {one.version} of {model.name} answers {answer}")
        alias = client.get_registered_model(model.name).aliases.get("champion")
        if model.tags.get("tula.workload"):
            found.champion = None if alias is None else int(alias)
        if alias is not None and str(alias) not in {str(one.version) for one in versions}:
            found.faults.append(f"the champion {alias} is no version")


def _asked(uri: str) -> Any:
    """What a registered model answers to its own example."""
    folder = mlflow.artifacts.download_artifacts(uri)
    example = Model.load(folder).load_input_example(folder)
    return mlflow.pyfunc.load_model(folder).predict(example)


def _is_made(place: Path) -> bool:
    """Whether the store has its tables; a kill may come while MLflow makes them."""
    path = place / "mlflow.db"
    if not path.exists() or path.stat().st_size == 0:
        return False
    with contextlib.closing(sqlite3.connect(path)) as database:
        names = {row[0] for row in database.execute("SELECT name FROM sqlite_master")}
        if "alembic_version" not in names:
            return False
        revisions = database.execute("SELECT version_num FROM alembic_version").fetchall()
    from mlflow.store.db.utils import _get_latest_schema_revision

    return revisions == [(_get_latest_schema_revision(),)]


def open_runs(place: Path, *, fix: bool = True) -> list[str]:
    """Names of runs that say RUNNING, after `tula doctor --fix` where asked."""
    if not _is_made(place):
        return []
    from mlflow_tula.cli import run as tula

    client = store_of(place)
    if fix:
        with contextlib.redirect_stdout(io.StringIO()):
            tula(["doctor", "--fix"])
    everywhere = [one.experiment_id for one in client.search_experiments()]
    found = client.search_runs(everywhere, "attributes.status = 'RUNNING'")
    return [str(one.info.run_name) for one in found]


def top_runs(place: Path) -> dict[str, str]:
    """Id and status of every run that is not nested."""
    if not _is_made(place):
        return {}
    client = store_of(place)
    everywhere = [one.experiment_id for one in client.search_experiments()]
    found = client.search_runs(everywhere)
    return {
        one.info.run_id: one.info.status
        for one in found
        if "mlflow.parentRunId" not in one.data.tags
    }
