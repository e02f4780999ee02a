"""Shared fixtures: a table like a real profile, and MLflow stores of a test's own.

MLflow keeps its tracking URI, its active runs and its environment variables in globals; the
fixture `store` gives a test a fresh sqlite store below tmp_path and puts all of that back.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")

DATA = Path(__file__).parent / "data"
MLFLOW_VARIABLES = (
    "MLFLOW_TRACKING_URI",
    "MLFLOW_REGISTRY_URI",
    "MLFLOW_RUN_ID",
    "MLFLOW_EXPERIMENT_ID",
    "MLFLOW_EXPERIMENT_NAME",
    "MLFLOW_ALLOW_FILE_STORE",
)


@pytest.fixture(scope="session")
def table():
    """VGG11 on 32x32 digits, two CPU cores: step times and memory of one rank as once measured,
    the two-rank rows and the parts of a step composed to match."""
    from mlflow_tula.table import ProfileTable

    text = (DATA / "vgg11_digits_cpu.json").read_text(encoding="utf-8")
    return ProfileTable.from_dict(json.loads(text))


@pytest.fixture(scope="session")
def bundle(table):
    """What `fit` makes of the recorded table."""
    return _fitted(table)


@pytest.fixture(scope="session")
def remeasured(table) -> Callable:
    """A function (seed, noise, scale) -> the recorded table with other step times, and its fit."""

    def again(*, seed: int = 0, noise: float = 0.02, scale: float = 1.0):
        draw = np.random.default_rng(seed)
        rows = tuple(
            row
            if row.step_time_s is None
            else _retimed(row, row.step_time_s * scale * float(np.exp(noise * z)))
            for row, z in zip(table.measurements, draw.normal(size=99), strict=False)
        )
        other = replace(table, measurements=rows)
        return other, _fitted(other)

    return again


def _retimed(row, step_time_s):
    """The row with another step time; its parts stay what they were, as far as they fit in."""
    sync = None if row.sync_time_s is None else min(row.sync_time_s, step_time_s)
    return replace(row, step_time_s=step_time_s, sync_time_s=sync)


def _slower(row, factor: float):
    """The row with every time of the step times `factor`."""
    sync = None if row.sync_time_s is None else row.sync_time_s * factor
    return replace(row, step_time_s=row.step_time_s * factor, sync_time_s=sync)


def _fitted(table):
    from mlflow_tula.errors import TulaWarning
    from mlflow_tula.fit import fit

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TulaWarning)
        return fit(table)


@pytest.fixture(scope="session")
def _empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An initialised sqlite store, made once: MLflow takes a second for each."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("template") / "mlflow.db"
    with pytest.MonkeyPatch.context() as patched:
        # The Default experiment's artifacts lie below the folder in which the store is made.
        patched.chdir(path.parent)
        client = MlflowClient(f"sqlite:///{path}", f"sqlite:///{path}")
        client.search_registered_models(max_results=1)
        client.search_experiments(max_results=1)
    return path


@pytest.fixture
def clean_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working folder, no MLflow variable set; MLflow's globals are reset afterwards."""
    monkeypatch.chdir(tmp_path)
    for name in MLFLOW_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    _reset_mlflow()
    yield tmp_path
    _reset_mlflow()


@pytest.fixture
def store(clean_mlflow: Path, _empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh sqlite store as the tracking store and registry; the path of its file."""
    path = clean_mlflow / "mlflow.db"
    shutil.copy(_empty_store, path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{path}")
    return path


def _reset_mlflow() -> None:
    """Forget runs and addresses, if MLflow was imported at all."""
    if "mlflow" not in sys.modules:
        return
    import mlflow

    while mlflow.active_run() is not None:
        mlflow.end_run()
    mlflow.set_tracking_uri(None)
    mlflow.set_registry_uri(None)


@pytest.fixture
def free_port() -> int:
    """A port on which nothing listens."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def _registered_store(
    tmp_path_factory: pytest.TempPathFactory, _empty_store: Path, table, remeasured
) -> Path:
    """A store that knows VGG11 on digits on this very machine, in three versions.

    Version 1 was the first champion, 2 is too noisy for the gate, 3 is the champion.
    """
    from mlflow_tula.hardware import detect
    from mlflow_tula.registry import register

    path = tmp_path_factory.mktemp("registered") / "mlflow.db"
    shutil.copy(_empty_store, path)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(path.parent)
        patched.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{path}")
        _reset_mlflow()
        tables = [table, remeasured(seed=3, noise=0.5)[0], remeasured(seed=1, noise=0.01)[0]]
        for one in tables:
            here = replace(one, hardware=detect())
            register(_fitted(here), table=here)
        _reset_mlflow()
    return path


@pytest.fixture
def registered(store: Path, _registered_store: Path) -> str:
    """The name of a predictor of this machine with three versions, in a store of the test's own.

    The rows of the store are the test's; the files of the models are shared, and only read.
    """
    from mlflow_tula.registry import find

    shutil.copy(_registered_store, store)
    return find()[0].name
