"""What MLflow finds of tula, and that no fault of ours breaks or slows `import mlflow`."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path

import mlflow
import pytest

import mlflow_tula
from mlflow_tula.doctor import ENTRY_POINTS
from mlflow_tula.hardware import detect
from mlflow_tula.plugin import run_context

PACKAGE = Path(mlflow_tula.__file__).parent


def python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter; a package in `folder` comes before the installed one."""
    return subprocess.run(
        [sys.executable, "-W", "always", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        timeout=120,
    )


@pytest.mark.parametrize("group", ENTRY_POINTS)
def test_entry_points_are_found_and_load(group: str) -> None:
    (point,) = importlib.metadata.entry_points(group=group, name=ENTRY_POINTS[group])
    # Behind the guard of the plugin, which turns every fault into an ImportError.
    assert point.value.startswith("mlflow_tula.plugin:")
    assert point.load()


def test_a_run_carries_the_hardware_and_no_process(store: Path) -> None:
    where = mlflow.create_experiment("mine", artifact_location=str(store.parent / "mine"))
    with mlflow.start_run(experiment_id=where, tags={"mine": "too"}) as run:
        pass
    tags = mlflow.get_run(run.info.run_id).data.tags
    assert tags["tula.fingerprint"] == detect().fingerprint
    assert tags["tula.hardware"] == detect().slug
    assert tags["tula.device_type"] == detect().device_type
    assert tags["mine"] == "too"
    # A run that another process resumes keeps its tags: `tula doctor` would close a live one.
    assert "tula.pid" not in tags


def test_hardware_that_cannot_be_read_costs_the_tags_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TULA_DEVICE", "toaster")
    provider = run_context.HardwareContext()
    assert provider.in_context()
    assert provider.tags() == {}
    assert "no hardware tags" in caplog.text


def test_importing_mlflow_loads_little_of_tula(tmp_path: Path) -> None:
    code = """
import json, sys
import mlflow
print(json.dumps([name for name in sys.modules if name.split(".")[0] in ("mlflow_tula", "torch")]))
"""
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    assert "mlflow_tula.plugin.run_context" in loaded
    assert "torch" not in loaded
    heavy = (
        "registry",
        "tracking",
        "runs",
        "plots",
        "hardware",
        "versions",
        "evaluation",
        "doctor",
    )
    assert not {f"mlflow_tula.{name}" for name in heavy} & set(loaded)
    assert "mlflow_tula.plugin.backend" not in loaded
    assert "Failure attempting to register" not in done.stderr


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        ("specs.py", "raise RuntimeError('broken')"),
        ("table.py", "this is no Python"),
        ("plugin/run_context.py", "import no_such_module"),
        ("plugin/run_context.py", "this is no Python"),
        ("plugin/run_context.py", "raise SystemExit(3)"),
    ],
)
def test_a_broken_tula_does_not_break_mlflow(tmp_path: Path, broken: str, fault: str) -> None:
    copy = tmp_path / "mlflow_tula"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    path = copy / broken
    path.write_text(f"{path.read_text()}\n{fault}\n")
    code = "import mlflow, mlflow.models, mlflow.deployments; print(mlflow.__version__)"
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == mlflow.__version__
    assert 'Failure attempting to register context provider "tula"' in done.stderr


@pytest.mark.parametrize("fault", ["this is no Python", "raise RuntimeError('broken')"])
def test_a_fault_in_every_plugin_module_does_not_break_mlflow(tmp_path: Path, fault: str) -> None:
    copy = tmp_path / "mlflow_tula"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    modules = [path for path in (copy / "plugin").glob("*.py") if path.name != "__init__.py"]
    assert len(modules) >= 5
    for path in [*modules, copy / "serving" / "app.py"]:
        path.write_text(f"{path.read_text()}\n{fault}\n")
    code = """
import importlib.metadata, mlflow, mlflow.models, mlflow.projects, mlflow.deployments
from mlflow_tula.doctor import ENTRY_POINTS

for group, name in ENTRY_POINTS.items():
    (point,) = importlib.metadata.entry_points(group=group, name=name)
    try:
        point.load()
    except ImportError as error:
        print("ImportError:", error)
mlflow.set_tracking_uri("sqlite:///mlflow.db")
with mlflow.start_run() as run:
    mlflow.log_metric("loss", 1.0)
print(mlflow.get_run(run.info.run_id).info.status)
"""
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "FINISHED"
    assert sum("cannot be loaded" in line for line in lines) == 5, done.stdout


def test_a_broken_app_is_one_line_of_mlflow_server(tmp_path: Path) -> None:
    copy = tmp_path / "mlflow_tula"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    path = copy / "serving" / "app.py"
    path.write_text(f"{path.read_text()}\nraise RuntimeError('broken')\n")
    words = ["server", "--app-name", "tula", "--backend-store-uri", "sqlite:///mlflow.db"]
    done = python(f"from mlflow.cli import cli; cli({words!r})", tmp_path)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "Error: mlflow_tula.serving.app cannot be loaded: RuntimeError: broken" in done.stderr
