"""`mlflow run -b tula`: resolves, runs, waits, and ends with the right status and exit code."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import ExecutionException

from mlflow_tula.errors import InvalidInputError, NotRegisteredError, UnknownNameError
from mlflow_tula.plugin.resolve import resolve, workload_slug
from mlflow_tula.recommend import recommend
from mlflow_tula.registry import load
from mlflow_tula.specs import ClusterSpec

pytestmark = pytest.mark.filterwarnings("ignore::mlflow_tula.errors.TulaWarning")

WORKLOAD = {"workload": "vgg11/digits"}
PROJECT = """\
name: demo
entry_points:
  main:
    parameters:
      batch_size: {type: string, default: auto}
      then: {type: string, default: "pass"}
    command: "python train.py {batch_size} {then}"
"""
TRAIN = """\
import pathlib, sys
pathlib.Path("seen.txt").write_text(sys.argv[1] + "\\n" + sys.executable)
exec(sys.argv[2])
"""


@pytest.fixture
def project(registered: str, tmp_path: Path) -> Path:
    """A foreign project that knows nothing of tula."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "MLproject").write_text(PROJECT)
    (folder / "train.py").write_text(TRAIN)
    return folder


def run(project: Path, config: dict | None = None, **parameters: str):
    """As the command line calls it: it never waits for a plugin's backend."""
    return mlflow.projects.run(
        str(project),
        backend="tula",
        backend_config=dict(WORKLOAD if config is None else config),
        parameters=parameters,
        synchronous=False,
    )


def only_run():
    (found,) = MlflowClient().search_runs(["0"])
    return found


def test_auto_becomes_the_recommended_size(project: Path, registered: str) -> None:
    submitted = run(project, batch_size="auto")
    seen, python = (project / "seen.txt").read_text().splitlines()
    choice = recommend(load(registered), cluster=ClusterSpec())
    assert int(seen) == choice.global_batch_size
    assert Path(python).parent == Path(sys.executable).parent
    done = only_run()
    assert done.info.run_id == submitted.run_id
    assert done.info.status == "FINISHED"
    assert done.data.params["batch_size"] == seen
    tags = done.data.tags
    assert (tags["tula.registered_model"], tags["tula.registered_version"]) == (registered, "3")
    assert tags["tula.hardware"] == registered.split(".", 3)[3]
    assert tags["tula.resolved"] == f"batch_size={seen}"
    assert tags["mlflow.project.backend"] == "tula"
    assert tags["tula.pid"] == str(os.getpid())
    assert tags["mlflow.note.content"].startswith(f"**choice: global batch size {seen} ")


def test_a_default_of_auto_counts_and_a_number_stays(project: Path) -> None:
    run(project)
    assert (project / "seen.txt").read_text().split()[0].isdigit()
    run(project, {}, batch_size="48")
    assert (project / "seen.txt").read_text().split()[0] == "48"
    runs = MlflowClient().search_runs(["0"], order_by=["attributes.start_time"])
    assert ["tula.registered_model" in one.data.tags for one in runs] == [True, False]
    assert all("tula.fingerprint" in one.data.tags for one in runs)


@pytest.mark.parametrize(
    ("then", "code", "status"),
    [
        ("sys.exit(3)", "3", "FAILED"),
        ("1 / 0", "1", "FAILED"),
        ("import os; os.kill(os.getpid(), 9)", "-9|137", "KILLED"),
    ],
)
def test_a_failure_is_a_failure(project: Path, then: str, code: str, status: str) -> None:
    with pytest.raises(ExecutionException, match=f"failed with exit code ({code})"):
        run(project, then=then)
    assert only_run().info.status == status


def test_what_cannot_be_resolved_makes_no_run(project: Path) -> None:
    with pytest.raises(ExecutionException, match=r"nothing is registered for vgg11\.cifar100"):
        run(project, {"workload": "vgg11/cifar100"})
    with pytest.raises(ExecutionException, match="needs to know what is trained"):
        run(project, {})
    with pytest.raises(ExecutionException, match="did you mean objective"):
        run(project, {**WORKLOAD, "objectiv": "knee"})
    assert MlflowClient().search_runs(["0"]) == []
    assert not (project / "seen.txt").exists()


