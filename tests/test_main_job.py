"""The main job as people type it: a real `mlflow run .`, a second look, a load without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NAME = "mobilenet_v3_small"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A store of its own, and an environment that is activated as the README says."""
    folder = tmp_path_factory.mktemp("main")
    known = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    return {
        **known,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{known['PATH']}",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "FOLDER": str(folder),
    }


def call(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the project's folder."""
    return subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.fixture(scope="module")
def main_run(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    done = call(
        environment,
        *("mlflow", "run", ".", "-P", f"model={NAME}", "-P", "time_budget=60s"),
        *("-P", f"output_dir={environment['FOLDER']}/out"),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def test_mlflow_7387_mlflow_example_21_mlflow_run_prints_the_decision(
    main_run: subprocess.CompletedProcess[str],
) -> None:
    assert "choice: global batch size" in main_run.stdout
    assert f"registered tula.{NAME}.digits." in main_run.stdout
    assert "Traceback" not in main_run.stderr


def test_the_run_holds_curves_table_and_figure(
    main_run: subprocess.CompletedProcess[str], environment: dict[str, str]
) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(environment["MLFLOW_TRACKING_URI"], environment["MLFLOW_TRACKING_URI"])
    runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
    parents = [run for run in runs if run.data.tags.get("tula.command") == "main"]
    probes = [run for run in runs if run.data.tags.get("tula.command") == "probe"]
    assert [run.info.status for run in parents] == ["FINISHED"]
    assert len(probes) >= 4
    assert {run.data.tags["mlflow.parentRunId"] for run in probes} == {parents[0].info.run_id}
    assert parents[0].data.tags["mlflow.note.content"].splitlines()[0].count("batch")
    names = {one.path for one in client.list_artifacts(parents[0].info.run_id)}
    assert {"profile_table.json", "figures"} <= names
    curves = {name for name in parents[0].data.metrics if name.startswith("step_time_s/")}
    assert {name.rsplit("/", 1)[1] for name in curves} >= {"measured", "predicted"}


def test_recommend_asks_the_registry(
    main_run: subprocess.CompletedProcess[str], environment: dict[str, str]
) -> None:
    done = call(environment, "tula", "recommend", "--model", NAME, "--json")
    assert done.returncode == 0, done.stderr
    choice = json.loads(done.stdout)
    assert f"choice: global batch size {choice['global_batch_size']} " in main_run.stdout


def test_pyfunc_loads_without_torch_this_package_or_pickle(
    main_run: subprocess.CompletedProcess[str], environment: dict[str, str], tmp_path: Path
) -> None:
    code = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "mlflow_tula"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
import mlflow, pandas
others = ("tula.recommender", "tula.link.", "tula.anymodel.")
names = [one.name for one in mlflow.MlflowClient().search_registered_models()]
name, = [one for one in names if not one.startswith(others)]
model = mlflow.pyfunc.load_model(f"models:/{name}@champion")
out = model.predict(pandas.DataFrame({"global_batch_size": [16, 64]}))
assert (out.step_time_s > 0).all()
assert out.step_time_s[1] > out.step_time_s[0]
assert not {"torch", "mlflow_tula"} & {one.split(".")[0] for one in sys.modules}
"""
    safe = {**environment, "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=safe,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_wrong_model_fails_the_project_run(environment: dict[str, str]) -> None:
    done = call(environment, "mlflow", "run", ".", "-P", "model=vgg12")
    assert done.returncode != 0
    assert "Error: unknown model 'vgg12'" in done.stderr


def test_the_example_runs(environment: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "01_profile_and_recommend.py")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "choice: global batch size" in done.stdout


def test_module_entry_point_is_the_command(environment: dict[str, str]) -> None:
    done = call(environment, sys.executable, "-m", "mlflow_tula", "--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tula, version")
