from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import mlflow
import pytest
from mlflow import MlflowClient

from mlflow_tula.predictors.bundle import PredictorBundle
from mlflow_tula.recommend import recommend
from mlflow_tula.recommend.recommendation import Recommendation
from mlflow_tula.registry import load, register, resolve
from mlflow_tula.specs import ClusterSpec, Pricing
from mlflow_tula.table import ProfileTable
from mlflow_tula.tracking import ProbeLogger, log_profile, log_registration, start_run
from mlflow_tula.tracking import profiles as tracking
from mlflow_tula.tracking.descriptions import describe_profile

pytestmark = pytest.mark.filterwarnings("ignore::mlflow_tula.errors.TulaWarning")


@pytest.fixture(scope="module")
def choice(bundle):
    clusters = [ClusterSpec(), ClusterSpec(devices_per_node=2)]
    return recommend(bundle, cluster=clusters, pricing=Pricing(usd_per_gb_hour=0.15))


@pytest.fixture(scope="module")
def logged(_empty_store, tmp_path_factory, table, bundle, choice):
    """One logged profile, in a store that the tests of this module only read."""
    path = tmp_path_factory.mktemp("logged") / "mlflow.db"
    shutil.copy(_empty_store, path)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(path.parent)
        patched.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{path}")
        with start_run("profile vgg11", command="profile") as run:
            log_profile(run, table, bundle, choice, settings={"search": "partial", "seed": 0})
        yield MlflowClient().get_run(run.run_id)


def shown_table(run):
    client = MlflowClient()
    return client.load_table(
        run.info.experiment_id, "profile_table.json", run_ids=[run.info.run_id]
    )


def artifact(run, name) -> Path:
    return Path(mlflow.artifacts.download_artifacts(f"runs:/{run.info.run_id}/{name}"))


def children(run):
    found = MlflowClient().search_runs(
        [run.info.experiment_id], f"tags.`mlflow.parentRunId` = '{run.info.run_id}'"
    )
    return sorted(found, key=lambda child: child.info.run_name)


def test_each_probe_is_a_nested_run_with_its_numbers(logged, table):
    probes = children(logged)
    assert len(probes) == len(table.measurements)
    one = next(probe for probe in probes if probe.info.run_name == "probe 64 x 1 x 2")
    row = next(r for r in table.ok if (r.local_batch_size, r.world_size) == (64, 2))
    assert one.data.metrics["step_time_s"] == row.step_time_s
    assert one.data.metrics["global_batch_size"] == 128
    assert one.data.metrics["peak_memory_bytes"] == row.peak_memory_bytes
    assert one.data.params["tula.local_batch_size"] == "64"
    assert one.info.status == "FINISHED"


def test_a_probe_that_did_not_run_keeps_its_reason(logged):
    failed = [probe for probe in children(logged) if probe.info.status == "FAILED"]
    assert [probe.data.tags["tula.status"] for probe in failed] == ["oom"]
    assert failed[0].data.tags["tula.reason"] == "rank 1: cannot allocate memory"
    assert "step_time_s" not in failed[0].data.metrics


def test_curves_have_the_batch_size_on_the_x_axis(logged, table, bundle):
    client, run_id = MlflowClient(), logged.info.run_id

    def curve(name):
        return {m.step: m.value for m in client.get_metric_history(run_id, name)}

    measured = curve("step_time_s/1x2/measured")
    rows = [row for row in table.ok if row.world_size == 2]
    assert measured == {row.global_batch_size: row.step_time_s for row in rows}
    predicted = curve("step_time_s/1x2/predicted")
    assert set(measured) < set(predicted)
    assert 512 * 2 in predicted
    lower, upper = (curve(f"step_time_s/1x2/predicted_{end}") for end in ("lower", "upper"))
    assert all(lower[size] <= predicted[size] <= upper[size] for size in predicted)
    for quantity in tracking.CURVES:
        assert curve(f"{quantity}/1x1/measured").keys() == {8, 16, 32, 64, 128, 256}
        assert curve(f"{quantity}/1x1/predicted")
    assert curve("throughput/1x1/measured")[64] == pytest.approx(64 / 0.985)


