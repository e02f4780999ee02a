"""PostgreSQL, full disks and read-only folders: real ones, where this machine lets us make them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from mlflow_tula.cli.places import check_output
from mlflow_tula.errors import StoreError
from mlflow_tula.files import write_json
from mlflow_tula.outbox import Outbox
from mlflow_tula.registry import find, load, register
from mlflow_tula.runs import start_run
from mlflow_tula.stores import check_store

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks" / "reliability"))

from servers import POSTGRES, fill, may_mount, old_store, postgresql, read_only, small_disk

mounting = pytest.mark.skipif(not may_mount(), reason="needs root, to mount a small disk")


@mounting
def test_a_full_disk_is_one_line_and_leaves_what_was_there(tmp_path):
    with small_disk(tmp_path / "disk", 1) as disk:
        write_json(disk / "table.json", {"rows": [1]})
        fill(disk)
        with pytest.raises(StoreError, match=r"cannot write .*: No space left on device"):
            write_json(disk / "table.json", {"rows": list(range(10_000))})
        with pytest.raises(StoreError, match=r"cannot keep in .*: No space left on device"):
            Outbox(disk / "outbox").keep({"call": "log_text", "run_id": "x", "text": "y" * 9999})
        assert (disk / "table.json").read_text() == '{\n "rows": [\n  1\n ]\n}\n'
        assert sorted(path.name for path in disk.iterdir()) == ["ballast", "outbox", "table.json"]


@mounting
def test_a_full_disk_for_a_new_store(clean_mlflow, monkeypatch):
    with small_disk(clean_mlflow / "disk", 1) as disk:
        fill(disk)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{disk}/mlflow.db")
        with pytest.raises(StoreError, match=r"mlflow\.db: .*full"):
            check_store()
        assert [path.name for path in disk.iterdir()] == ["ballast"]


@mounting
def test_a_read_only_folder(tmp_path, clean_mlflow, monkeypatch):
    with read_only(tmp_path / "locked") as folder:
        with pytest.raises(StoreError, match=r"cannot write below .*: Read-only file system"):
            check_output(folder / "out")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        with pytest.raises(StoreError, match="cannot be written"):
            check_store()


@pytest.mark.parametrize("steps_back", [1, 10])
def test_a_store_of_an_older_mlflow(steps_back, clean_mlflow, monkeypatch):
    path = clean_mlflow / "mlflow.db"
    old_store(path, steps_back)
    before = path.read_bytes()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{path}")
    with pytest.raises(StoreError, match=r"older MLflow than .*`mlflow db upgrade sqlite:///.*`$"):
        check_store()
    assert path.read_bytes() == before


@pytest.mark.long
@pytest.mark.skipif(not POSTGRES, reason="needs the binaries of a PostgreSQL server")
def test_postgresql_from_an_empty_database(clean_mlflow, monkeypatch, table, bundle):
    with postgresql() as uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        words = [sys.executable, "-c", "from mlflow_tula.stores import check_store; check_store()"]
        started = [subprocess.Popen(words, stderr=subprocess.PIPE) for _ in range(4)]
        for one in started:
            _, errors = one.communicate(timeout=300)
            assert one.returncode == 0, errors
        with start_run("r", command="profile") as run:
            run.params({"store": uri})
            done = register(bundle, table=table, run_id=run.run_id)
        assert [one.name for one in find()] == [done.name]
        assert load(done.name) == bundle
        read = MlflowClient().get_run(run.run_id)
        assert read.info.status == "FINISHED"
        assert "hunter2" not in str(read.to_dictionary())
        assert str(clean_mlflow / "mlartifacts") in read.info.artifact_uri
        assert not (clean_mlflow / "mlruns").exists()
    with pytest.raises(StoreError, match="does not answer") as caught:
        check_store()
    assert "hunter2" not in str(caught.value)
