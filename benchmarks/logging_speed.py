"""How long it takes to log a whole profile of 12 probes: into sqlite, and through a server.

    python benchmarks/logging_speed.py [--repeats 5] [--markdown FILE] [--profile]

What `tula main` logs beside its measurements and its registration: twelve nested runs with the
times of 40 steps each, curves, tables, figures (PNG and offline pages), the dataset, the
description, from opening the run to its end. The server is `mlflow server` on this machine over a
sqlite file, and proxies artifacts as it does by default. Medians with their spread (largest less
smallest); exits 1 where a median exceeds the limit that the project set itself.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import mlflow_tula as tula
from mlflow_tula.errors import TulaWarning

LIMITS = {"sqlite": 3.0, "http": 5.0}
PROBES = 12
STEPS = 40


def profile_of(rows: int) -> tula.ProfileTable:
    """A table like a real profile: one and two devices, the last size out of memory."""
    rng = np.random.default_rng(0)
    sizes = [(2 ** (3 + n // 2), 1 + n % 2) for n in range(rows)]
    measurements = []
    for number, (size, devices) in enumerate(sizes):
        alone = float(np.hypot(0.02, 0.004 + 0.001 * size)) * float(np.exp(rng.normal(0, 0.02)))
        asked = {"local_batch_size": size, "devices_per_node": devices}
        if number == rows - 1:
            more: dict[str, object] = {"status": "oom", "reason": "cannot allocate memory"}
        else:
            more = {
                "step_time_s": alone + 0.03 * (devices - 1),
                "step_time_std_s": 0.001,
                "num_steps": STEPS,
                "sync_time_s": 0.03 * (devices - 1),
                "peak_memory_bytes": int(1e9 + 2e6 * size),
                "probe_time_s": STEPS * alone,
            }
        measurements.append(tula.Measurement(**asked, **more))  # type: ignore[arg-type]
    return tula.ProfileTable(
        workload=tula.Workload(model="resnet18", dataset="cifar10", dataset_size=50_000),
        hardware=tula.HardwareSpec(
            device_type="cuda",
            device_name="Tesla T4",
            device_memory_bytes=16 * 2**30,
            devices_per_node=2,
        ),
        measurements=tuple(measurements),
    )


def log_once(table: tula.ProfileTable) -> float:
    """Log the profile as `tula main` does, and say how many seconds it took."""
    from mlflow_tula.tracking import ProbeLogger, log_profile, start_run

    bundle = tula.fit(table)
    clusters = [tula.ClusterSpec(devices_per_node=count) for count in (1, 2)]
    choice = tula.recommend(bundle, cluster=clusters, pricing=tula.Pricing(usd_per_gb_hour=0.15))
    details = {"stopped_by": "precision", "warmup_steps": 2, "step_times_s": [0.05] * STEPS}
    start = time.perf_counter()
    with start_run("main resnet18.cifar10", command="main") as run:
        probes = ProbeLogger(run)
        for row in table.measurements:
            probes(SimpleNamespace(kind="probe_finished", measurement=row, details=details))
        log_profile(run, table, bundle, choice, probes=probes, settings={"search": "partial"})
    return time.perf_counter() - start


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """`mlflow server` on a free port over a sqlite file in this folder."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--workers", "1"]
    words += ["--artifacts-destination", str(folder / "artifacts")]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=folder, stdout=log, stderr=log, start_new_session=True
        )
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
        process.wait(timeout=30)


def times_of(address: str, repeats: int, *, profiled: bool) -> list[float]:
    """Seconds of each of several profiles logged to this store; a first one is not counted."""
    import mlflow

    mlflow.set_tracking_uri(address)
    table = profile_of(PROBES)
    log_once(table)
    if not profiled:
        return [log_once(table) for _ in range(repeats)]
    import cProfile
    import pstats

    with cProfile.Profile() as found:
        times = [log_once(table) for _ in range(repeats)]
    pstats.Stats(found).sort_stats("cumulative").print_stats(60)
    return times


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--stores", default="sqlite,http", help="which of them")
    parser.add_argument("--markdown", type=Path, help="write the table there as well")
    parser.add_argument("--profile", action="store_true", help="say where the time goes")
    given = parser.parse_args()
    warnings.simplefilter("ignore", TulaWarning)
    rows, slow = [], 0
    with tempfile.TemporaryDirectory(prefix="tula-") as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch)
        for name in given.stores.split(","):
            address = f"sqlite:///{folder}/mlflow.db"
            if name == "http":
                address = stack.enter_context(server(folder))
            times = times_of(address, given.repeats, profiled=given.profile)
            median, spread = statistics.median(times), max(times) - min(times)
            slow += median > LIMITS[name]
            rows.append(f"| {name} | {median:.2f} s | {spread:.2f} s | {LIMITS[name]:g} s |")
    text = "\n".join(["| store | median | spread | limit |", "|---|---:|---:|---:|", *rows])
    print(text)
    if given.markdown is not None:
        given.markdown.write_text(text + "\n", encoding="utf-8")
    return int(slow > 0)


if __name__ == "__main__":
    sys.exit(main())
