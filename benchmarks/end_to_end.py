"""Time to a target accuracy on real data: a default small batch, the largest that fits, and tula's.

    python benchmarks/end_to_end.py run [--next] [--task fashion_mnist]
    python benchmarks/end_to_end.py report --markdown FILE --gains FILE

Three ways to train the same job with the same loop, learning rate, threads and memory limit:

    small      batch 32, plain: the default of torchvision's reference scripts and of Keras
    largest    the largest power of two that fits into the memory limit, plain
    tula       the decision of `tula main --objective min_time_to_target --convergence noise-scale`
               (the registry is asked by `tula train` itself), with the recipe (`--method auto`)

Each is one `tula train` command that stops after the first epoch whose accuracy on a validation
part of the training data reaches the target; the test split is looked at once, afterwards. Seconds
are those of the whole command, from its start to its end, as a person waits for it (imports, the
question to the registry, checkpoints and the MLflow run included); beside them those of training
and validation alone. The first job pays for `tula main` as well; from the second on the registry
knows the answer.

The same number of epochs is the length of the schedule for `small` and `tula`. The largest batch
would not get there in so few updates: its schedule is three to six times as long. Where it does not
reach the target by its end, what is said of it is a lower bound. The learning rate is the best of
0.02, 0.05 and 0.1 for batch 32, on the validation part with a seed of its own; tula's way is not
tuned. Seeds change weights and order; the order of the ways rotates from seed to seed. What is done
is one JSON line a piece in benchmarks/results/end_to_end; a piece that is there is not run again,
and `--next` runs one piece alone. The machine should be idle (a piece takes up to two minutes
then): each line says how much of it something else used. `--again 0.1` repeats the runs where that
was more than a tenth, and the least disturbed line counts. On a busy machine only the processor
seconds can be compared, and they within some 20 %.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from end_to_end_facts import (
    MEMORY_LIMIT,
    RESULTS,
    SHOWN,
    SMALL_BATCH,
    TASKS,
    WAYS,
    WORK,
    Record,
    Records,
    Task,
    disturbed,
)
from end_to_end_report import clock_of, gains_of, gains_table, section


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """Seconds from start to end, of the processors in it, and in all else the machine did."""

    wall_s: float
    cpu_s: float
    others_s: float


def tula_command(verb: str, words: Sequence[str], work: Path) -> tuple[Record, Spent]:
    """Run a command; its JSON document and what it took."""
    work.mkdir(parents=True, exist_ok=True)
    store = f"sqlite:///{(work / 'mlflow.db').absolute()}"
    command = [sys.executable, "-m", "mlflow_tula", verb, *words, "--tracking-uri", store]
    began, before, busy = time.monotonic(), _children_cpu_s(), _busy_s()
    done = subprocess.run(
        [*command, "--json", "true"],
        cwd=work,
        capture_output=True,
        text=True,
        env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"},
        check=False,
    )
    wall, own = time.monotonic() - began, _children_cpu_s() - before
    spent = Spent(wall_s=wall, cpu_s=own, others_s=max(_busy_s() - busy - own, 0.0))
    if done.returncode != 0:
        raise click.ClickException(
            f"tula {verb} ended with {done.returncode}: {done.stderr[-600:]}"
        )
    document: Record = json.loads(done.stdout)
    return document, spent


def _children_cpu_s() -> float:
    """Processor seconds of all processes that this one has started and seen end."""
    now = os.times()
    return now.children_user + now.children_system


def _busy_s() -> float:
    """Seconds that this machine's processors have worked since it was started."""
    import psutil

    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


def find_largest(task: Task, records: Records, work: Path) -> None:
    """Double the batch until three steps of plain training take more than the memory limit."""
    peaks: dict[int, int] = {}
    for size in task.large_sizes:
        peaks[size] = peak_of(task, size, work)
        if peaks[size] > MEMORY_LIMIT:
            break
    fitting = [size for size, peak in peaks.items() if peak <= MEMORY_LIMIT]
    records.add(
        {
            "piece": "largest",
            "batch_size": max(fitting),
            "memory_limit_bytes": MEMORY_LIMIT,
            "peak_memory_bytes": {str(size): peak for size, peak in peaks.items()},
        }
    )


