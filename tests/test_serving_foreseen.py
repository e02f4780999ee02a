"""What is served for a workload that was never profiled on a hardware."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from test_cross_model_registry import profile_of

from mlflow_tula import registry
from mlflow_tula.errors import NotRegisteredError, StoreError
from mlflow_tula.fit import fit
from mlflow_tula.hardware import detect
from mlflow_tula.serving import app, catalogue, champions
from mlflow_tula.serving.catalogue import Catalogue
from mlflow_tula.serving.recommender import Recommender
from mlflow_tula.specs import HardwareSpec

pytestmark = pytest.mark.filterwarnings("ignore::mlflow_tula.errors.TulaWarning")


@pytest.fixture
def hardware(store: Path) -> HardwareSpec:
    """Three models are known here; resnet34 was profiled on another machine alone."""
    here = detect()
    for name in ("resnet18", "mobilenet_v3_small", "vgg11"):
        table = profile_of(name, here)
        registry.register(fit(table), table=table)
    elsewhere = dataclasses.replace(here, device_name="Another Device")
    for name in ("resnet34",):
        table = profile_of(name, elsewhere)
        registry.register(fit(table), table=table)
    return here


def test_the_recommender_falls_through_to_the_cross_model_predictor(
    hardware: HardwareSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    recommender = Recommender()
    workload = profile_of("resnet34", hardware).workload
    dataset = workload.slug.partition(".")[2]
    question = {"model": "resnet34", "dataset": dataset, "hardware": hardware.slug}
    (row,) = recommender.answer([question])
    assert (row["name"], row["version"]) == (registry.cross_model_name(hardware), 1)
    assert row["warnings"][0].startswith("foreseen by tula.anymodel.")
    assert "resnet34.digits was never profiled on this hardware" in row["warnings"][0]
    assert row["time_s_lower"] < row["time_s"] < row["time_s_upper"]
    # Worked out once.
    monkeypatch.setattr("mlflow_tula.serving.catalogue.foresee", None)
    assert recommender.answer([question])[0]["global_batch_size"] == row["global_batch_size"]
    # An own predictor is taken as soon as there is one.
    table = profile_of("resnet34", hardware)
    registry.register(fit(table), table=table)
    (own,) = recommender.answer([question])
    assert own["name"] == workload.registered_name(hardware)


def test_who_asks_again_finds_what_took_too_long(
    hardware: HardwareSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = profile_of("resnet34", hardware).workload.registered_name(hardware)
    shared = Catalogue(answer_s=60.0)
    shared.listed()
    real, begun, go_on = catalogue.foresee, threading.Event(), threading.Event()

    def slow(*words):
        begun.set()
        assert go_on.wait(60)
        return real(*words)

    monkeypatch.setattr(catalogue, "foresee", slow)
    monkeypatch.setattr(shared, "_asked", lambda key, work: work())
    shared._answer_s = 0.05
    with pytest.raises(StoreError, match=r"takes longer than 0\.05 s: ask again"):
        shared.champion(name)
    assert begun.is_set()
    go_on.set()
    until = time.monotonic() + 60
    while name not in shared._foreseen:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert shared.champion(name).answers == registry.cross_model_name(hardware)


def test_what_was_profiled_nowhere_names_the_command_that_can(hardware: HardwareSpec) -> None:
    recommender = Recommender()
    with pytest.raises(NotRegisteredError, match="tula recommend --model alexnet --dataset digits"):
        recommender.answer([{"model": "alexnet", "dataset": "digits", "hardware": hardware.slug}])
    with pytest.raises(NotRegisteredError, match="unknown workload") as refused:
        recommender.answer(
            [{"model": "alexnet", "dataset": "digits", "hardware": "8x-tpu-12345678"}]
        )
    assert "counts its kernels" not in str(refused.value)


def test_the_pages_show_it(hardware: HardwareSpec) -> None:
    client = TestClient(app.create_app(), base_url="http://localhost")
    name = profile_of("resnet34", hardware).workload.registered_name(hardware)
    listed = client.get("/tula").text
    assert f"/tula/predictors/{name}" in listed
    assert "foreseen" in listed
    shown = client.get(f"/tula/predictors/{name}")
    assert shown.status_code == 200
    assert "never profiled on this hardware" in shown.text
    view = client.get(f"/tula/api/predictors/{name}/view").json()
    assert view["decision"]["name"] == registry.cross_model_name(hardware)
    assert view["measured"] == []
    entries = client.get("/tula/api/predictors").json()["predictors"]
    assert [one["name"] for one in entries if one["foreseen"]] == [name]


def test_no_torch_is_needed(hardware: HardwareSpec) -> None:
    dataset = profile_of("resnet34", hardware).workload.slug.partition(".")[2]
    question = {"model": "resnet34", "dataset": dataset, "hardware": hardware.slug}
    code = f"""
import json, sys
sys.modules["torch"] = None
from mlflow_tula.serving.recommender import Recommender
print(Recommender().answer([json.loads({json.dumps(json.dumps(question))})])[0]["name"])
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == registry.cross_model_name(hardware)


def test_one_query_tells_of_all_champions(
    hardware: HardwareSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And without it each name is looked up."""
    known = champions.all_champions()
    assert known is not None
    names = [one.name for one in registry.find()]
    assert set(names) <= set(known)
    shared = Catalogue()
    before = {name: shared.champion(name) for name in names}
    for entry in shared._entries.values():
        entry.checked_s -= 1000
    with monkeypatch.context() as within:
        within.setattr("mlflow_tula.serving.catalogue.find_version", None)
        assert {name: shared.champion(name) for name in names} == before
    monkeypatch.setattr("mlflow_tula.serving.catalogue.all_champions", lambda: None)
    for entry in shared._entries.values():
        entry.checked_s -= 1000
    assert {name: shared.champion(name) for name in names} == before
    assert not shared._at_once
