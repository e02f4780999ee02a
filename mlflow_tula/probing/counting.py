"""Static features of a job, and its workload, counted in a process of its own.

counting = Counting(job)            # starts at once, beside whatever else is starting
features = counting.result()        # None where they could not be had; never raises
counting.workload, counting.refusal # what is trained; why it cannot be, in the child's own words

A process of its own, because counting runs the model without values: your own code may keep what it
sees, and the process that is timed must see real steps only. The caller imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mlflow_tula.errors import InvalidInputError, TulaError
from mlflow_tula.launch.group import rank_environment
from mlflow_tula.model_features import ModelFeatures
from mlflow_tula.specs import Workload
from mlflow_tula.workloads.job import Job

logger = logging.getLogger(__name__)

TIMEOUT_S = 120.0
"""A model that takes longer to be counted is not counted."""


class Counting:
    """A child process that counts one job."""

    def __init__(self, job: Job, *, whole: bool = False) -> None:
        """Start it.

        Args:
            job: what is counted.
            whole: one dataset of your own is all training data.
        """
        self._found: ModelFeatures | None = None
        self.workload: Workload | None = None
        self.refusal = ""
        self._task = json.dumps({"job": job.to_dict(), "whole": whole})
        self._child: subprocess.Popen[str] | None = subprocess.Popen(
            [sys.executable, "-m", "mlflow_tula.probing.counting", self._task],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=rank_environment(Path(tempfile.gettempdir()), "counting", threads=1, additions={}),
        )

    def result(self, timeout_s: float = TIMEOUT_S) -> ModelFeatures | None:
        """Wait for the features; None, with the reason in the log, where there are none."""
        child, self._child = self._child, None
        if child is None:
            return self._found
        try:
            out, err = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _end(child)
            logger.warning("the kernels were not counted within %.0f s", timeout_s)
            return None
        if child.returncode:
            logger.info("the kernels were not counted: %s", (err.strip().splitlines() or [""])[-1])
            return None
        try:
            answer = json.loads(out.strip().splitlines()[-1])
            self.refusal = str(answer.get("refusal", ""))
            if not self.refusal:
                self.workload = Workload.from_dict(answer["workload"])
                self._found = ModelFeatures.from_dict(answer["features"])
        except (ValueError, LookupError, AttributeError, TulaError) as error:
            logger.info("the kernels were not counted: %s", error)
        return self._found

    def close(self) -> None:
        """End the child if it still runs."""
        child, self._child = self._child, None
        if child is not None:
            _end(child)


def _end(child: subprocess.Popen[str]) -> None:
    child.kill()
    with contextlib.suppress(Exception):
        child.communicate(timeout=5)


def main() -> None:
    """Count the job on the command line and print its workload and features as JSON."""
    from mlflow_tula.features import extract
    from mlflow_tula.probing.own import load_datasets
    from mlflow_tula.workloads.describe import describe

    task = json.loads(sys.argv[1])
    job = Job.from_dict(task["job"])
    try:
        data = load_datasets(job, whole=bool(task["whole"]))
        answer: dict[str, Any] = {
            "workload": describe(job, data).to_dict(),
            "features": extract(job, datasets=data).to_dict(),
        }
    except InvalidInputError as error:
        answer = {"refusal": str(error)}
    print(json.dumps(answer))  # noqa: T201 (the answer to the parent)


if __name__ == "__main__":
    main()
