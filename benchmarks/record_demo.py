"""Record what `tula demo` replays: a real profile of this machine, and trainings to a target.

    python benchmarks/record_demo.py profile        # a minute, on an idle machine
    python benchmarks/record_demo.py take TABLE     # or one that `tula main` has measured
    python benchmarks/record_demo.py trainings      # epochs do not depend on what else runs
    python benchmarks/record_demo.py write          # -> mlflow_tula/demo/recording.json

The profile is what `tula profile --model NAME` measures, the trainings are what `tula train`
does on one device. What is measured already lies in build/demo and is not measured again; `write`
puts both (the profile alone where nothing was trained) into the package, without the name of the
host.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from mlflow_tula.demo import RECORDING, Recording
from mlflow_tula.files import read_json, write_json
from mlflow_tula.predictors.convergence_rows import ConvergenceRow
from mlflow_tula.profiler import profile as measure
from mlflow_tula.table import ProfileTable
from mlflow_tula.train import BatchPlan, Limits, train
from mlflow_tula.workloads.job import Job

WORK = Path("build/demo")
PROFILE, RUNS = "profile.json", "trainings.json"
MODEL, TARGET, EPOCHS = "mobilenet_v3_small", 0.95, 12
BATCH_SIZES, SEEDS = "16,32,64,128,256,512", "0,1,2"


@click.group()
def main() -> None:
    """Record what `tula demo` replays."""


@main.command()
@click.option("--model", default=MODEL, help="Torchvision name.")
@click.option("--batch-sizes", default="auto", help="Local batch sizes, comma-separated.")
@click.option("--max-steps", default=40, help="Most timed steps a probe.")
@click.option("--work", default=WORK, type=click.Path(path_type=Path), help="Folder.")
def profile(model: str, batch_sizes: str, max_steps: int, work: Path) -> None:
    """Measure the profile anew."""
    sizes = None if batch_sizes == "auto" else [int(size) for size in batch_sizes.split(",")]
    begin = time.monotonic()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    table = measure(job=Job(model=model), batch_sizes=sizes or "auto", max_steps=max_steps)
    command = f"tula profile --model {model}"
    command += f" --batch-sizes {batch_sizes}" if sizes else ""
    command += f" --max-steps {max_steps}" if max_steps != 40 else ""
    _keep(table, work, command=command, recorded_on=today, seconds=time.monotonic() - begin)


@main.command()
@click.argument("table_file", type=click.Path(path_type=Path))
@click.option("--command", required=True, help="What has measured it.")
@click.option("--recorded-on", required=True, help="The day, as 2026-12-31.")
@click.option("--work", default=WORK, type=click.Path(path_type=Path), help="Folder.")
def take(table_file: Path, command: str, recorded_on: str, work: Path) -> None:
    """Take a table.json from the output folder of `tula main` or `tula profile`."""
    table = ProfileTable.from_dict(read_json(table_file, made_by="tula profile"))
    spent = sum(row.probe_time_s or 0.0 for row in table.measurements)
    day = datetime.date.fromisoformat(recorded_on).isoformat()
    _keep(table, work, command=command, recorded_on=day, seconds=spent)


def _keep(
    table: ProfileTable, work: Path, *, command: str, recorded_on: str, seconds: float
) -> None:
    """Keep a profile and what is said of it until `write`."""
    document = {
        "recorded_on": recorded_on,
        "command": command,
        "seconds": seconds,
        "table": table.to_dict(),
    }
    click.echo(f"{len(table.ok)} probes: {write_json(work / PROFILE, document)}")


@main.command()
@click.option("--model", default=MODEL, help="Torchvision name.")
@click.option("--batch-sizes", default=BATCH_SIZES, help="Global batch sizes.")
@click.option("--seeds", default=SEEDS, help="Seeds of each size.")
@click.option("--epochs", default=EPOCHS, help="Epochs of the schedule.")
@click.option("--target", default=TARGET, help="Test accuracy to reach, 0 to 1.")
@click.option("--work", default=WORK, type=click.Path(path_type=Path), help="Folder.")
def trainings(
    model: str, batch_sizes: str, seeds: str, epochs: int, target: float, work: Path
) -> None:
    """Train to the target with each batch size and seed that is not there yet."""
    path = work / RUNS
    setting = {"model": model, "epochs": epochs, "target": target, "seeds": seeds}
    known = read_json(path, made_by="trainings") if path.exists() else {}
    runs = known["runs"] if known.get("setting") == setting else []
    done = {(run["batch_size"], run["seed"]) for run in runs}
    for seed in map(int, seeds.split(",")):
        for size in map(int, batch_sizes.split(",")):
            if (size, seed) not in done:
                runs.append(_train(Job(model=model, seed=seed), size, epochs, target))
                write_json(path, {"setting": setting, "runs": runs})
                click.echo(json.dumps(runs[-1]))


def _train(job: Job, size: int, epochs: int, target: float) -> dict[str, Any]:
    """One training: epochs to the target (None: not reached) and its seconds."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = train(
            job,
            BatchPlan.of(size),
            epochs=epochs,
            output_dir=folder,
            limits=Limits(target_accuracy=target),
        )
    return {
        "batch_size": size,
        "seed": job.seed,
        "epochs_to_target": result.epochs_to_target,
        "test_accuracy": result.test_accuracy,
        "seconds": time.monotonic() - begin,
    }


@main.command()
@click.option("--work", default=WORK, type=click.Path(path_type=Path), help="Folder.")
@click.option("--output", default=RECORDING, type=click.Path(path_type=Path), help="JSON file.")
def write(work: Path, output: Path) -> None:
    """Put profile and trainings into one file."""
    measured = read_json(work / PROFILE, made_by="profile")
    table = ProfileTable.from_dict(measured["table"])
    nameless = dataclasses.replace(table.hardware, host_name="")
    recording = Recording(
        table=dataclasses.replace(table, hardware=nameless),
        recorded_on=measured["recorded_on"],
        profile_command=measured["command"],
        profile_time_s=round(measured["seconds"], 1),
        **(_trained(work / RUNS) if (work / RUNS).exists() else {}),
    )
    click.echo(f"written: {write_json(output, recording.to_dict())}")


def _trained(path: Path) -> dict[str, Any]:
    """What a recording says of the trainings."""
    document = read_json(path, made_by="trainings")
    setting, runs = document["setting"], document["runs"]
    return {
        "convergence": tuple(
            _row(size, [run["epochs_to_target"] for run in runs if run["batch_size"] == size])
            for size in sorted({run["batch_size"] for run in runs})
        ),
        "target": f"test accuracy of {setting['target']:.0%}",
        "training_command": (
            f"tula train --model {setting['model']} --train-epochs {setting['epochs']} "
            f"--target-accuracy {setting['target']} --batch-size B --seed S"
        ),
        "training_time_s": round(sum(run["seconds"] for run in runs), 1),
    }


def _row(size: int, epochs: list[int | None]) -> ConvergenceRow:
    """Mean and spread over the seeds that reached the target."""
    reached = [number for number in epochs if number is not None]
    return ConvergenceRow(
        global_batch_size=size,
        epochs_to_target=statistics.fmean(reached) if reached else None,
        std=statistics.stdev(reached) if len(reached) > 1 else None,
        runs_total=len(epochs),
        runs_reached=len(reached),
    )


if __name__ == "__main__":
    main()
