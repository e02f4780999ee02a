"""Real MLflow servers for the tests of serving: started, waited for, ended by their own group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def running(*words: str, port: int, health: str, folder: Path) -> Iterator[str]:
    """`mlflow <words> --port <port>` in `folder`; yields the address once `health` answers."""
    address = f"http://127.0.0.1:{port}"
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with (folder / f"server-{port}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", *words, "--port", str(port)],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            wait_for(f"{address}{health}", process, Path(log.name))
            yield address
        finally:
            end(process)


def wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return once the address answers."""
    until = time.monotonic() + 150
    while time.monotonic() < until and process.poll() is None:
        try:
            urllib.request.urlopen(address, timeout=2).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"no answer from {address}: {log.read_text()[-3000:]}")


def end(process: subprocess.Popen[bytes]) -> None:
    """End the whole group of a server."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            continue
    process.wait(15)
