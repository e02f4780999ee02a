"""A module for ranks: `python -m launch_parts HOW`, through mlflow_tula.launch."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.launch.ranks import PARENT_VARIABLE, rank, report, run_rank


def ranks_left(caller: int | None = None) -> list[int]:
    """Processes of any group that `caller` (this process) launched and that still run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(PARENT_VARIABLE) == str(caller or os.getpid()):
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def until(condition: Callable[[], object], seconds: float) -> bool:
    """Whether it came true within so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


def main() -> None:
    how = sys.argv[1] if len(sys.argv) > 1 else "report"
    if how == "report":
        report(
            {
                "rank": rank(),
                "world": os.environ["WORLD_SIZE"],
                "threads": os.environ["OMP_NUM_THREADS"],
                "policy": os.environ["OMP_WAIT_POLICY"],
                "mlflow": os.environ.get("MLFLOW_RUN_ID"),
                "extra": os.environ.get("EXTRA"),
                "path": [str(Path(p).resolve()) for p in sys.path if p],
            }
        )
        return
    if how == "child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        time.sleep(600)
    if rank() == 1:
        if how == "raise":
            raise MemoryError("no room on the moon")
        if how == "input":
            raise InvalidInputError("the rule, the value, the way out")
        if how == "kill":
            os.kill(os.getpid(), 9)
        if how == "exit":
            os._exit(7)
    time.sleep(600)


if __name__ == "__main__":
    run_rank(main)
