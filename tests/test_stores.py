from __future__ import annotations

import os
import socket
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from mlflow_tula import stores
from mlflow_tula.errors import StoreError
from mlflow_tula.stores import check_store, ensure_experiment, masked, store_errors, store_exists
from mlflow_tula.stores.making import making_lock


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://user:pa55@db/x", "postgresql://***@db/x"),
        ("postgresql://user:p@ss/w0rd@db:5432/x", "postgresql://***@db:5432/x"),
        ("cannot open https://me:tok@host:8080/ now", "cannot open https://***@host:8080/ now"),
        ("mysql://db/x?password=hush&ssl=1", "mysql://db/x?password=***&ssl=1"),
        ("sqlite:///mlflow.db", "sqlite:///mlflow.db"),
    ],
)
def test_secrets_never_reach_a_message(text, shown):
    assert masked(text) == shown


@given(st.text("abcXYZ019:%!-_.", min_size=4, max_size=20))
def test_any_password_is_masked(password):
    secret = f"{password}SECRET"
    assert "SECRET" not in masked(f"mssql+pyodbc://sa:{secret}@server:1433/mlflow is down")


def test_a_new_sqlite_store_is_initialised(clean_mlflow):
    assert not store_exists()
    assert check_store() == f"sqlite:///{clean_mlflow / 'mlflow.db'}"
    assert store_exists()
    assert MlflowClient().search_experiments()
    ensure_experiment()
    assert {path.name for path in clean_mlflow.iterdir()} <= {"mlflow.db", "mlruns"}


def test_looking_into_a_store_that_is_not_there_makes_none(clean_mlflow):
    check_store(write=False)
    assert list(clean_mlflow.iterdir()) == []


def test_a_file_uri_names_the_way_out_too(clean_mlflow, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{clean_mlflow}/runs")
    (clean_mlflow / "runs").mkdir()
    with pytest.raises(StoreError, match="mlflow migrate-filestore"):
        check_store()


@pytest.mark.parametrize("uri", ["/absent/path", "file:///absent/path"])
def test_a_folder_that_does_not_exist_is_not_called_a_store(uri, clean_mlflow, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(
        StoreError, match=r"no folder that exists.*sqlite:////absent/path/mlflow.db"
    ):
        check_store()


@pytest.mark.parametrize("below", ["a_file/mlflow.db", "a_folder"])
def test_a_store_that_cannot_be_written(below, clean_mlflow, monkeypatch):
    (clean_mlflow / "a_file").write_text("")
    (clean_mlflow / "a_folder").mkdir()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{clean_mlflow / below}")
    with pytest.raises(StoreError, match=r"cannot be written: .*MLFLOW_TRACKING_URI"):
        check_store()


def test_a_file_that_is_no_database(clean_mlflow, monkeypatch):
    (clean_mlflow / "notes.db").write_text("dear diary, " * 100)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{clean_mlflow / 'notes.db'}")
    with pytest.raises(StoreError, match="file is not a database"):
        check_store()


def test_a_store_of_another_mlflow_version_says_how_to_upgrade(store):
    with closing(sqlite3.connect(store)) as database:
        database.execute("UPDATE alembic_version SET version_num = 'cfd24bdc0731'")
        database.commit()
    with pytest.raises(StoreError, match=r"older MLflow than .* `mlflow db upgrade sqlite:///"):
        check_store()


def test_a_dead_server_fails_at_once_and_keeps_the_password(clean_mlflow, monkeypatch, free_port):
    uri = f"http://me:hunter2@127.0.0.1:{free_port}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(StoreError, match=r"connection refused.*mlflow server") as caught:
        check_store()
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_server_that_accepts_and_says_nothing(clean_mlflow, monkeypatch):
    monkeypatch.setattr(stores, "_CONNECT_TIMEOUT_S", 0.3)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(StoreError, match=r"no answer within 0\.3 s"):
            check_store()


def test_a_dead_database_fails_at_once(clean_mlflow, monkeypatch, free_port):
    uri = f"postgresql+psycopg2://me:hunter2@127.0.0.1:{free_port}/mlflow"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(StoreError, match=r"\*\*\*@127.0.0.1.*does not answer") as caught:
        check_store()
    assert "hunter2" not in str(caught.value)


def test_a_registry_elsewhere_is_checked_as_well(store, monkeypatch, free_port):
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", f"http://127.0.0.1:{free_port}")
    with pytest.raises(StoreError, match="does not answer"):
        check_store()


def test_errors_of_the_store_become_one_line(store):
    pattern = "^cannot count sheep: first line; set MLFLOW_TRACKING_URI [^\n]*$"
    with pytest.raises(StoreError, match=pattern) as caught, store_errors("count sheep"):
        raise MlflowException("first line\nsecond line")
    assert isinstance(caught.value.__cause__, MlflowException)


def test_errors_of_our_own_code_stay_what_they_are():
    with pytest.raises(ZeroDivisionError, match="division"), store_errors("divide"):
        1 / 0  # noqa: B018


def test_an_experiment_is_created_once_beside_the_store(store, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    first = ensure_experiment("My work: 1")
    assert ensure_experiment("My work: 1") == first
    found = MlflowClient().get_experiment(first)
    assert Path(found.artifact_location) == store.parent / "mlartifacts" / "my-work-1"


def test_a_deleted_experiment_says_how_to_bring_it_back(store):
    number = ensure_experiment("gone")
    MlflowClient().delete_experiment(number)
    with pytest.raises(StoreError, match=f"mlflow experiments restore -x {number}"):
        ensure_experiment("gone")


def test_threads_may_check_at_once(clean_mlflow, store):
    failures: list[BaseException] = []

    def check():
        try:
            check_store()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=check) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_quiet_puts_back_what_was_set(monkeypatch):
    name = "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"
    for value in ("false", None):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
        with stores.quiet_mlflow():
            assert os.environ[name] == "true"
        assert os.environ.get(name) == value


def test_processes_with_another_temporary_folder_share_the_lock(tmp_path):
    code = (
        "import sys\n"
        "from mlflow_tula.stores import making\n"
        "making._INITIALISE_TIMEOUT_S = 0.2\n"
        "with making.making_lock(sys.argv[1]):\n"
        "    print('mine')\n"
    )
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    call = [sys.executable, "-c", code, uri]
    elsewhere = {**os.environ, "TMPDIR": str(tmp_path)}
    with making_lock(uri):
        held = subprocess.run(call, env=elsewhere, capture_output=True, text=True, check=False)
    assert "another process has held the lock" in held.stderr
    free = subprocess.run(call, env=elsewhere, capture_output=True, text=True, check=True)
    assert free.stdout == "mine\n"
    assert [one.name for one in tmp_path.iterdir() if one.suffix == ".lock"] == []
