"""Public complaints about MLflow plugins and projects, one test each, named after its thread.

mlflow 7387 and mlflow-example 21 are in test_main_job.py as well, which really runs
`mlflow run . -P model=...`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlflow
import numpy as np
import pandas as pd
import pytest
import yaml
from launch_parts import ranks_left, until
from mlflow import MlflowClient

from mlflow_tula.cli import run
from mlflow_tula.errors import StoreError
from mlflow_tula.registry import register
from mlflow_tula.runs import MAX_PARAM, start_run
from mlflow_tula.stores import check_store, ensure_experiment

pytestmark = pytest.mark.filterwarnings("ignore::mlflow_tula.errors.TulaWarning")
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def activated(store: Path) -> dict[str, str]:
    """An environment that is activated as the README says, with this store."""
    known = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    return {
        **known,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{known['PATH']}",
        "MLFLOW_TRACKING_URI": f"sqlite:///{store}",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }


# --- projects


def test_mlflow_7387_mlflow_example_21_the_first_command_of_the_readme() -> None:
    """A newcomer could run nothing: one line of set-up, then `mlflow run .`, and no conda."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first = text.split("```")[1].splitlines()[1:]
    assert len(first) == 1
    assert first[0].endswith("&& mlflow run . -P model=vgg11")
    project = yaml.safe_load((ROOT / "MLproject").read_text(encoding="utf-8"))
    assert project["databricks_spark_job"] == {}, "runs in the environment it was started in"
    assert not {"conda_env", "python_env", "docker_env"} & set(project)
    assert all("default" in one for one in project["entry_points"]["main"]["parameters"].values())


def test_mlflow_2735_3536_6811_inside_a_project_run(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another experiment, a parameter in another spelling, quoted values: each ended the run."""
    client = MlflowClient()
    project = client.create_run(ensure_experiment("theirs"))
    client.log_param(project.info.run_id, "model", "'vgg11'")
    client.log_param(project.info.run_id, "learning_rate", "1e-1")
    monkeypatch.setenv("MLFLOW_RUN_ID", project.info.run_id)
    with start_run("main vgg11", command="main", experiment="another") as open_run:
        assert "MLFLOW_RUN_ID" not in os.environ
        open_run.params({"model": "vgg11", "learning_rate": 0.1})
    assert open_run.run_id == project.info.run_id
    done = client.get_run(open_run.run_id)
    assert (done.info.status, done.info.run_name) == ("FINISHED", "main vgg11")
    assert done.data.params == {
        "model": "'vgg11'",
        "learning_rate": "1e-1",
        "tula.model": "vgg11",
        "tula.learning_rate": "0.1",
    }
    assert client.get_experiment_by_name("another") is None


@pytest.mark.slow
def test_mlflow_2735_3536_6811_a_real_project_run(store: Path, tmp_path: Path) -> None:
    """`mlflow run .` with all three: another experiment, another spelling, quotes and spaces."""
    given = {
        "model": f"{HERE / 'train_parts.py'}:linear_net",
        "image_size": "8",
        "dataset_size": "200",
        "batch_size": "50",
        "train_epochs": "1",
        "learning_rate": "1e-1",
        "experiment": "somebody's own",
        "output_dir": str(tmp_path / "an output"),
        "device": "cpu",
    }
    words = [word for name, value in given.items() for word in ("-P", f"{name}={value}")]
    done = subprocess.run(
        ["mlflow", "run", ".", "-e", "train", *words],
        cwd=ROOT,
        env=activated(store),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    (only,) = MlflowClient().search_runs(["0"])
    assert only.info.status == "FINISHED"
    assert only.data.params["learning_rate"] == "1e-1"
    assert only.data.params["experiment"] == "'somebody'\"'\"'s own'"
    assert only.data.params["tula.global_batch_size"] == "50"
    assert (tmp_path / "an output").is_dir()


# --- stores

START = """
import os, pathlib, time
import mlflow
from mlflow_tula.stores import check_store, ensure_experiment
pathlib.Path(f"ready-{os.getpid()}").touch()
while not pathlib.Path("go").exists():
    time.sleep(0.001)
check_store()
mlflow.start_run(experiment_id=ensure_experiment("race"))
mlflow.log_metric("x", 1.0)
mlflow.end_run()
"""


@pytest.mark.slow
def test_hydraflow_245_eight_processes_on_an_empty_folder(clean_mlflow: Path) -> None:
    """A sqlite store that several processes create at once: all but one failed."""
    command = [sys.executable, "-c", START]
    processes = [
        subprocess.Popen(command, cwd=clean_mlflow, stderr=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    until = time.monotonic() + 200
    while len(list(clean_mlflow.glob("ready-*"))) < 8 and time.monotonic() < until:
        time.sleep(0.05)
    (clean_mlflow / "go").touch()
    ends = [(process.communicate(timeout=300)[1], process.returncode) for process in processes]
    assert [code for _, code in ends] == [0] * 8, "\n".join(text[-2000:] for text, _ in ends)
    mlflow.set_tracking_uri(f"sqlite:///{clean_mlflow / 'mlflow.db'}")
    assert len(mlflow.search_runs(experiment_names=["race"])) == 8


def test_mlflow_23634_an_old_mlruns_folder(
    clean_mlflow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old ./mlruns breaks every call: name the way out."""
    (clean_mlflow / "mlruns" / "0").mkdir(parents=True)
    (clean_mlflow / "mlruns" / "0" / "meta.yaml").write_text("artifact_location: x\n")
    with pytest.raises(StoreError, match=r"mlflow migrate-filestore --source .* --target sqlite:"):
        check_store()
    with pytest.raises(StoreError, match=r"MLFLOW_TRACKING_URI=sqlite:///mlflow.db"):
        check_store(write=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{clean_mlflow}/mlruns")
    with pytest.raises(StoreError, match="mlflow migrate-filestore"):
        check_store()


def test_kedro_mlflow_69_441_long_parameters(store: Path) -> None:
    """A parameter that is too long costs neither its value nor the run."""
    with start_run("r", command="main") as open_run:
        open_run.params({"sizes": "8," * 2000, "short": 1, "nothing": None})
        open_run.params({"sizes": "8," * 2000, "short": 1})
    done = MlflowClient().get_run(open_run.run_id)
    assert done.info.status == "FINISHED"
    assert len(done.data.params["tula.sizes"]) == MAX_PARAM
    assert "the whole text is the artifact params/sizes.txt" in done.data.params["tula.sizes"]
    assert mlflow.artifacts.load_text(f"runs:/{open_run.run_id}/params/sizes.txt") == "8," * 2000
    assert set(done.data.params) == {"tula.sizes", "tula.short"}


# --- signals


def be_terminated(logged: list[str]) -> None:
    """A SIGTERM that comes while a nested run is being logged."""
    with start_run("r", command="profile") as parent:
        tags = {"mlflow.parentRunId": parent.run_id}
        for status in ("FINISHED", None):
            child = parent.client.create_run(parent.experiment_id, tags=tags)
            logged.append(child.info.run_id)
            if status is not None:
                parent.client.set_terminated(child.info.run_id, status=status)
        logged.append(parent.run_id)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)


def test_skyrl_1516_nested_runs_end_with_theirs(store: Path) -> None:
    logged: list[str] = []
    with pytest.raises(SystemExit, match="143"):
        be_terminated(logged)
    client = MlflowClient()
    statuses = [client.get_run(run_id).info.status for run_id in logged]
    assert statuses == ["FINISHED", "KILLED", "KILLED"]


WAIT = """
import sys, time
from mlflow_tula.runs import start_run
with start_run("victim", command="profile"):
    print("ready", flush=True)
    time.sleep(60)
"""


def run_statuses() -> list[str]:
    runs = mlflow.search_runs(experiment_names=["tula"], output_format="list")
    return [one.info.status for one in runs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "status"), [(signal.SIGTERM, 143, "KILLED"), (signal.SIGKILL, -9, "RUNNING")]
)
def test_skyrl_1516_a_signal_ends_the_run(
    number: signal.Signals,
    code: int,
    status: str,
    store: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """SIGTERM left the run RUNNING for ever; after a SIGKILL nobody but doctor can end it."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAIT], stdout=subprocess.PIPE, text=True, cwd=store.parent
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"
    process.send_signal(number)
    assert process.wait(timeout=60) == code
    assert run_statuses() == [status]
    assert run(["doctor", "--fix"]) == 0
    assert ("closed   victim" in capsys.readouterr().out) == (status == "RUNNING")
    assert run_statuses() == ["KILLED"]


@pytest.mark.slow
def test_skyrl_1516_a_signal_leaves_no_orphan(store: Path, tmp_path: Path) -> None:
    """SIGTERM in the middle of a sweep: the run is KILLED, and no rank of it lives on."""
    command = [sys.executable, "-m", "mlflow_tula", "profile", "--device", "cpu"]
    command += ["--model", f"{HERE / 'train_parts.py'}:slow_net", "--image-size", "8"]
    command += ["--batch-sizes", "8,16,32,64,128", "--world-sizes", "1"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=activated(store), stderr=subprocess.PIPE, text=True
    ) as caller:
        partial = tmp_path / "tula_output"
        assert until(lambda: list(partial.rglob("table.partial.json")), 120)
        assert ranks_left(caller.pid)
        caller.send_signal(signal.SIGTERM)
        caller.communicate(timeout=60)
    assert caller.returncode not in (0, None)
    assert until(lambda: not ranks_left(caller.pid), 20)
    assert set(run_statuses()) <= {"KILLED", "FINISHED"}
    assert "KILLED" in run_statuses()
    assert list(partial.rglob("table.partial.json")), "what was measured is kept"


# --- models

NEWER_RELEASE = """

_older = predict_frame


def predict_frame(*args, **kwargs):
    out = _older(*args, **kwargs)
    return out.assign(step_time_s=2.0 * out["step_time_s"])
"""


def test_mlflow_4061_12377_two_predictors_side_by_side(
    store: Path, table, bundle, remeasured
) -> None:
    """The code of two model versions clashed in one process: each gives its own answers."""
    first = register(bundle, table=table)
    other_table, other = remeasured(seed=1)
    second = register(other, table=other_table)
    # The second release answers twice as much.
    place = MlflowClient().get_model_version_download_uri(second.name, str(second.version))
    script = Path(place) / "artifacts" / "predictors" / "inference.py"
    with script.open("a") as file:
        file.write(NEWER_RELEASE)
    old, new = (mlflow.pyfunc.load_model(one.version_uri) for one in (first, second))
    frame = pd.DataFrame({"global_batch_size": [16, 64]})
    for _ in range(2):
        expected = bundle.predict(frame)["step_time_s"].to_numpy()
        np.testing.assert_allclose(old.predict(frame)["step_time_s"], expected)
        twice = 2 * other.predict(frame)["step_time_s"].to_numpy()
        np.testing.assert_allclose(new.predict(frame)["step_time_s"], twice)
