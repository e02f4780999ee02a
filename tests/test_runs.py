from __future__ import annotations

import os
import signal
import socket
import subprocess
import time

import mlflow
import pytest
from mlflow import MlflowClient

from mlflow_tula.errors import StoreError
from mlflow_tula.runs import git_tags, start_run
from mlflow_tula.stores import ensure_experiment


def finished(run):
    return MlflowClient().get_run(run.run_id)


def test_a_run_ends_finished_in_its_own_experiment(store):
    with start_run("a run", command="profile", tags={"colour": "blue", "none": None}) as run:
        assert mlflow.active_run().info.run_id == run.run_id
    done = finished(run)
    assert done.info.status == "FINISHED"
    assert done.info.run_name == "a run"
    assert MlflowClient().get_experiment(done.info.experiment_id).name == "tula"
    tags = done.data.tags
    assert tags["tula.host"] == socket.gethostname()
    assert tags["tula.pid"] == str(os.getpid())
    assert tags["tula.command"] == "profile"
    assert tags["colour"] == "blue"
    assert "none" not in tags
    assert mlflow.active_run() is None


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("broken"), "FAILED"),
        (KeyboardInterrupt("stop"), "KILLED"),
        (SystemExit(143), "KILLED"),
        (SystemExit(2), "FAILED"),
        (SystemExit(0), "FINISHED"),
    ],
)
def test_an_error_sets_the_status_and_goes_on(error, status, store):
    with pytest.raises(type(error), match=str(error)), start_run("r", command="main") as run:
        raise error
    assert finished(run).info.status == status


def test_an_interrupted_run_that_kept_its_numbers_is_killed(store):
    with start_run("r", command="profile") as run:
        run.interrupted = True
    assert finished(run).info.status == "KILLED"


def be_terminated():
    """A command that gets a SIGTERM in the middle of its work."""
    with start_run("r", command="main"):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)


def test_a_sigterm_unwinds_the_block(store):
    with pytest.raises(SystemExit, match="143"):
        be_terminated()
    assert list(mlflow.search_runs(experiment_names=["tula"])["status"]) == ["KILLED"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_somebody_elses_signal_handler_stays(store):
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
    try:
        with start_run("r", command="main"):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [1]


def test_a_name_that_somebody_chose_is_kept(store, monkeypatch):
    project = MlflowClient().create_run(ensure_experiment("theirs"), run_name="My Run")
    monkeypatch.setenv("MLFLOW_RUN_ID", project.info.run_id)
    with start_run("main vgg11", command="main") as run:
        pass
    assert finished(run).info.run_name == "My Run"


def test_the_users_experiment_is_respected(store, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "from the environment")
    with start_run("r", command="main") as run:
        pass
    found = MlflowClient().get_experiment(finished(run).info.experiment_id)
    assert found.name == "from the environment"


def test_below_an_active_run_a_nested_one_is_made(store):
    with mlflow.start_run(experiment_id=ensure_experiment("mine")) as parent:
        with start_run("child", command="profile") as run:
            pass
        assert mlflow.active_run().info.run_id == parent.info.run_id
    assert finished(run).data.tags["mlflow.parentRunId"] == parent.info.run_id


def test_a_run_that_is_gone_is_a_store_error(store, monkeypatch):
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    with pytest.raises(StoreError, match="cannot open a run"), start_run("r", command="main"):
        pass


def test_a_parameter_that_changes_keeps_its_first_value(store, caplog):
    with start_run("r", command="main") as run:
        run.params({"epochs": 3})
        run.params({"epochs": 4})
    assert finished(run).data.params["tula.epochs"] == "3"
    assert "tula.epochs stays 3" in caplog.text


def test_secrets_are_not_logged(store):
    with start_run("r", command="main") as run:
        run.params({"tracking_uri": "https://me:hunter2@host"})
    assert "hunter2" not in str(finished(run).data.params)


def test_thousands_of_values_odd_names_and_no_numbers(store):
    with start_run("r", command="main") as run:
        run.log(metrics=[("a (b) = 50 %", float(step), step) for step in range(2500)])
        run.metrics({"x": float("nan"), "y": float("inf"), "z": None, "word": "no", "ok": True})
    done = finished(run)
    assert set(done.data.metrics) == {"a _b_ _ 50 _", "ok"}
    assert len(MlflowClient().get_metric_history(run.run_id, "a _b_ _ 50 _")) == 2500


def test_a_long_description_is_cut(store):
    with start_run("r", command="main") as run:
        run.describe("**first**\n" + "line\n" * 2000)
    note = finished(run).data.tags["mlflow.note.content"]
    assert note.startswith("**first**")
    assert note.endswith("(cut)")
    assert len(note) <= 5000


def test_git_tags_name_the_commit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert git_tags() == {}
    commands = (
        "git init -q",
        "git -c user.name=n -c user.email=e commit -q --allow-empty -m first",
    )
    for command in commands:
        subprocess.run(command.split(), check=True)
    tags = git_tags()
    assert len(tags["mlflow.source.git.commit"]) == 40
    assert tags["tula.git.dirty"] is False
