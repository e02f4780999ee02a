"""How long `tula fit --runs` takes over many logged runs: prints a table.

    python benchmarks/observed_runs_speed.py --runs 2000

Protocol: a sqlite store with `--runs` runs in 20 experiments, each with 16 metrics (those of
autolog, each with a history of five values, and a loss), 12 parameters and 25 tags; 40
configurations, one in twenty runs without the metrics. The command is timed as a person runs it, in
a process of its own, from start to exit.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

import numpy as np
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from mlflow_tula.hardware import detect
from mlflow_tula.integrations.facts import LoopFacts, ObserverSettings
from mlflow_tula.tracking.observed_tags import spec_tags

SIZES = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192)
PASSES = (1, 2)
DEVICES = (1, 2)
EXPERIMENTS = 20


def fill(client: MlflowClient, count: int) -> None:
    """Log runs as autolog does."""
    facts = LoopFacts(
        model="ResNet", num_parameters=11_181_642, optimizer="sgd", momentum=0.9,
        dataset="CIFAR10", dataset_size=50_000, input_shape=(3, 32, 32), num_threads=2,
    )  # fmt: skip
    fixed = spec_tags(facts.workload(ObserverSettings()), detect("cpu"))
    draw = np.random.default_rng(0)
    homes = [client.create_experiment(f"team {number}") for number in range(EXPERIMENTS)]
    for number in range(count):
        size = int(draw.choice(SIZES))
        passes, devices = int(draw.choice(PASSES)), int(draw.choice(DEVICES))
        step = passes * (0.02 + 2e-3 * size) * float(np.exp(0.05 * draw.normal()))
        samples = size * passes * devices
        values = {
            "step_time_s": step, "step_time_std_s": 0.02 * step, "num_steps": 200,
            "throughput": samples / step, "peak_memory_bytes": 1e9 + 3e6 * size,
            "local_batch_size": size, "accumulation_steps": passes, "nodes": 1,
            "devices_per_node": devices, "global_batch_size": samples, "gradient_norm": 1.0,
            "gradient_variability": 0.1, "noise_scale": 300.0, "step/step_time_s": step,
            "step/gradient_norm": 1.0,
        }  # fmt: skip
        if number % 20 == 0:
            values = {}
        run = client.create_run(homes[number % EXPERIMENTS], run_name=f"run {number}")
        client.log_batch(
            run.info.run_id,
            metrics=[
                Metric(name, value, 0, at)
                for at in range(5)
                for name, value in {**values, "loss": 1.0 / (at + 1)}.items()
            ],
            params=[Param(f"setting {name}", str(number)) for name in range(12)],
            tags=[RunTag(key, str(value)) for key, value in fixed.items()]
            + [RunTag(f"note {name}", str(number)) for name in range(11)]
            + [RunTag("tula.num_threads", "2"), RunTag("tula.input_shape", "3x32x32")],
        )
        client.set_terminated(run.info.run_id)


def main() -> None:
    """Fill a store, time the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--store", help="a sqlite file to keep and use again")
    parser.add_argument("--fill-only", action="store_true")
    parser.add_argument("--markdown", help="also write the table to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(args.store or f"{folder}/mlflow.db").absolute()
        uri, fresh = f"sqlite:///{path}", not path.exists()
        client = MlflowClient(uri, uri)
        if fresh:
            fill(client, args.runs)
        if args.fill_only:
            return
        command = [sys.executable, "-m", "mlflow_tula", "fit", "--runs", "all"]
        begin = time.perf_counter()
        done = subprocess.run(
            [*command, "--tracking-uri", uri, "--output-dir", f"{folder}/out"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        seconds = time.perf_counter() - begin
    if done.returncode:
        sys.exit(done.stderr)
    print(done.stderr, end="")
    text = f"| runs | seconds |\n|---|---|\n| {args.runs:,} | {seconds:.1f} |\n"
    print(text, end="")
    if args.markdown:
        Path(args.markdown).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