def peak_of(task: Task, size: int, work: Path) -> int:
    """Peak resident bytes of plain training, tested once."""
    from mlflow_tula.train import BatchPlan, Limits, Schedule, train
    from mlflow_tula.workloads.job import Job

    result = train(
        Job(model=task.model, dataset=task.dataset, image_size=task.image_size),
        BatchPlan.of(size),
        epochs=3,
        output_dir=work / "largest",
        resume=False,
        schedule=Schedule(method="plain"),
        limits=Limits(max_steps=3),
    )
    return result.peak_memory_bytes


def run_profile(task: Task, records: Records, work: Path) -> None:
    """`tula main`, as the first job pays for it, and `tula recommend`, as the others do."""
    shutil.rmtree(work, ignore_errors=True)  # a first job finds nothing registered
    words = [*decision(task), *rate(task), *task.profile_options, "--convergence", "noise-scale"]
    document, spent = tula_command("main", words, work)
    _, again = tula_command("recommend", decision(task), work)
    records.add(
        {
            "piece": "profile",
            "profile_s": spent.wall_s,
            "others_cpu_s": spent.others_s,
            "cores": os.cpu_count(),
            "recommend_s": again.wall_s,
            "batch_size": document["global_batch_size"],
            "devices": document["devices_per_node"],
            "reasons": document["reasons"],
            "warnings": document["warnings"],
        }
    )


def decision(task: Task) -> list[str]:
    """What is asked of the recommender: the soonest at a target, within the memory limit."""
    limit = f"{MEMORY_LIMIT}B"
    return [*task.names, "--memory-limit", limit, "--objective", "min_time_to_target"]


def rate(task: Task) -> list[str]:
    """The learning rate at batch 64, which `tula train` scales down for smaller batches."""
    return ["--learning-rate", str(task.learning_rate)]


def run_training(task: Task, way: str, seed: int, records: Records, work: Path) -> None:
    """One way, one seed."""
    largest = records.find("largest")
    assert largest is not None, "it comes first"
    own = {
        "small": ["--batch-size", str(SMALL_BATCH), "--method", "plain"],
        "largest": ["--batch-size", str(largest["batch_size"]), "--method", "plain"],
        "tula": ["--method", "auto"],
    }[way]
    epochs = task.large_epochs if way == "largest" else task.epochs
    words = [
        *(*decision(task), *rate(task), *own, "--seed", str(seed), "--train-epochs", str(epochs)),
        *("--target-accuracy", str(task.target), "--resume", "false"),
        *("--time-limit", f"{task.time_limit_s}s", "--output-dir", f"{way}-{seed}"),
    ]
    document, spent = tula_command("train", words, work)
    checkpoint = work / document["checkpoint_path"]
    records.add(
        {
            "piece": "train",
            "way": way,
            "seed": seed,
            "target": task.target,
            "reached": document["epochs_to_target"] is not None,
            "command_s": spent.wall_s,
            "cpu_s": spent.cpu_s,
            "others_cpu_s": spent.others_s,
            "cores": os.cpu_count(),
            "training_s": document["wall_time_s"],
            "epochs": document["epochs"],
            "steps": document["steps"],
            "epochs_planned": epochs,
            "batch_size": document["plan"]["global_batch_size"],
            "devices": document["plan"]["devices_per_node"],
            "validation_accuracy": document["test_accuracy"],
            "curve": [row["test_accuracy"] for row in document["history"]],
            "test_accuracy": test_accuracy(task, checkpoint.parent),
            "peak_memory_bytes": document["peak_memory_bytes"],
        }
    )


