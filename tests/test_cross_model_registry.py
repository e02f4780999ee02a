"""The cross-model predictor in a real registry, and `tula recommend` where nothing was profiled."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import mlflow
import pandas as pd
import pytest
from mlflow import MlflowClient

from mlflow_tula import registry
from mlflow_tula.cli import run
from mlflow_tula.errors import NotRegisteredError
from mlflow_tula.fit import fit
from mlflow_tula.hardware import detect
from mlflow_tula.specs import HardwareSpec
from mlflow_tula.table import ProfileTable

PROFILES = Path(__file__).parent.parent / "benchmarks" / "results" / "cold_start"


def profile_of(name: str, hardware: HardwareSpec) -> ProfileTable:
    """A real profile, as if it had been taken on `hardware`."""
    table = ProfileTable.from_dict(json.loads((PROFILES / f"{name}-32.json").read_text()))
    return dataclasses.replace(table, hardware=hardware)


@pytest.fixture
def profiled(store: Path) -> HardwareSpec:
    """Three models registered on this machine."""
    hardware = detect()
    for name in ("resnet18", "mobilenet_v3_small", "vgg11"):
        table = profile_of(name, hardware)
        registry.register(fit(table), table=table)
    return hardware


def test_registration_fits_the_cross_model_predictor_once(profiled: HardwareSpec) -> None:
    known, version = registry.load_cross_model(profiled)
    assert (known.models, version) == (("mobilenet_v3_small", "resnet18", "vgg11"), 1)
    assert registry.refit(profiled) == 1  # nothing new
    table = profile_of("shufflenet_v2_x1_0", profiled)
    registry.register(fit(table), table=table)
    known, version = registry.load_cross_model(profiled)
    assert (len(known.models), version) == (4, 2)
    assert registry.cross_model_name(profiled) not in [one.name for one in registry.find()]


def test_two_models_are_too_few(store: Path) -> None:
    hardware = detect()
    for name in ("resnet18", "vgg11"):
        table = profile_of(name, hardware)
        registry.register(fit(table), table=table)
    with pytest.raises(NotRegisteredError, match="has no alias 'champion'"):
        registry.load_cross_model(hardware)


def test_it_is_an_mlflow_model_that_answers_by_itself(profiled: HardwareSpec) -> None:
    model = mlflow.pyfunc.load_model(f"models:/{registry.cross_model_name(profiled)}@champion")
    features = profile_of("resnet34", profiled).features
    assert features is not None
    frame = pd.DataFrame(
        {"local_batch_size": [8, 64], "features": [json.dumps(features.to_dict())] * 2}
    )
    out = model.predict(frame)
    assert (out["step_time_s_lower"] < out["step_time_s"]).all()
    assert (out["step_time_s"] < out["step_time_s_upper"]).all()
    with pytest.raises(Exception, match="features are damaged"):
        model.predict(frame.assign(features="{"))
    with pytest.raises(Exception, match="whole number of at least 1"):
        model.predict(frame.assign(local_batch_size=[0, 8]))


def test_an_unreadable_version_keeps_nobody_from_registering(
    profiled: HardwareSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = registry.cross_model_name(profiled)
    MlflowClient().delete_model_version(name, "1")
    table = profile_of("shufflenet_v2_x1_0", profiled)
    assert registry.register(fit(table), table=table).promoted
    assert registry.load_cross_model(profiled)[1] == 2


@pytest.mark.slow
def test_recommend_falls_through_and_refines(
    profiled: HardwareSpec, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["recommend", "--model", "resnet34"]) == 0
    out, err = capfd.readouterr()
    assert "never profiled here: predicted from 3 other models" in out
    assert "resnet34.digits itself was never profiled here" in err
    assert "--refine" in err
    assert run(["recommend", "--model", "squeezenet1_1", "--refine", "30s"]) == 0
    out, err = capfd.readouterr()
    assert "own probe" in out
    assert "probing local batch size" in err
    assert run(["recommend", "--model", "resnt34"]) == 2
    assert "did you mean resnet34" in capfd.readouterr().err


@pytest.mark.slow
def test_recommend_without_anything_says_how_to_profile(
    store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["recommend", "--model", "resnet34"]) == 2
    assert "profile it with `tula main --model resnet34`" in capfd.readouterr().err


@pytest.mark.slow
def test_fit_cross_model_on_request(
    profiled: HardwareSpec, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["fit", "--cross-model", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["models"] == ["mobilenet_v3_small", "resnet18", "vgg11"]
    assert run(["fit", "--cross-model", "--runs", "all"]) == 2
    assert "leave --table, --runs out" in capfd.readouterr().err


@pytest.mark.slow
def test_the_benchmark_runs_on_a_few_profiles(tmp_path: Path) -> None:
    for name in ("resnet18", "resnet34", "mobilenet_v3_small", "vgg11"):
        (tmp_path / f"{name}-32.json").write_text((PROFILES / f"{name}-32.json").read_text())
    script = Path(__file__).parent.parent / "benchmarks" / "cold_start.py"
    done = subprocess.run(
        [sys.executable, str(script), "--profiles", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "step time, median error" in done.stdout
