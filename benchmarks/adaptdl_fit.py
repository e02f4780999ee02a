"""AdaptDL's own fit of step times, one JSON line a question, in an environment of its own.

AdaptDL 0.2.11 (PyPI, Apache-2.0) wants old packages; its goodput.py alone needs three:

    python -m venv adaptdl-env
    adaptdl-env/bin/pip install --no-deps adaptdl==0.2.11
    adaptdl-env/bin/pip install autograd 'numpy<2' scipy
    python benchmarks/accuracy.py --data FOLDER --adaptdl-python adaptdl-env/bin/python

(Python 3.11, autograd 1.9, numpy 1.26 and scipy 1.17 ran.) A line in holds `train` and `test`, each
lists of nodes, replicas and local batch size, and in `train` also `accum_time_s` (forward and
backward alone) and `step_time_s`. A line out holds `step_time_s` of the test rows and `fit_s`, the
wall time of `fit_perf_params` alone.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
from adaptdl.goodput import GoodputFunction, GradParams, fit_perf_params


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Fit the training rows and predict the test rows."""
    train = {name: np.array(values, float) for name, values in question["train"].items()}
    test = {name: np.array(values, float) for name, values in question["test"].items()}
    start = time.perf_counter()
    params = fit_perf_params(
        train["nodes"],
        train["replicas"],
        train["local_batch_size"],
        train["accum_time_s"],
        train["step_time_s"],
    )
    seconds = time.perf_counter() - start
    goodput = GoodputFunction(params, GradParams(sqr=1.0, var=1.0), 1)
    nodes, replicas, sizes = test["nodes"], test["replicas"], test["local_batch_size"]
    samples_per_s = goodput.throughput(nodes, replicas, sizes, np.zeros_like(sizes))
    return {"step_time_s": (sizes * replicas / samples_per_s).tolist(), "fit_s": seconds}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