def test_accuracy(task: Task, folder: Path) -> float:
    """Of the last checkpoint, on the test split, which played no part until now."""
    import torch

    from mlflow_tula.training.checkpoint import load_checkpoint
    from mlflow_tula.workloads.datasets import build_datasets
    from mlflow_tula.workloads.job import Job
    from mlflow_tula.workloads.loaders import build_loader
    from mlflow_tula.workloads.models import build_model

    job = Job(model=task.model, dataset=task.dataset, image_size=task.image_size)
    name = "fashion_mnist" if "fashion" in task.dataset else "digits"
    data = build_datasets(Job(model="none", dataset=name, image_size=task.image_size))
    identity = json.loads((folder / "decision.json").read_text())["identity"]
    state = load_checkpoint(folder, identity=identity)
    assert state is not None, "a training has ended"
    model = build_model(job, data.num_classes, image_size=task.image_size)
    model.load_state_dict(state["model"])
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in build_loader(job, data.test, 500, shuffle=False, drop_last=False):
            right += int((model(images).argmax(1) == labels).sum())
    return right / data.test_size


def pieces(
    task: Task, records: Records, work: Path, again: float
) -> Iterator[tuple[str, Callable[[], None]]]:
    """What is still to be done, in order: missing, or disturbed by more than the share `again`."""
    if records.find("largest") is None:
        yield "largest batch that fits", lambda: find_largest(task, records, work)
    profile = records.find("profile")
    if profile is None or disturbed(profile) > again or not (work / "mlflow.db").exists():
        yield "profile", lambda: run_profile(task, records, work)
    for number, seed in enumerate(task.seeds):
        turn = number % len(WAYS)
        for way in (*WAYS[turn:], *WAYS[:turn]):
            found = records.find("train", way=way, seed=seed)
            if found is None or disturbed(found) > again:
                yield (
                    f"{way}, seed {seed}",
                    lambda way=way, seed=seed: run_training(task, way, seed, records, work),
                )


@click.group()
def main() -> None:
    """Time to a target accuracy, three ways."""


@main.command()
@click.option("--task", "names", multiple=True, type=click.Choice(list(TASKS)), default=SHOWN)
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, help="JSON lines.")
@click.option("--work", type=click.Path(path_type=Path), default=WORK, help="Store, checkpoints.")
@click.option("--next", "only_one", is_flag=True, help="Run one missing piece and stop.")
@click.option("--again", default=1.0, help="Repeat runs beside which more of the machine was busy.")
@click.option("--piece", default="", help="Only this one of --plan: 'tula, seed 0'.")
@click.option("--plan", is_flag=True, help="Say what is missing and stop.")
def run(
    names: tuple[str, ...],
    results: Path,
    work: Path,
    only_one: bool,
    again: float,
    piece: str,
    plan: bool,
) -> None:
    """Run what is missing; exit 3 from --next where nothing is."""
    for name in names:
        task = TASKS[name]
        records, folder = Records(results, task), (work / name).absolute()
        for words, do in list(pieces(task, records, folder, again)):
            if piece not in ("", words):
                continue
            if plan:
                print(f"{name}: {words}")
                continue
            began = time.monotonic()
            do()
            print(f"{name}: {words}: {time.monotonic() - began:.0f} s", flush=True)
            if only_one:
                return
    if only_one:
        sys.exit(3)


@main.command()
@click.option("--task", "names", multiple=True, type=click.Choice(list(TASKS)), default=SHOWN)
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, help="JSON lines.")
@click.option("--markdown", "page", type=click.Path(path_type=Path), help="Write the page here.")
@click.option("--gains", type=click.Path(path_type=Path), help="Write the short table here.")
def report(names: tuple[str, ...], results: Path, page: Path | None, gains: Path | None) -> None:
    """Print the tables."""
    found = [(TASKS[name], Records(results, TASKS[name])) for name in names]
    absent = [task.name for task, records in found if not records.rows]
    found = [one for one in found if one[1].rows]
    if not found:
        raise click.ClickException(f"nothing was run yet of {', '.join(absent)}: `run` first")
    parts = ["\n".join(section(*one)) for one in found]
    parts += [f"### {name}\n\nNot run yet." for name in absent]
    text = "\n\n".join(parts) + "\n"
    table = gains_table(found)
    print(text)
    print(table)
    for path, content in ((page, text), (gains, table)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    for task, records in found:
        print(task.name, dataclasses.asdict(gains_of(records, task, clock_of(records, task))))


if __name__ == "__main__":
    main()
