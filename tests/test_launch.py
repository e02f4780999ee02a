from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launch_parts import until

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.launch import RankFailedError, RankGroup, launch, rank_environment
from mlflow_tula.launch.failures import memory_kills
from mlflow_tula.launch.ranks import GROUP_VARIABLE

HERE = Path(__file__).parent
KILLED = "oom" if memory_kills() is None else "failed"
"""Where the kernel counts the processes that it kills for memory, a kill of ours is none."""


def _left(identity: str) -> list[int]:
    """Processes of a group that still run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(GROUP_VARIABLE) == identity:
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def test_the_environment_of_ranks_is_clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MLFLOW_RUN_ID", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "MASTER_ADDR"):
        monkeypatch.setenv(name, "from outside")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///x.db")
    environment = rank_environment(tmp_path, "abc", threads=3, additions={"EXTRA": "1"})
    assert not {"MLFLOW_RUN_ID", "RANK", "TORCHELASTIC_RUN_ID", "MASTER_ADDR"} & set(environment)
    assert environment["MLFLOW_TRACKING_URI"] == "sqlite:///x.db"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["OMP_WAIT_POLICY"] == "passive"
    assert environment["EXTRA"] == "1"
    assert str(HERE) in environment["PYTHONPATH"].split(os.pathsep)


def test_two_ranks_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "the parent's run")
    results = launch("launch_parts", num_ranks=2, timeout_s=120, environment={"EXTRA": "yes"})
    assert [result["rank"] for result in results] == [0, 1]
    assert {result["world"] for result in results} == {"2"}
    assert {result["mlflow"] for result in results} == {None}
    assert {result["extra"] for result in results} == {"yes"}
    assert {result["policy"] for result in results} == {"passive"}
    assert str(HERE) in results[0]["path"]


def test_wrong_requests_are_refused_before_anything_starts() -> None:
    with pytest.raises(InvalidInputError, match="num_ranks must be a whole number"):
        RankGroup("launch_parts", num_ranks=0)
    with pytest.raises(InvalidInputError, match="2 nodes need master as host:port"):
        RankGroup("launch_parts", nodes=2)
    with pytest.raises(InvalidInputError, match="call start"):
        RankGroup("launch_parts").wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "status", "kind", "words"),
    [
        ("raise", "oom", "MemoryError", "rank 1: MemoryError: no room on the moon"),
        ("input", "failed", "InvalidInputError", "rank 1: the rule, the value, the way out"),
        ("kill", KILLED, "SIGKILL", "rank 1: killed by SIGKILL"),
        ("exit", "failed", "exit", "rank 1: ended with exit code 7"),
    ],
)
def test_a_failing_rank_is_named_and_the_others_are_stopped(
    how: str, status: str, kind: str, words: str
) -> None:
    group = RankGroup("launch_parts", [how], num_ranks=2)
    with group, pytest.raises(RankFailedError, match=words) as caught:
        group.wait(timeout_s=120)
    assert (caught.value.failure.status, caught.value.failure.kind) == (status, kind)
    assert caught.value.failure.rank == 1
    assert not _left(group.identity)
    assert not group.folder.exists()


@pytest.mark.slow
def test_a_group_that_hangs_is_ended_in_time_with_its_grandchildren() -> None:
    group = RankGroup("launch_parts", ["child"], num_ranks=2)
    with group:
        assert until(lambda: len(_left(group.identity)) >= 5, 60)
        with pytest.raises(RankFailedError, match="no answer within 1 s"):
            group.wait(timeout_s=1)
        assert not _left(group.identity)


@pytest.mark.slow
def test_a_module_that_does_not_exist_says_so() -> None:
    with pytest.raises(RankFailedError, match="No module named"):
        launch("no_such_module_anywhere", timeout_s=120)


@pytest.mark.slow
def test_nothing_outlives_a_caller_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "caller.py"
    script.write_text(
        "import sys, time\n"
        f"sys.path.insert(0, {str(HERE)!r})\n"
        "from mlflow_tula.launch import RankGroup\n"
        "group = RankGroup('launch_parts', ['hang'], num_ranks=2).start()\n"
        "print(group.identity, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True
    ) as caller:
        assert caller.stdout is not None
        identity = caller.stdout.readline().strip()
        assert until(lambda: len(_left(identity)) >= 3, 60)
        time.sleep(2)  # the ranks arm their watch when their module is imported
        caller.kill()
    assert until(lambda: not _left(identity), 30)
