"""How a command must end, and what a server must know of it afterwards; each yields its faults."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import mlflow
from commands import Command, Ended
from mlflow import MlflowClient

MOST_STALL_S = 60.0


def wait_for(command: Command, sign: str, timeout_s: float = 300.0) -> None:
    """Until the command has said this on stderr, or has ended."""
    deadline = time.monotonic() + timeout_s
    while command.process.poll() is None and time.monotonic() < deadline:
        if sign in (command.folder / "err.txt").read_text(errors="replace"):
            return
        time.sleep(0.05)


def well(done: Ended, *codes: int) -> Iterator[str]:
    """The exit code that fits, and no traceback."""
    if done.code not in codes:
        yield f"exit code {done.code}, not {codes}: {done.err.strip()[-400:]}"
    if done.has_traceback:
        yield f"a traceback: {done.err.strip()[-400:]}"


def one_line(done: Ended, sign: str) -> Iterator[str]:
    """What is wrong, in the one line that begins with Error."""
    lines = [line for line in done.err.splitlines() if line.startswith("Error: ")]
    if len(lines) != 1 or sign not in lines[0]:
        yield f"not one line with {sign!r}: {lines or done.err.strip()[-300:]}"


def refused(done: Ended, sign: str, place: Path) -> Iterator[str]:
    """Exit code 2, one line, within seconds, and nothing is left behind."""
    yield from well(done, 2)
    yield from one_line(done, sign)
    if done.seconds > MOST_STALL_S:
        yield f"it took {done.seconds:.0f} s to say so"
    if (place / "mlflow.db").exists():
        mlflow.set_tracking_uri(f"sqlite:///{place}/mlflow.db")
        client = MlflowClient()
        everywhere = [one.experiment_id for one in client.search_experiments()]
        if client.search_runs(everywhere):
            yield "a run was left behind"


def complete(uri: str, command: str, done: Ended) -> Iterator[str]:
    """The server knows all that happened while it was away."""
    mlflow.set_tracking_uri(uri)
    client = MlflowClient()
    experiment = client.get_experiment_by_name("tula")
    runs = client.search_runs([experiment.experiment_id])
    top = [one for one in runs if one.data.tags.get("tula.command") == command]
    if [one.info.status for one in top] != ["FINISHED"] * len(top) or not top:
        yield f"runs: {[one.info.status for one in top]}"
        return
    newest = max(top, key=lambda one: one.info.start_time)
    children = [
        one for one in runs if one.data.tags.get("mlflow.parentRunId") == newest.info.run_id
    ]
    if command == "train":
        history = client.get_metric_history(newest.info.run_id, "step/loss")
        history = history or client.get_metric_history(newest.info.run_id, "train_loss")
        if "final/test_accuracy" not in newest.data.metrics or len(history) < 3:
            yield f"{len(history)} losses, metrics {sorted(newest.data.metrics)[:9]}"
        return
    probes = sorted({one.data.params["tula.local_batch_size"] for one in children}, key=int)
    if len(children) != len(probes) or probes != ["8", "16", "32", "64", "128"]:
        yield f"{len(children)} probes: {probes}"
    if any(one.info.status != "FINISHED" for one in children):
        yield f"probes: {[one.info.status for one in children]}"
    files = {one.path for one in client.list_artifacts(newest.info.run_id)}
    if not {"profile.json", "profile_table.json"} <= files:
        yield f"files: {sorted(files)}"
    if "mlflow.note.content" not in newest.data.tags:
        yield "no description"
