"""Ordinary logged runs become a table and a fit: through the real search of a sqlite store."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from mlflow_tula.cli import run as tula
from mlflow_tula.errors import InvalidInputError, TableError
from mlflow_tula.hardware import detect
from mlflow_tula.integrations.facts import LoopFacts, ObserverSettings
from mlflow_tula.tracking.observed_runs import read_observed_runs
from mlflow_tula.tracking.observed_tags import spec_tags

FACTS = LoopFacts(
    model="Net",
    num_parameters=5210,
    optimizer="sgd",
    momentum=0.9,
    dataset="Digits",
    dataset_size=1797,
    input_shape=(1, 8, 8),
    num_threads=2,
)


def log(
    size: int = 32,
    *,
    step: float | None = None,
    facts: LoopFacts = FACTS,
    experiment: str = "0",
    tags: dict[str, str] | None = None,
    **values: float,
) -> str:
    """One run, as autolog leaves it."""
    client = MlflowClient()
    made = client.create_run(experiment, run_name=f"batch {size}")
    metrics = {
        "step_time_s": step or 0.01 + 1e-3 * size,
        "step_time_std_s": 1e-4,
        "num_steps": 100,
        "peak_memory_bytes": 1e9 + 1e6 * size,
        "local_batch_size": size,
        "accumulation_steps": 1,
        "nodes": 1,
        "devices_per_node": 1,
        **values,
    }
    known = {
        **spec_tags(facts.workload(ObserverSettings()), detect("cpu")),
        "tula.input_shape": "x".join(map(str, facts.input_shape or ())),
        "tula.num_threads": str(facts.num_threads),
        **(tags or {}),
    }
    client.log_batch(
        made.info.run_id,
        metrics=[Metric(key, value, 0, 1) for key, value in metrics.items() if value is not None],
        tags=[RunTag(key, value) for key, value in known.items()],
    )
    client.set_terminated(made.info.run_id)
    return made.info.run_id


def test_a_rough_noise_scale_is_left_out(store: Path) -> None:
    log(32, noise_scale=100.0)
    log(32, noise_scale=5.0, tags={"tula.noise_scale_doubt": "batch normalization"})
    log(64, noise_scale=5.0, tags={"tula.noise_scale_doubt": "batch normalization"})
    rows = read_observed_runs("").table.measurements
    assert [row.noise_scale for row in rows] == [100.0, None]


def test_runs_of_one_configuration_become_one_row_of_medians(store: Path) -> None:
    for step in (0.040, 0.042, 0.090):
        log(32, step=step, noise_scale=100.0)
    log(64, accumulation_steps=2, devices_per_node=2)
    observed = read_observed_runs("")
    assert observed.runs_used == 4
    first, second = observed.table.measurements
    assert (first.local_batch_size, first.step_time_s, first.num_steps) == (32, 0.042, 300)
    assert first.noise_scale == 100.0
    assert (second.global_batch_size, second.accumulation_steps) == (256, 2)
    assert observed.table.workload.slug == "net-5210.digits-1797-8px"
    assert observed.table.hardware.fingerprint == detect("cpu").fingerprint


def test_runs_without_what_is_needed_are_counted_and_named(store: Path) -> None:
    log(32)
    bare = MlflowClient().create_run("0", run_name="bare")
    log(64, num_steps=2)
    log(64, local_batch_size=None)
    observed = read_observed_runs("")
    assert observed.runs_used == 1
    assert {one.reason for one in observed.skipped} == {
        "no metric step_time_s",
        "fewer than 5 timed steps",
        "no local_batch_size",
    }
    assert bare.info.run_id in {one.run_id for one in observed.skipped}
    assert sum(observed.skipped_reasons.values()) == 3


def test_a_mixture_is_refused_with_the_condition_that_parts_it(store: Path) -> None:
    log(32)
    log(64)
    other = LoopFacts.from_dict({**FACTS.to_dict(), "optimizer": "adam"})
    log(64, facts=other)
    with pytest.raises(InvalidInputError, match="the runs are of 2 kinds: 2 of net-5210") as caught:
        read_observed_runs("")
    condition = str(caught.value).rpartition("add AND ")[2]
    assert read_observed_runs(condition).runs_used == 2


def test_machines_and_threads_are_not_mixed(store: Path) -> None:
    log(32)
    log(32, tags={"tula.fingerprint": "0123456789ab"})
    with pytest.raises(InvalidInputError, match=r"on 0123456789ab.*tags\.\"tula\.fingerprint\" ="):
        read_observed_runs("")
    with pytest.raises(
        InvalidInputError, match="hardware 0123456789ab, which they do not describe"
    ):
        read_observed_runs("tags.\"tula.fingerprint\" = '0123456789ab'")
    log(32, tags={"tula.num_threads": "1"})
    with pytest.raises(InvalidInputError, match="1 threads"):
        read_observed_runs(f"tags.\"tula.fingerprint\" = '{detect('cpu').fingerprint}'")


def test_only_the_named_experiment_is_searched(store: Path) -> None:
    client = MlflowClient()
    mine = client.create_experiment("mine")
    log(32, experiment=mine)
    log(64)
    assert read_observed_runs("", experiment="mine").runs_used == 1
    assert read_observed_runs("").runs_used == 2
    with pytest.raises(InvalidInputError, match="there is no experiment 'yours'; there are"):
        read_observed_runs("", experiment="yours")


def test_an_unknown_dataset_size_must_be_given(store: Path) -> None:
    log(32, facts=LoopFacts.from_dict({**FACTS.to_dict(), "dataset": None, "dataset_size": None}))
    with pytest.raises(InvalidInputError, match="give --dataset-size"):
        read_observed_runs("")
    found = read_observed_runs("", renamed={"dataset": "digits", "dataset_size": 1797})
    assert found.table.workload.dataset_size == 1797


@pytest.mark.parametrize(
    "search",
    ["nonsense ==", "metrics.x >", "tags.`a = 'b'", "params.x > 3", "' OR 1=1", "foo.bar = 'x'"],
)
def test_bad_filters_are_one_line_and_exit_2(
    store: Path, capsys: pytest.CaptureFixture[str], search: str
) -> None:
    log(32)
    assert tula(["fit", "--runs", search]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("Error: --runs")
    assert "\n" not in error
    assert "is no search filter of MLflow" in error


def test_nothing_found_and_nothing_usable_are_one_line(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tula(["fit", "--runs", "metrics.loss > 7"]) == 2
    assert "no run matches --runs" in capsys.readouterr().err
    MlflowClient().create_run("0", run_name="bare")
    assert tula(["fit", "--runs", "all"]) == 2
    assert "1 x no metric step_time_s" in capsys.readouterr().err
    with pytest.raises(TableError, match="log with mlflow_tula"):
        read_observed_runs("")
    assert tula(["fit", "--runs", "all", "--table", "x.json"]) == 2
    assert "exclude each other" in capsys.readouterr().err


def test_without_a_store_nothing_is_made(
    clean_mlflow: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tula(["fit", "--runs", "all"]) == 2
    assert "there is no MLflow store yet" in capsys.readouterr().err
    assert not list(Path.cwd().iterdir())


@pytest.mark.slow
def test_fit_register_recommend_from_runs(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in (8, 16, 32, 64, 128):
        log(size)
    MlflowClient().create_run("0", run_name="bare")
    assert tula(["fit", "--runs", "tags.\"tula.model\" = 'Net-5210'"]) == 0
    said = capsys.readouterr().err
    assert "5 runs of net-5210.digits-1797-8px" in said
    assert tula(["fit", "--runs", "all", "--json"]) == 0
    out = capsys.readouterr()
    document = json.loads(out.out)
    assert document["runs_used"] == 5
    assert [one["name"] for one in document["runs_skipped"]] == ["bare"]
    assert "1 left out, no metric step_time_s: bare" in out.err
    assert tula(["register", "--bundle", document["bundle"]]) == 0
    capsys.readouterr()
    command = said.partition("then ask: tula ")[2].splitlines()[0].split()
    assert tula([*command, "--json"]) == 0
    asked = json.loads(capsys.readouterr().out)
    assert "tula.net-5210.digits-1797-8px" in asked["source"]


def test_names_are_changed_where_they_are_given(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in (8, 32):
        log(size)
    given = ["--model", "vgg11", "--dataset", "digits", "--dataset-size", "500"]
    assert tula(["fit", "--runs", "all", *given, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["workload"] == "vgg11.digits-8px"
    # `mlflow run` gives every option, so that a default says nothing there
    monkeypatch.setitem(os.environ, "MLFLOW_RUN_ID", "0" * 32)
    assert tula(["fit", "--runs", "all", *given[:2], "--dataset", "mine", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["workload"] == "net-5210.mine-8px"


def test_trainings_of_tula_itself_can_be_read(store: Path, table) -> None:
    from mlflow_tula.runs import start_run
    from mlflow_tula.tracking import log_workload

    plan = {"local_batch_size": 32, "devices_per_node": 2, "accumulation_steps": 1, "nodes": 1}
    with start_run("train", command="train") as run:
        log_workload(run, table.workload, table.hardware, plan)
        run.metrics({"step_time_s": 0.5, "peak_memory_bytes": 1e9})
    observed = read_observed_runs("tags.\"tula.command\" = 'train'")
    (row,) = observed.table.measurements
    assert (row.local_batch_size, row.devices_per_node, row.step_time_s) == (32, 2, 0.5)
    assert observed.table.workload == table.workload
    assert observed.table.hardware.fingerprint == table.hardware.fingerprint


def test_more_runs_than_a_page(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow_tula.tracking import observed_runs

    for size in (8, 16, 32, 64, 128):
        log(size)
    monkeypatch.setattr(observed_runs, "_PAGE", 2)
    assert read_observed_runs("").runs_used == 5
    monkeypatch.setattr(observed_runs, "MOST_RUNS", 3)
    with pytest.raises(InvalidInputError, match="more than 3 runs match"):
        read_observed_runs("")


def test_tags_that_are_broken_or_newer_only_skip_their_run(store: Path) -> None:
    log(32)
    newer = json.dumps({**FACTS.workload(ObserverSettings()), "colour": "red"})
    for text in ("{", "[1]", newer):
        log(64, tags={"tula.workload_spec": text})
    assert read_observed_runs("").runs_used == 1


def test_parameters_serve_where_metrics_do_not_say(store: Path) -> None:
    run_id = log(32, local_batch_size=None)
    MlflowClient().log_batch(run_id, params=[Param("tula.local_batch_size", "48")])
    (row,) = read_observed_runs("").table.measurements
    assert row.local_batch_size == 48
