"""`tula doctor`: every finding with its way out, and no live run is ever closed."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from mlflow_tula import doctor
from mlflow_tula.cli import run
from mlflow_tula.runs import process_tags


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = run(["doctor", *words])
    out, err = capsys.readouterr()
    return code, out, err


def dead_process() -> dict[str, str]:
    """The tags of a process that ran and died."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = psutil.Process(process.pid).create_time()
    process.communicate(b"\n")
    return {
        "tula.host": socket.gethostname(),
        "tula.pid": str(process.pid),
        "tula.pid_started": f"{started:.3f}",
    }


def of(found: list[doctor.Check], name: str) -> list[doctor.Check]:
    return [one for one in found if one.name == name]


def test_a_sound_installation(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys)
    assert code == 0, out + err
    for word in ("versions", "devices", "fingerprint", "store", "registry", "runs"):
        assert f"ok       {word}: " in out
    assert out.count("ok       plugin: ") == len(doctor.ENTRY_POINTS)
    code, out, _ = call(capsys, "--json")
    document = json.loads(out)
    assert document["closed"] == []
    assert {one["status"] for one in document["checks"]} <= {"ok", "warning"}


def test_an_empty_folder_stays_empty(
    clean_mlflow: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(capsys, "--fix")
    assert code == 0
    assert "does not exist yet" in out
    assert list(clean_mlflow.iterdir()) == []


def test_stale_runs_are_found_and_closed(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    client = MlflowClient()
    dead = client.create_run("0", tags=dead_process(), run_name="dead").info.run_id
    nested = client.create_run("0", tags={"mlflow.parentRunId": dead}).info.run_id
    reused = {**process_tags(), "tula.pid_started": "1.000"}
    again = client.create_run("0", tags={k: str(v) for k, v in reused.items()}).info.run_id
    mine = {k: str(v) for k, v in process_tags().items()}
    alive = client.create_run("0", tags=mine).info.run_id
    others = client.create_run("0", tags={**dead_process(), "tula.host": "elsewhere"}).info.run_id
    unknown = client.create_run("0").info.run_id
    done = client.create_run("0", tags=dead_process()).info.run_id
    client.set_terminated(done, "FINISHED")

    assert {one.run_id for one in doctor.stale_runs()} == {dead, nested, again}
    code, out, _ = call(capsys)
    assert code == 0
    assert "RUNNING runs whose process has died: 3 (" in out
    assert "-> `tula doctor --fix` closes them" in out
    assert client.get_run(dead).info.status == "RUNNING"

    code, out, _ = call(capsys, "--fix")
    assert code == 0
    assert "closed   dead" in out
    assert "no stale runs" in out
    for run_id in (dead, nested, again):
        closed = client.get_run(run_id)
        assert closed.info.status == "KILLED"
        assert closed.data.tags["tula.closed_by"].startswith("tula doctor")
    for run_id in (alive, others, unknown):
        assert client.get_run(run_id).info.status == "RUNNING"
    assert client.get_run(done).info.status == "FINISHED"


def test_more_experiments_and_runs_than_a_page(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = MlflowClient()
    tags = dead_process()
    for number in range(3):
        experiment = client.create_experiment(f"one {number}", artifact_location=str(store.parent))
        for _ in range(2):
            client.create_run(experiment, tags=tags)
    monkeypatch.setattr(doctor, "_PAGE", 1)
    assert len(doctor.stale_runs()) == 6


def test_a_process_is_alive_only_as_itself() -> None:
    own = str(os.getpid())
    started = f"{psutil.Process().create_time():.3f}"
    assert doctor.is_alive(own, started)
    assert doctor.is_alive(own, None)
    assert not doctor.is_alive(own, "1.0")
    # What cannot be told counts as alive.
    assert doctor.is_alive(None, None)
    assert doctor.is_alive("", "x")
    assert doctor.is_alive(own, "x")
    gone = dead_process()
    assert not doctor.is_alive(gone["tula.pid"], gone["tula.pid_started"])


def test_an_outdated_schema_names_the_migration(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(sqlite3.connect(store)) as database:
        database.execute("UPDATE alembic_version SET version_num = '451aebb31d03'")
        database.commit()
    code, out, _ = call(capsys)
    assert code == 1
    assert "error    store: " in out
    assert f"mlflow db upgrade sqlite:///{store}" in out
    assert "Traceback" not in out


def test_an_old_file_store_and_a_dead_server(
    clean_mlflow: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    free_port: int,
) -> None:
    (clean_mlflow / "mlruns" / "0").mkdir(parents=True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{clean_mlflow}/mlruns")
    code, out, _ = call(capsys)
    assert code == 1
    assert "mlflow migrate-filestore" in out
    code, out, _ = call(capsys, "--tracking-uri", f"http://127.0.0.1:{free_port}")
    assert code == 1
    assert "does not answer (connection refused)" in out


def test_an_alias_of_a_deleted_version_is_an_error(
    registered: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(sqlite3.connect(store)) as database:
        database.execute("UPDATE registered_model_aliases SET version = 17")
        database.commit()
    code, out, _ = call(capsys)
    assert code == 1
    assert "points to version 17, which was deleted" in out


def test_missing_and_foreign_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    point = doctor.importlib.metadata.EntryPoint

    def fake(*, group: str) -> list[doctor.importlib.metadata.EntryPoint]:
        ours = point("tula", "mlflow_tula.plugin.run_context:HardwareContext", group)
        return {
            "mlflow.run_context_provider": [],
            "mlflow.project_backend": [ours, point("tula", "other.package:Backend", group)],
            "mlflow.model_evaluator": [point("tula", "mlflow_tula.plugin.nothing:X", group)],
        }.get(group, [ours])

    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", fake)
    found = list(doctor.check_entry_points())
    assert [one.status for one in found] == ["error", "warning", "error", "ok", "ok"]
    assert "finds no mlflow.run_context_provider" in found[0].message
    assert "other.package:Backend" in found[1].message
    assert "cannot be loaded" in found[2].message
    assert all(one.way_out for one in found[:3])


def test_a_requirement_that_is_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor._version
    wrong = {"click": "1.0", "rich": None}
    monkeypatch.setattr(doctor, "_version", lambda name: wrong.get(name, real(name)))
    errors = [one for one in doctor.check_versions() if one.status == "error"]
    assert sorted(one.message.split()[0] for one in errors) == ["click", "rich"]
    assert all("pip install" in one.way_out for one in errors)


def test_python_of_another_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    (found,) = doctor.check_environment()
    assert found.status == "warning"
    assert "activate" in found.way_out


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TULA_DEVICE", "toaster")
    (found,) = of(doctor.examine(), "devices")
    assert found.status == "error"
    assert "toaster" in found.message
