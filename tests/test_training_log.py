from __future__ import annotations

import pytest
from mlflow import MlflowClient

from mlflow_tula.errors import StoreError
from mlflow_tula.runs import start_run
from mlflow_tula.tracking import training_log
from mlflow_tula.tracking.training_log import TrainingLogger
from mlflow_tula.training.facts import EpochRecord, StepRecord, TrainEvent


def history(run, name):
    return [(m.step, m.value) for m in MlflowClient().get_metric_history(run.run_id, name)]


def test_every_value_arrives_once_and_in_order(store):
    with start_run("t", command="train") as run, TrainingLogger(run, interval_s=0.05) as logger:
        for step in range(300):
            logger.log({"loss": 1.0 / (step + 1)}, step=step)
    assert history(run, "loss") == [(step, 1.0 / (step + 1)) for step in range(300)]


def test_train_events_become_step_and_epoch_metrics(store):
    steps = tuple(
        StepRecord(
            step=number,
            epoch=1,
            train_loss=0.5,
            learning_rate=0.1,
            gradient_norm=None,
            gradient_variability=0.2,
            step_time_s=0.01,
        )
        for number in (1, 2)
    )
    record = EpochRecord(
        epoch=1,
        step=2,
        samples=64,
        train_loss=0.4,
        test_loss=0.3,
        test_accuracy=0.9,
        learning_rate=0.1,
        step_time_s=0.01,
        epoch_time_s=1.0,
        evaluation_time_s=0.1,
        throughput=64.0,
        peak_memory_bytes=10**9,
    )
    with start_run("t", command="train") as run, TrainingLogger(run) as logger:
        common = {"step": 2, "total_steps": 2, "epoch": 1, "elapsed_s": 1.0}
        logger(TrainEvent(kind="started", **common))
        logger(TrainEvent(kind="steps", steps=steps, **common))
        logger(TrainEvent(kind="epoch", record=record, **common))
    assert history(run, "step/train_loss") == [(1, 0.5), (2, 0.5)]
    assert history(run, "test_accuracy") == [(2, 0.9)]
    assert history(run, "epoch") == [(2, 1.0)]
    assert history(run, "peak_memory_bytes") == [(2, 1e9)]
    assert "step/gradient_norm" not in MlflowClient().get_run(run.run_id).data.metrics


def test_a_store_that_fails_costs_nothing_and_catches_up(store, monkeypatch, caplog):
    down = [True]
    real = training_log.log_batch

    def shaky(*args, **kwargs):
        if down[0]:
            raise StoreError("the server is away")
        real(*args, **kwargs)

    monkeypatch.setattr(training_log, "log_batch", shaky)
    with start_run("t", command="train") as run, TrainingLogger(run, interval_s=60) as logger:
        logger.log({"loss": 3.0}, step=1)
        assert not logger.flush()
        assert not logger.flush()
        logger.log({"loss": 2.0}, step=2)
        down[0] = False
    assert history(run, "loss") == [(1, 3.0), (2, 2.0)]
    assert caplog.text.count("training goes on, but is not logged") == 1


def test_a_store_that_stays_away_is_told_at_the_end(store, monkeypatch, caplog):
    def away(*args, **kwargs):
        raise StoreError("the server is away")

    monkeypatch.setattr(training_log, "log_batch", away)
    monkeypatch.setattr(training_log, "_MOST_WAITING", 5)
    with start_run("t", command="train") as run, TrainingLogger(run, interval_s=60) as logger:
        for step in range(9):
            logger.log({"loss": 1.0}, step=step)
        assert logger.dropped == 4
    assert "9 values of this training were not logged" in caplog.text


def diverge():
    """A training that logs one value and breaks."""
    with start_run("t", command="train") as run, TrainingLogger(run, interval_s=60) as logger:
        logger.log({"loss": 9.0}, step=1)
        raise RuntimeError(run.run_id)


def test_an_error_in_training_still_sends_what_there_is(store):
    with pytest.raises(RuntimeError, match=r"^[0-9a-f]{32}$") as caught:
        diverge()
    run_id = str(caught.value)
    assert MlflowClient().get_metric_history(run_id, "loss")[0].value == 9.0
    assert MlflowClient().get_run(run_id).info.status == "FAILED"
