"""What people wait for, measured: start-up of the command line, fitting, predicting.

    python benchmarks/speed.py

Medians of several runs, with the spread (largest less smallest). Compared with the limits that the
project set itself; exits 1 where a median exceeds one.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import numpy as np
import pandas as pd

import mlflow_tula as tula
from mlflow_tula.errors import TulaWarning


def seconds_of(action: Callable[[], object], repeats: int) -> list[float]:
    """Wall time of each of several runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return times


def start(*words: str) -> Callable[[], object]:
    """A fresh Python process that runs these words."""
    return lambda: subprocess.run([sys.executable, *words], check=True, capture_output=True)


def table_of(rows: int) -> tula.ProfileTable:
    """A table like a real profile: floor, line, all-reduce, 3 % noise, four node counts."""
    rng = np.random.default_rng(0)
    sizes = 2 ** rng.integers(3, 11, rows)
    nodes = 2 ** rng.integers(0, 4, rows)
    seconds = np.hypot(0.02, 0.004 + 0.001 * sizes) + 0.03 * np.log2(nodes)
    frame = pd.DataFrame(
        {
            "local_batch_size": sizes,
            "nodes": nodes,
            "step_time_s": seconds * np.exp(rng.normal(0, 0.03, rows)),
            "peak_memory_bytes": 1e9 + 2e6 * sizes,
        }
    )
    return tula.ProfileTable.from_frame(
        frame,
        workload=tula.Workload(model="m", dataset="d", dataset_size=50_000),
        hardware=tula.HardwareSpec(
            device_type="cuda", device_name="T4", device_memory_bytes=16 * 2**30
        ),
    )


def main() -> int:
    """Print the table."""
    warnings.simplefilter("ignore", TulaWarning)
    table = table_of(100)
    bundle = tula.fit(table)
    frame = pd.DataFrame({"local_batch_size": np.arange(1, 10_001), "nodes": 2})
    rows = [
        ("tula --help", 0.5, seconds_of(start("-m", "mlflow_tula", "--help"), 7)),
        ("import mlflow_tula", 0.5, seconds_of(start("-c", "import mlflow_tula"), 7)),
        ("fit 100 rows", 0.3, seconds_of(lambda: tula.fit(table), 7)),
        ("predict 10,000 rows", 0.05, seconds_of(lambda: bundle.predict(frame), 15)),
    ]
    print(f"{'what':22s} {'median':>9s} {'spread':>9s} {'limit':>9s}")
    slow = 0
    for name, limit, times in rows:
        median, spread = statistics.median(times), max(times) - min(times)
        slow += median > limit
        print(f"{name:22s} {median * 1e3:6.0f} ms {spread * 1e3:6.0f} ms {limit * 1e3:6.0f} ms")
    return int(slow > 0)


if __name__ == "__main__":
    sys.exit(main())
