"""A rank's side of `launch`: report a result or a failure as JSON, and leave without waiting.

    if __name__ == "__main__":
        run_rank(main)

Imports nothing heavy: a worker module imports this first and torch inside its `main`, so that
even a failing import is reported in its own words.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import psutil

from mlflow_tula.errors import TulaError
from mlflow_tula.launch.failures import RankFailure

FOLDER_VARIABLE = "TULA_LAUNCH_FOLDER"
GROUP_VARIABLE = "TULA_LAUNCH_ID"
PARENT_VARIABLE = "TULA_LAUNCH_PARENT"
FOLDER_WORD = "{folder}"
"""In a module's arguments: the folder of the node's own part of the group."""


def rank() -> int:
    """This process's rank, 0 outside a group."""
    return int(os.environ.get("RANK", "0"))


def report(result: Mapping[str, Any]) -> None:
    """Hand this rank's result to the caller of `launch`; a later report replaces it."""
    write_json(Path(os.environ[FOLDER_VARIABLE]) / f"result-rank{rank()}.json", result)


def report_failure(error: BaseException) -> None:
    """Leave this rank's failure in its own words for `RankGroup.failure`."""
    text = str(error) if isinstance(error, TulaError) else ""
    failure = RankFailure.from_exception(
        rank(), error, time=time.time(), traceback=traceback.format_exc(limit=-20)
    )
    document = failure.to_dict() | ({"message": text} if text else {})
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        write_json(Path(folder) / f"failure-rank{rank()}.json", document)


def run_rank(work: Callable[[], None]) -> NoReturn:
    """Run a rank's `work` and leave: exit code 0, or 1 with the exception reported.

    The process ends without clean-up: destroying a process group waits for peers that may never
    come. Its loader workers are ended first.
    """
    watch_parent()
    code = 0
    try:
        work()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        traceback.print_exc()
        report_failure(error)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(psutil.Error):
        signal_all(psutil.Process().children(recursive=True), signal.SIGTERM)
    os._exit(code)


def watch_parent(interval_s: float = 1.0) -> None:
    """End this process when the process that launched the group, or its agent, is gone.

    A caller killed by SIGKILL cannot stop its ranks; they notice it themselves.
    """
    caller, agent = int(os.environ.get(PARENT_VARIABLE, "0")), os.getppid()

    def watch() -> None:
        while os.getppid() == agent and (not caller or psutil.pid_exists(caller)):
            time.sleep(interval_s)
        os._exit(1)

    threading.Thread(target=watch, name="tula-watch-parent", daemon=True).start()


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write JSON so that a reader sees the old file or the whole new one."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(document))
    part.replace(path)


def signal_all(processes: Sequence[psutil.Process], number: int) -> None:
    """Send a signal to each process that is still there."""
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            process.send_signal(number)


def exit_code(error: BaseException | None) -> int:
    """The exit code of the process that ends with this exception."""
    if error is None:
        return 0
    if isinstance(error, TulaError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    return int(getattr(error, "exit_code", 1))
