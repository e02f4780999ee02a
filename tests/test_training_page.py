"""What a training's run shows: the decision and the outcome in words, curves as figures."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import mlflow
import pytest
from mlflow import MlflowClient

from mlflow_tula.runs import start_run
from mlflow_tula.tracking.background import Background
from mlflow_tula.tracking.system_metrics import system_metrics
from mlflow_tula.tracking.training_page import StepKeeper, describe_training, log_training_page
from mlflow_tula.training.facts import BatchPlan, EpochRecord, StepRecord, TrainResult


def step(number: int) -> StepRecord:
    return StepRecord(
        step=number,
        epoch=1,
        train_loss=2.0 / number,
        learning_rate=0.1,
        gradient_norm=1.0,
        gradient_variability=None if number == 1 else 0.5,
        step_time_s=0.01,
    )


def epoch(number: int) -> EpochRecord:
    return EpochRecord(
        epoch=number,
        step=4 * number,
        samples=128 * number,
        train_loss=0.4,
        test_loss=0.3,
        test_accuracy=0.25 * number,
        learning_rate=0.1,
        step_time_s=0.01,
        epoch_time_s=1.0,
        evaluation_time_s=0.1,
        throughput=64.0,
        peak_memory_bytes=10**9,
        gradient_variability=0.5,
    )


@pytest.fixture
def result() -> TrainResult:
    return TrainResult(
        plan=BatchPlan(
            global_batch_size=64, local_batch_size=16, accumulation_steps=2, devices_per_node=2
        ),
        stop_reason="completed",
        epochs=3,
        steps=12,
        samples=384,
        test_accuracy=0.75,
        best_test_accuracy=0.75,
        train_loss=0.4,
        wall_time_s=3.3,
        step_time_s=0.01,
        throughput=64.0,
        peak_memory_bytes=10**9,
        learning_rate=0.1,
        epochs_to_target=None,
        resumed_from_step=0,
        weights_digest="d" * 64,
        checkpoint_path="",
        history=(epoch(1), epoch(2), epoch(3)),
    )


def test_the_first_line_is_the_decision_and_what_came_of_it(result: TrainResult) -> None:
    text = describe_training("m.d", result)
    assert text.splitlines()[0] == (
        "**Global batch size 64 on 2 devices (16 per device x 2 passes)**: test accuracy 75.0% "
        "(best 75.0%) after 3 epochs in 3.3 s."
    )
    assert "| 3&ensp;| 0.4000&ensp;|" in text
    assert "the person who started it" in text


def test_figures_and_words_are_logged(store, result: TrainResult) -> None:
    with start_run("t", command="train") as run:
        log_training_page(run, "m.d", result, [step(number) for number in range(1, 13)])
    client = MlflowClient()
    names = {one.path for one in client.list_artifacts(run.run_id, "figures")}
    assert names == {
        "figures/training.png",
        "figures/training.html",
        "figures/gradient_variability.png",
    }
    path = mlflow.artifacts.download_artifacts(f"runs:/{run.run_id}/figures/training.html")
    page = Path(path).read_text(encoding="utf-8")
    assert "Gradient variability" in page
    assert client.get_run(run.run_id).data.tags["mlflow.note.content"].startswith("**Global batch")


def test_without_steps_the_epochs_are_drawn(store, result: TrainResult) -> None:
    with start_run("t", command="train") as run:
        log_training_page(run, "m.d", result)
    names = {one.path for one in MlflowClient().list_artifacts(run.run_id, "figures")}
    assert "figures/gradient_variability.png" in names


def test_many_steps_are_thinned_out_evenly() -> None:
    passed = []
    keeper = StepKeeper(passed.append)
    for first in range(1, 10_001, 100):
        keeper(SimpleNamespace(steps=tuple(step(n) for n in range(first, first + 100))))
    assert len(passed) == 100
    numbers = [one.step for one in keeper.steps]
    assert len(numbers) <= 2000
    assert {b - a for a, b in pairwise(numbers)} == {numbers[0]}
    assert numbers[-1] > 9_990


def test_calls_are_made_in_order_beside_the_caller() -> None:
    seen: list[int] = []
    with Background() as store:
        for number in range(20):
            store.do(seen.append, number)
        store.do(lambda: seen.append(threading.get_ident()))
    assert seen[:20] == list(range(20))
    assert seen[20] != threading.get_ident()


def fail_between(after: list[int]) -> None:
    with Background() as store:
        store.do(lambda: 1 // 0)
        store.do(after.append, 1)


def test_errors_of_calls_and_of_the_block_come_out() -> None:
    after: list[int] = []
    with pytest.raises(ZeroDivisionError, match="division"):
        fail_between(after)
    assert after == [1]
    with pytest.raises(KeyError, match="mine"), Background():
        raise KeyError("mine")


def test_system_metrics_are_logged_when_asked(store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    client = MlflowClient()
    with start_run("t", command="train") as run:
        with system_metrics(run, wanted=False):
            assert not any("SystemMetrics" in one.name for one in threading.enumerate())
        with system_metrics(run, wanted=True):
            for _ in range(200):
                if "system/cpu_utilization_percentage" in client.get_run(run.run_id).data.metrics:
                    break
                threading.Event().wait(0.1)
    metrics = client.get_run(run.run_id).data.metrics
    assert 0 <= metrics["system/system_memory_usage_percentage"] <= 100
    assert not any("SystemMetrics" in one.name for one in threading.enumerate())
