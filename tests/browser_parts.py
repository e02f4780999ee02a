"""A real store made by real commands, a real `mlflow server` over it, and the system's Chromium.

Screenshots go to build/screenshots (or TULA_SCREENSHOTS): look at them after a change.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WAIT_MS = 60_000
"""MLflow's pages take seconds to draw, and many on a busy machine."""

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
MODEL = "tiny_net:make"
NETWORK = """
import torch


def make(num_classes: int = 10) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(256, num_classes),
    )
"""


def browser() -> str | None:
    """The system's browser, or None."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def screenshots() -> Path:
    """Where pictures of the pages are kept."""
    folder = Path(os.environ.get("TULA_SCREENSHOTS", ROOT / "build" / "screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """The server's address, and what is in its store: two profiles and a training, newest last."""

    url: str
    store: str
    profiles: tuple[Any, Any]
    training: Any
    name: str


def make_store(folder: Path) -> str:
    """Two `tula main` of different sizes and a `tula train`, of a network of milliseconds."""
    (folder / "tiny_net.py").write_text(NETWORK, encoding="utf-8")
    store = f"sqlite:///{folder}/mlflow.db"
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")},
        "MLFLOW_TRACKING_URI": store,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PYTHONPATH": str(folder),
    }
    common = ("--model", MODEL, "--world-sizes", "1", "--max-steps", "8")
    for words in (
        ("main", *common, "--batch-sizes", "8,32,128", "--price-per-device-hour", "2.5"),
        ("main", *common, "--batch-sizes", "8,16,64,256", "--seed", "1"),
        ("train", "--model", MODEL, "--train-epochs", "2", "--batch-size", "64"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "mlflow_tula", *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    return store


@contextlib.contextmanager
def serve(store: str, folder: Path) -> Iterator[str]:
    """`mlflow server --app-name tula` over the store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["server", "--app-name", "tula", "--port", str(port), "--workers", "1"]
    words += ["--backend-store-uri", store]
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_TRACKING_URI": store}
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", *words],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=2).close()
                break
            assert process.poll() is None, (folder / "server.log").read_text()[-3000:]
            time.sleep(0.2)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=30)


def site_of(url: str, store: str) -> Site:
    """What the store holds, asked through MLflow's own client."""
    from mlflow import MlflowClient

    client = MlflowClient(store, store)
    found = client.search_runs([one.experiment_id for one in client.search_experiments()])
    runs = sorted(found, key=lambda run: run.info.start_time)
    profiles = [run for run in runs if run.data.tags.get("tula.command") == "main"]
    (training,) = [run for run in runs if run.data.tags.get("tula.command") == "train"]
    return Site(
        url=url,
        store=store,
        profiles=(profiles[0], profiles[1]),
        training=training,
        name=profiles[0].data.tags["tula.registered_model"],
    )