def test_the_documents_round_trip(logged, table, bundle, choice):
    def document(name):
        return json.loads(artifact(logged, name).read_text())

    assert ProfileTable.from_dict(document("profile.json")) == table
    assert PredictorBundle.from_dict(document("bundle.json")) == bundle
    assert Recommendation.from_dict(document("recommendation.json")) == choice
    with artifact(logged, "profile_table.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(table.measurements)
    shown = shown_table(logged)
    assert list(shown["local_batch_size"]) == [row.local_batch_size for row in table.measurements]


def test_the_table_is_the_runs_input_with_its_digest(logged, table):
    dataset = logged.inputs.dataset_inputs[0].dataset
    assert (dataset.name, dataset.digest) == (table.workload.slug, table.digest)


def test_the_figures_are_there(logged):
    for name in (
        "overview",
        "time_by_batch_size",
        "cost_by_batch_size",
        "memory_by_batch_size",
        "pareto",
        "residuals",
    ):
        assert artifact(logged, f"figures/{name}.png").read_bytes().startswith(b"\x89PNG")
    page = artifact(logged, "figures/overview.html").read_text()
    assert "plotly.js" in page
    assert all(f'<section id="{name}">' in page for name in ("cost", "pareto", "residuals"))


def test_tags_parameters_and_numbers_for_searches(logged, table, choice):
    assert logged.data.tags["tula.fingerprint"] == table.hardware.fingerprint
    assert logged.data.tags["tula.table_digest"] == table.digest
    assert logged.data.tags["tula.torch_version"] == "2.14.0"
    assert all(name.startswith("tula.") for name in logged.data.params)
    assert logged.data.params["tula.search"] == "partial"
    assert logged.data.params["tula.dataset_size"] == "1437"
    assert logged.data.metrics["choice/global_batch_size"] == choice.global_batch_size
    found = mlflow.search_runs(
        experiment_names=["tula"], filter_string="metrics.`settings/dataset_size` > 1000"
    )
    assert list(found["run_id"]) == [logged.info.run_id]


def test_the_description_begins_with_the_decision(logged, choice, table):
    lines = logged.data.tags["mlflow.note.content"].splitlines()
    assert lines[0].startswith(f"**Take global batch size {choice.global_batch_size:,} on ")
    assert f"objective `{choice.objective}`" in lines[0]
    assert any(line.startswith(f"| **{choice.global_batch_size:,}**&ensp;|") for line in lines)
    hardware = f"--hardware {table.hardware.slug}"  # measured elsewhere
    assert f"- ask again: `tula recommend --model vgg11 {hardware}`" in lines


def test_probes_logged_on_the_way_are_not_logged_twice(store, table, bundle):
    with start_run("profile", command="profile") as run:
        probes = ProbeLogger(run)
        for number, row in enumerate(table.measurements):
            event = SimpleNamespace(
                kind="probe_finished" if number % 2 else "probe_started",
                measurement=row,
                details={"step_times_s": [1.0, 0.5], "stopped_by": "precision", "warm": 3},
            )
            probes(event)
        log_profile(run, table, bundle, probes=probes)
    runs = children(MlflowClient().get_run(run.run_id))
    assert len(runs) == len(table.measurements)
    watched = [one for one in runs if "each/step_time_s" in one.data.metrics]
    assert len(watched) == len(table.measurements) // 2
    steps = MlflowClient().get_metric_history(watched[0].info.run_id, "each/step_time_s")
    assert [(m.step, m.value) for m in steps] == [(1, 1.0), (2, 0.5)]
    assert watched[0].data.tags["tula.stopped_by"] == "precision"
    assert watched[0].data.metrics["details/warm"] == 3


def test_a_store_that_fails_does_not_stop_the_sweep(store, table, bundle, monkeypatch, caplog):
    with start_run("profile", command="profile") as run:
        probes = ProbeLogger(run)
        with monkeypatch.context() as patched:
            patched.setattr(run.client, "create_run", None)
            probes(SimpleNamespace(kind="probe_finished", measurement=table.ok[0], details={}))
        assert "could not be logged to MLflow yet" in caplog.text
        log_profile(run, table, bundle, probes=probes)
    assert len(children(MlflowClient().get_run(run.run_id))) == len(table.measurements)


def test_an_interrupted_sweep_is_logged_without_a_fit(store, table):
    few = replace(table, measurements=table.measurements[:2])
    with start_run("profile", command="profile") as run:
        run.interrupted = True
        log_profile(run, few)
    done = MlflowClient().get_run(run.run_id)
    assert done.info.status == "KILLED"
    assert done.data.tags["mlflow.note.content"].startswith("**No decision yet:** 2 measured")
    assert len(children(done)) == 2


def test_logging_again_after_a_resume_changes_no_table(store, table, bundle):
    with start_run("profile", command="profile") as run:
        log_profile(run, table, bundle)
        log_profile(run, table, bundle, probes=None)
    shown = shown_table(MlflowClient().get_run(run.run_id))
    assert len(shown) == len(table.measurements)


def test_the_registration_is_noted_on_the_run(store, table, bundle, choice):
    with start_run("main", command="main") as run:
        registered = register(bundle, table=table, run_id=run.run_id)
        log_profile(run, table, bundle, choice, registered=registered)
        log_registration(run, registered)
        log_registration(run, registered)
    done = MlflowClient().get_run(run.run_id)
    assert done.data.tags["tula.registered_model"] == registered.name
    assert done.data.tags["tula.gate"] == "promoted"
    note = done.data.tags["mlflow.note.content"]
    assert note.count(f"registered as `{registered.name}` version 1") == 1
    assert note.index("registered as") < note.index("**Next**")


def test_descriptions_tell_what_failed_and_fit_into_a_tag(table, bundle, choice):
    text = describe_profile(table, bundle, choice, notes=["full search: 9 minutes"])
    assert "1 out of memory" in text
    assert "full search: 9 minutes" in text
    assert len(text) < 4500


def test_tracking_does_not_import_torch():
    code = "import sys, mlflow_tula.tracking; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def server(clean_mlflow, free_port, monkeypatch):
    """A real `mlflow server` of the test's own; its address."""
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(free_port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{clean_mlflow}/server.db"]
    command += ["--artifacts-destination", str(clean_mlflow / "artifacts")]
    with (clean_mlflow / "server.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    address = f"http://127.0.0.1:{free_port}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    try:
        wait_for(address, process)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)


def wait_for(address, process):
    for _ in range(300):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{address}/health", timeout=2).close()
            return
        assert process.poll() is None, "the server ended"
        time.sleep(0.5)
    raise AssertionError("the server did not answer")


@pytest.mark.slow
def test_a_server_takes_it_all_and_stdout_stays_clean(server, table, bundle, choice, capsys):
    with start_run("main", command="main") as run:
        registered = register(bundle, table=table, run_id=run.run_id)
        log_profile(run, table, bundle, choice, registered=registered)
    assert load(registered.name) == bundle
    assert resolve(table.workload, table.hardware).run_id == run.run_id
    done = MlflowClient().get_run(run.run_id)
    assert len(children(done)) == len(table.measurements)
    assert artifact(done, "figures/overview.png").read_bytes().startswith(b"\x89PNG")
    frame = choice.to_frame()[["global_batch_size", "devices_per_node"]].astype("int64")
    answer = mlflow.pyfunc.load_model(registered.uri).predict(frame)
    assert len(answer) == len(frame)
    assert "View run" not in capsys.readouterr().out
