"""Who does the work: the tags by which a run that goes on is told from one whose process died."""

from __future__ import annotations

import os
import socket
from importlib import metadata

import psutil

_CLOCK_TOLERANCE_S = 2.0


def process_tags() -> dict[str, object]:
    """Host, process and version of this process, as tags of its runs."""
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


def is_alive(pid: str | None, started: str | None) -> bool:
    """Whether this very process still runs; a number that was given to another one does not count.

    What cannot be told counts as alive: a live run must not be closed.
    """
    if pid is None or not pid.isdigit():
        return True
    try:
        process = psutil.Process(int(pid))
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        if started is None:
            return True
        return abs(process.create_time() - float(started)) <= _CLOCK_TOLERANCE_S
    except psutil.NoSuchProcess:
        return False
    except (psutil.Error, ValueError):
        return True
