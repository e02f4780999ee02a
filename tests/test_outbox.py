"""What a store that is away is told later: kept in order, sent once, by whoever comes next."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import mlflow
import pandas as pd
import pytest
import sqlalchemy.exc
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric

from mlflow_tula.errors import StoreError
from mlflow_tula.outbox import Outbox, StoreClient, find_outboxes, is_away
from mlflow_tula.runs import Place, start_run
from mlflow_tula.stores import answers, ensure_experiment


@pytest.fixture
def run_id(store) -> str:
    return str(MlflowClient().create_run(ensure_experiment("tula")).info.run_id)


def write_all(client: StoreClient, run_id: str, folder: Path) -> str:
    """Every call that `tula` makes; the id of the nested run."""
    experiment = MlflowClient().get_run(run_id).info.experiment_id
    child = client.create_run(
        experiment, start_time=5, run_name="child", tags={"mlflow.parentRunId": run_id}
    )
    client.log_batch(child.info.run_id, metrics=[Metric("a", 1.0, 7, 3), Metric("a", 2.0, 8, 4)])
    client.set_terminated(child.info.run_id, status="FINISHED")
    folder.mkdir()
    (folder / "file.txt").write_text("text")
    client.log_artifacts(run_id, str(folder))
    (folder / "file.txt").write_text("changed since")
    client.log_text(run_id, "words", "params/long.txt")
    client.log_table(run_id, data=pd.DataFrame({"x": [1, 2]}), artifact_file="table.json")
    dataset = Dataset(name="d", digest="1", source_type="local", source="{}", schema=None)
    client.log_inputs(run_id, [DatasetInput(dataset=dataset, tags=[InputTag("k", "v")])])
    return str(child.info.run_id)


def check_all(run_id: str, text: str) -> None:
    client = MlflowClient()
    parent = client.get_run(run_id)
    children = client.search_runs(
        [parent.info.experiment_id], f"tags.`mlflow.parentRunId` = '{run_id}'"
    )
    assert [child.info.status for child in children] == ["FINISHED"]
    assert children[0].info.start_time == 5
    history = client.get_metric_history(children[0].info.run_id, "a")
    assert [(one.value, one.timestamp, one.step) for one in history] == [(1.0, 7, 3), (2.0, 8, 4)]
    assert mlflow.artifacts.load_text(f"{parent.info.artifact_uri}/file.txt") == text
    assert mlflow.artifacts.load_text(f"{parent.info.artifact_uri}/params/long.txt") == "words"
    shown = mlflow.artifacts.load_dict(f"{parent.info.artifact_uri}/table.json")
    assert shown == {"columns": ["x"], "data": [[1], [2]]}
    assert parent.inputs.dataset_inputs[0].dataset.name == "d"


def test_without_an_outbox_every_call_goes_straight_through(run_id, tmp_path):
    write_all(StoreClient(), run_id, tmp_path / "files")
    check_all(run_id, "text")


def test_what_waits_is_sent_in_order_and_as_it_was(run_id, tmp_path, monkeypatch):
    box = Outbox(tmp_path / "outbox" / run_id)
    client = StoreClient(box)
    monkeypatch.setattr("mlflow_tula.outbox.client.answers", lambda: False)
    local = write_all(client, run_id, tmp_path / "files")
    assert local.startswith("waiting-")
    assert len(box) == 7
    assert not client.flush()
    assert client.get_run(run_id).data.tags == {}
    assert client.search_runs(["0"], "status = 'RUNNING'") == []
    assert [len(one) for one in find_outboxes(tmp_path)] == [7]
    monkeypatch.undo()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    assert client.flush()
    check_all(run_id, "text")
    assert not (tmp_path / "outbox").exists()


def test_a_kill_while_it_is_sent_makes_no_second_run(run_id, tmp_path, monkeypatch):
    box = Outbox(tmp_path / "outbox" / run_id)
    monkeypatch.setattr("mlflow_tula.outbox.client.answers", lambda: False)
    write_all(StoreClient(box), run_id, tmp_path / "files")
    lines = (box.folder / "operations.jsonl").read_bytes()
    untouched = (box.folder / "sent.json").read_text()
    first = json.loads(lines.splitlines()[0])
    (box.folder / "operations.jsonl").write_bytes(json.dumps(first).encode() + b"\n")
    # The run was made, and then the process was killed before it was ticked off.
    tick, box._tick = box._tick, lambda state: None  # type: ignore[method-assign]
    clear, box._clear = box._clear, lambda: None  # type: ignore[method-assign]
    box.send(MlflowClient())
    box._tick, box._clear = tick, clear  # type: ignore[method-assign]
    (box.folder / "operations.jsonl").write_bytes(lines + b'{"call": "log_te')
    (box.folder / "sent.json").write_text(untouched)
    assert box.send(MlflowClient()) == 0
    check_all(run_id, "text")


def test_another_store_is_not_told(run_id, tmp_path, monkeypatch):
    box = Outbox(tmp_path / "outbox" / run_id)
    box.keep({"call": "set_terminated", "run_id": run_id, "status": "FINISHED", "end_time": 1})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/other.db")
    with pytest.raises(StoreError, match=r"waits for the store sqlite:.*mlflow\.db, not .*other"):
        box.send(MlflowClient())


def test_a_call_that_is_refused_does_not_hold_up_the_rest(run_id, tmp_path, caplog):
    box = Outbox(tmp_path / "outbox" / run_id)
    for one in ("0" * 32, run_id):
        box.keep({"call": "set_terminated", "run_id": one, "status": "FINISHED", "end_time": 1})
    assert box.send(MlflowClient()) == 0
    assert MlflowClient().get_run(run_id).info.status == "FINISHED"
    assert "refuses a call (set_terminated)" in caplog.text


def test_refusals_are_not_absences():
    assert is_away(ConnectionError("refused"))
    assert is_away(mlflow.MlflowException("API request to http://h failed with exception x"))
    assert not is_away(mlflow.MlflowException("No such run"))
    assert not is_away(ValueError("Connection"))
    for words, away in (("database is locked", True), ("database or disk is full", False)):
        error = sqlalchemy.exc.OperationalError("INSERT", {}, sqlite3.OperationalError(words))
        wrapped = mlflow.MlflowException(str(error))
        wrapped.__cause__ = error
        assert is_away(wrapped) is away


def be_killed_in(folder: Path, **request: object) -> str:
    """A command that was broken off: its run, as a kill leaves it."""
    place = Place(folder=folder, request=request)
    with start_run("r", command="train", place=place) as run:
        run.metrics({"x": 1.0})
    client = MlflowClient()
    place.remember("train", run.run_id)
    client.update_run(run.run_id, "RUNNING")
    client.set_tag(run.run_id, "tula.pid_started", "1.0")
    return run.run_id


def test_the_same_command_goes_on_with_its_run(store, tmp_path):
    folder = tmp_path / "out"
    earlier = be_killed_in(folder, epochs=3)
    with start_run("r", command="train", place=Place(folder=folder, request={"epochs": 3})) as run:
        assert run.run_id == earlier
        assert run.continued
    assert MlflowClient().get_run(earlier).info.status == "FINISHED"
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"request": {"epochs": 4}},
        {"resume": False},
    ],
)
def test_another_request_has_a_run_of_its_own(change, store, tmp_path):
    folder = tmp_path / "out"
    earlier = be_killed_in(folder, epochs=3)
    place = Place(**{"folder": folder, "request": {"epochs": 3}, **change})
    with start_run("r", command="train", place=place) as run:
        assert run.run_id != earlier


def test_a_run_whose_process_lives_is_not_taken_over(store, tmp_path):
    place = Place(folder=tmp_path / "out", request={})
    with start_run("r", command="train", place=place) as first:
        mlflow.tracking.fluent._active_run_stack.get().clear()
        with start_run("r", command="train", place=place) as second:
            assert second.run_id != first.run_id


class Server:
    """A real `mlflow server` below a folder."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        where = ["--backend-store-uri", f"sqlite:///{self.folder}/server.db", "--workers", "1"]
        where += ["--artifacts-destination", f"{self.folder}/artifacts", "--port", str(self.port)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", *where],
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + 120
        while not answers():
            assert time.monotonic() < deadline, "mlflow server does not start"
            time.sleep(0.2)

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.mark.slow
def test_a_real_server_dies_and_comes_back(clean_mlflow, free_port, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port}")
    server = Server(clean_mlflow, free_port)
    server.start()
    try:
        place = Place(folder=clean_mlflow / "out", request={})
        with start_run("r", command="train", place=place) as run:
            run.metrics({"before": 1.0})
            server.kill()
            began = time.monotonic()
            run.metrics({"meanwhile": 2.0})
            run.client.log_text(run.run_id, "words", "words.txt")
            assert time.monotonic() - began < 60
        assert [len(one) for one in find_outboxes(clean_mlflow)] == [3]
        server.start()
        # The next command in the folder sends what the one before could not.
        with start_run("r", command="train", place=place) as other:
            pass
        assert other.run_id != run.run_id
        done = MlflowClient().get_run(run.run_id)
        assert done.info.status == "FINISHED"
        assert done.data.metrics == {"before": 1.0, "meanwhile": 2.0}
        assert mlflow.artifacts.load_text(f"{done.info.artifact_uri}/words.txt") == "words"
        assert find_outboxes(clean_mlflow) == []
    finally:
        server.kill()
