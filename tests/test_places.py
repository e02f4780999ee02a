from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from mlflow_tula.cli.places import check_output, work_may_fail
from mlflow_tula.errors import StoreError, WorkFailedError
from mlflow_tula.files import remove_partial, write_json


def test_a_folder_that_can_be_made_is_not_made_yet(tmp_path):
    check_output(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write below /proc"):
        check_output(Path("/proc/x"))
    with pytest.raises(StoreError, match=r"cannot write below .*file"):
        check_output(tmp_path / "file" / "b")


def test_a_store_that_fails_is_a_failure_of_the_work_once_it_has_begun():
    with pytest.raises(StoreError, match=r"^full$"), work_may_fail():
        raise StoreError("full")
    with pytest.raises(WorkFailedError, match="what was measured is kept"):
        begin_and_fail()


def begin_and_fail():
    with work_may_fail() as work:
        work.then(lambda event: None)(SimpleNamespace(kind="probe_started"))
        raise StoreError("full")


def test_leftovers_of_killed_writers_go(tmp_path):
    target = tmp_path / "table.json"
    write_json(target, {})
    (tmp_path / ".table.json.abc").write_text("{")
    (tmp_path / ".other.json.abc").write_text("{")
    remove_partial(target)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.json.abc", "table.json"]