def test_an_environment_that_cannot_be_made_leaves_no_run_open(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "conda.yaml").write_text("name: x\ndependencies: [python]\n")
    monkeypatch.setenv("MLFLOW_CONDA_HOME", "/nowhere")
    with pytest.raises(Exception, match=r"(?i)conda"):
        mlflow.projects.run(
            str(project),
            backend="tula",
            backend_config=dict(WORKLOAD),
            env_manager="conda",
            synchronous=False,
        )
    assert only_run().info.status == "FAILED"


def test_every_auto_of_a_decision_is_filled_in(registered: str) -> None:
    names = ("local-batch-size", "devices", "accumulation_steps")
    asked = {**dict.fromkeys(names, "auto"), "lr": "auto"}
    found = resolve(asked, {}, {**WORKLOAD, "objective": "min_time"})
    assert tuple(found.parameters) == names
    size = math.prod(int(found.parameters[name]) for name in names)
    assert found.tags["tula.global_batch_size"] == str(size)


def test_one_device_unless_the_project_can_be_told_of_more(registered: str) -> None:
    alone = resolve({"batch_size": "auto"}, {}, {**WORKLOAD, "objective": "min_time"})
    assert "1 rank" in alone.headline
    both = resolve({"batch_size": "auto"}, {}, {**WORKLOAD, "devices_per_node": [2]})
    assert "2 ranks" in both.headline


def test_limits_of_the_config_reach_the_decision(registered: str) -> None:
    config = {**WORKLOAD, "objective": "min_cost", "usd_per_gb_hour": 0.15, "candidates": [32, 64]}
    assert resolve({"batch_size": "auto"}, {}, config).parameters["batch_size"] in {"32", "64"}
    with pytest.raises(InvalidInputError, match="deadline"):
        resolve({"batch_size": "auto"}, {}, {**WORKLOAD, "epochs": 90, "deadline_s": 0.001})
    with pytest.raises(UnknownNameError, match="unknown objective 'fast'"):
        resolve({"batch_size": "auto"}, {}, {**WORKLOAD, "objective": "fast"})


def test_the_workload_may_stand_in_the_projects_own_parameters(registered: str) -> None:
    defaults = {"model": "vgg11", "dataset": "digits", "batch_size": "auto"}
    assert resolve({}, defaults, {}).parameters["batch_size"].isdigit()
    with pytest.raises(NotRegisteredError, match=r"vgg11\.digits-bf16-adam"):
        resolve({"precision": "bf16", "optimizer": "adam"}, defaults, {})


def test_another_hardware_may_be_named(registered: str) -> None:
    slug = registered.split(".", 3)[3]
    assert resolve({"batch_size": "auto"}, {}, {**WORKLOAD, "hardware": slug}).parameters
    with pytest.raises(NotRegisteredError, match="on hardware 'cray-1'"):
        resolve({"batch_size": "auto"}, {}, {**WORKLOAD, "hardware": "cray-1"})


def test_a_workload_is_a_model_and_a_dataset() -> None:
    assert workload_slug("VGG11/CIFAR100") == workload_slug("vgg11.cifar100") == "vgg11.cifar100"
    for text in ("vgg11", "vgg11/", "/digits", ""):
        with pytest.raises(InvalidInputError, match="model/dataset"):
            workload_slug(text)


@pytest.mark.slow
def test_the_command_line_waits_and_returns_the_exit_code(project: Path) -> None:
    command = [sys.executable, "-m", "mlflow", "run", str(project), "-b", "tula"]
    command += ["-c", '{"workload": "vgg11/digits"}']
    good = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert good.returncode == 0, good.stderr
    assert "choice: global batch size" in good.stderr
    bad = subprocess.run(
        [*command, "-P", "then=sys.exit(4)"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert bad.returncode == 1
    assert "failed with exit code 4" in bad.stderr
    assert "Traceback" not in bad.stderr
    assert sorted(one.info.status for one in MlflowClient().search_runs(["0"])) == [
        "FAILED",
        "FINISHED",
    ]


@pytest.mark.slow
def test_sigterm_ends_the_project_and_the_run(project: Path) -> None:
    command = [sys.executable, "-m", "mlflow", "run", str(project), "-b", "tula"]
    command += ["-c", '{"workload": "vgg11/digits"}', "-P", "then=__import__('time').sleep(300)"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (project / "seen.txt").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    import psutil

    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode != 0
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    assert only_run().info.status == "KILLED"
