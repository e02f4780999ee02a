"""Drift: a run's own step times against the interval that was predicted for it."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from mlflow import MlflowClient

from mlflow_tula.cli import run
from mlflow_tula.errors import InvalidInputError, NotRegisteredError
from mlflow_tula.monitor import monitor
from mlflow_tula.registry import load

pytestmark = pytest.mark.filterwarnings("ignore::mlflow_tula.errors.TulaWarning")


def predicted(name: str, **configuration: int) -> pd.Series:
    return load(name).predict(pd.DataFrame([{"global_batch_size": 64, **configuration}])).iloc[0]


def training(
    times: list[float], *, metric: str = "step/step_time_s", tags=None, memory=None, **params: int
) -> str:
    client = MlflowClient()
    run_id = client.create_run("0", tags=tags).info.run_id
    for name, value in params.items():
        client.log_param(run_id, f"tula.{name}", value)
    for step, value in enumerate(times):
        client.log_metric(run_id, metric, value, step=step)
    if memory is not None:
        client.log_metric(run_id, "peak_memory_bytes", memory)
    return str(run_id)


def tags_of(name: str) -> dict[str, str]:
    _, model, dataset, hardware = name.split(".", 3)
    return {"tula.workload": f"{model}.{dataset}", "tula.hardware": hardware}


@pytest.mark.parametrize(("factor", "drift"), [(1.0, "within"), (1.5, "slower"), (0.5, "faster")])
def test_the_median_decides_and_warming_up_does_not_count(
    registered: str, factor: float, drift: str
) -> None:
    row = predicted(registered)
    steady = row["step_time_s"] * factor
    times = [20 * steady] * 3 + [steady] * 6 + [50 * steady]
    report = monitor(training(times, tags=tags_of(registered), global_batch_size=64))
    assert report.drift == drift
    assert report.ratio == pytest.approx(factor)
    assert (report.lower_s, report.upper_s) == (row["step_time_s_lower"], row["step_time_s_upper"])
    tags = MlflowClient().get_run(report.run_id).data.tags
    assert tags["tula.drift"] == drift
    assert float(tags["tula.drift_ratio"]) == pytest.approx(factor, rel=1e-3)
    assert str(report).startswith(f"{drift}: ")


def test_a_change_in_the_middle_is_seen(registered: str) -> None:
    fast = predicted(registered)["step_time_s"]
    report = monitor(training([fast] * 30 + [2 * fast] * 210, tags=tags_of(registered),
                              global_batch_size=64))  # fmt: skip
    assert (report.drift, report.num_steps) == ("slower", 200)


def test_the_runs_own_devices_and_memory_are_compared(registered: str) -> None:
    row = predicted(registered, devices_per_node=2)
    run_id = training(
        [row["step_time_s"]],
        tags=tags_of(registered),
        memory=3 * row["peak_memory_bytes_upper"],
        global_batch_size=64,
        devices_per_node=2,
    )
    report = monitor(run_id, tag=False)
    assert (report.drift, report.memory_drift) == ("within", "more")
    assert "more memory than predicted" in str(report)
    assert "tula.drift" not in MlflowClient().get_run(run_id).data.tags


def test_the_version_that_was_asked_is_the_one_compared_with(registered: str) -> None:
    mine = {"tula.registered_model": registered, "tula.registered_version": "1"}
    report = monitor(training([1.0], tags=mine, global_batch_size=64))
    assert report.predictor == f"models:/{registered}/1"
    source = f"models:/{registered}@champion (version 2)"
    run_id = training([1.0], global_batch_size=64, source=source)
    assert monitor(run_id).predictor == f"models:/{registered}/2"


def test_epochs_will_do_where_steps_are_not_logged(registered: str) -> None:
    run_id = training([0.5], metric="step_time_s", tags=tags_of(registered), global_batch_size=64)
    assert monitor(run_id).num_steps == 1


def test_what_is_missing_is_named(registered: str) -> None:
    mine = tags_of(registered)
    with pytest.raises(InvalidInputError, match="there is no run 'nothing'"):
        monitor("nothing")
    with pytest.raises(InvalidInputError, match="no step time yet"):
        monitor(training([], tags=mine, global_batch_size=64))
    with pytest.raises(InvalidInputError, match="log the batch size"):
        monitor(training([1.0], tags=mine))
    with pytest.raises(NotRegisteredError, match="does not say what it trains"):
        monitor(training([1.0], global_batch_size=64))
    other = {**mine, "tula.workload": "resnet18.digits"}
    with pytest.raises(NotRegisteredError, match="has no alias 'champion'"):
        monitor(training([1.0], tags=other, global_batch_size=64))


def test_the_command(registered: str, capsys: pytest.CaptureFixture[str]) -> None:
    slow = 2 * predicted(registered)["step_time_s"]
    run_id = training([slow], tags=tags_of(registered), global_batch_size=64)
    assert run(["monitor", run_id]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("slower: ")
    assert "profile again" in err
    assert run(["monitor", run_id, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ratio"] == pytest.approx(2.0)
    assert run(["monitor", "nothing"]) == 2
    assert "there is no run" in capsys.readouterr().err
    assert run(["monitor", run_id, "--level", "2"]) == 2


def test_without_a_run_it_is_the_newest_training(
    registered: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["monitor"]) == 2
    assert "no run of `tula train` is in this store" in capsys.readouterr().err
    usual = predicted(registered)["step_time_s"]
    mine = {**tags_of(registered), "tula.command": "train"}
    training([usual], tags=mine, global_batch_size=64)
    newest = training([2 * usual], tags=mine, global_batch_size=64)
    training([usual], tags=tags_of(registered), global_batch_size=64)  # not of `tula train`
    assert run(["monitor", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["run_id"], answer["drift"]) == (newest, "slower")
