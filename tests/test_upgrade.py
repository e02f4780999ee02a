"""What an older version stored is read by this one, and means the same.

tests/data/schema-1 was recorded from real runs by tests/data/record_schema.py. Where a test here
fails because a writer has changed: raise the schema version of that kind of document, let the
reader take the older one, and record the new one beside it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import mlflow_tula as tula
from mlflow_tula.comparing.facts import Outcome
from mlflow_tula.comparing.records import RecordFile
from mlflow_tula.errors import SchemaError
from mlflow_tula.fit import fit
from mlflow_tula.predictors.convergence import ConvergencePredictor
from mlflow_tula.recommend import Recommendation

FIRST = Path(__file__).parent / "data" / "schema-1"
READERS = {
    "table": tula.ProfileTable,
    "bundle": tula.PredictorBundle,
    "recommendation": Recommendation,
    "convergence": ConvergencePredictor,
}


def document(name: str) -> Any:
    return json.loads((FIRST / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", READERS)
def test_it_is_read_and_written_as_it_was(name: str) -> None:
    """A writer that adds, drops or renames a field fails here: older versions could not read it."""
    stored = document(name)
    again = json.loads(json.dumps(READERS[name].from_dict(stored).to_dict()))
    assert again == stored


def shape(value: Any) -> Any:
    """The fields of a document and the kinds of its values; lists by what they hold."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        kinds = [shape(item) for item in value]
        return [one for index, one in enumerate(kinds) if one not in kinds[:index]][:1]
    return (
        "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value)
    )


def test_a_fit_today_writes_the_same_fields() -> None:
    """The same table, fitted now: another field or kind of value needs another schema version."""
    convergence = pd.read_csv(FIRST / "convergence.csv")
    made = fit(tula.ProfileTable.from_dict(document("table")), convergence=convergence)
    assert shape(json.loads(json.dumps(made.to_dict()))) == shape(document("bundle"))


def test_the_stored_bundle_predicts_what_it_did() -> None:
    stored = json.loads((FIRST / "predictions.json").read_text())
    then = pd.DataFrame(stored["data"], columns=stored["columns"], index=stored["index"])
    bundle = tula.PredictorBundle.from_dict(document("bundle"))
    names = ["local_batch_size", "nodes", "devices_per_node", "accumulation_steps"]
    with pytest.warns(tula.errors.TulaWarning, match="beyond what|may not reach"):
        now = bundle.predict(then[names].astype("int64"), usd_per_device_hour=1.5)
    missing = set(then.columns) - set(now.columns)
    assert not missing, "a column of a prediction is part of the contract"
    for name in then.columns:
        if pd.api.types.is_numeric_dtype(now[name]):
            np.testing.assert_allclose(
                now[name].to_numpy(float), then[name].to_numpy(float), rtol=1e-9, err_msg=name
            )
        else:
            assert now[name].tolist() == then[name].tolist(), name


def test_the_bundle_belongs_to_its_table() -> None:
    assert (
        document("bundle")["table_digest"] == tula.ProfileTable.from_dict(document("table")).digest
    )


def test_a_new_registration_takes_the_stored_pair(store: Path) -> None:
    """`tula register` of a folder that an older version left."""
    from mlflow_tula import registry

    table = tula.ProfileTable.from_dict(document("table"))
    bundle = tula.PredictorBundle.from_dict(document("bundle"))
    done = registry.register(bundle, table=table)
    assert registry.load(done.name) == bundle
    assert registry.load_table(done.name) == table


def test_records_of_trainings() -> None:
    outcomes = list(RecordFile(FIRST / "trainings.jsonl").read().values())
    assert [one.trial.batch_size for one in outcomes] == [32, 64]
    lines = (FIRST / "trainings.jsonl").read_text().splitlines()
    assert [json.loads(json.dumps(one.to_dict())) for one in outcomes] == [*map(json.loads, lines)]
    assert Outcome.from_dict(json.loads(lines[0])).accuracy == pytest.approx(0.9415, abs=1e-4)


def test_links() -> None:
    from mlflow_tula.registry.links import link_document
    from mlflow_tula.specs import HardwareSpec
    from mlflow_tula.table import LinkMeasurement

    stored = document("link")
    rows = [LinkMeasurement.from_dict(row) for row in stored["measurements"]]
    again = link_document(HardwareSpec.from_dict(stored["hardware"]), rows)
    assert shape(json.loads(json.dumps(again))) == shape(stored)
    assert again["measurements"] == stored["measurements"]


@pytest.mark.slow
def test_a_diagnosis_keeps_its_fields(tmp_path: Path) -> None:
    """Nothing reads it but people and their scripts: its fields are what they rely on."""
    from mlflow_tula.comparing.facts import Task, Trial
    from mlflow_tula.diagnose import diagnose

    task = Task(dataset="digits", network="mlp", reference_batch_size=32, epochs=0.1)
    made = diagnose(Trial(task=task, method="plain", batch_size=32, seed=0), snapshots=1)
    assert shape(json.loads(json.dumps(made.to_dict()))) == shape(document("diagnosis")[0])


def test_a_stored_decision_is_resumed(tmp_path: Path) -> None:
    from mlflow_tula.train import saved_plan

    for name in ("decision.json", "checkpoint.pt"):
        shutil.copy(FIRST / name, tmp_path / name)
    plan = saved_plan(tmp_path)
    assert plan is not None
    assert plan.global_batch_size == 64


@pytest.mark.slow
def test_a_stored_checkpoint_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its two epochs were trained by the version that stored it: nothing is trained again."""
    from mlflow_tula.train import saved_plan, train
    from mlflow_tula.training.facts import Schedule
    from mlflow_tula.workloads.job import Job

    folder = tmp_path / "training"
    folder.mkdir()
    for name in ("decision.json", "checkpoint.pt"):
        shutil.copy(FIRST / name, folder / name)
    shutil.copy(FIRST / "tiny.py", tmp_path / "tiny.py")
    monkeypatch.chdir(tmp_path)
    stored = document("decision")
    plan = saved_plan(folder)
    assert plan is not None
    schedule = Schedule.from_dict(stored["identity"]["schedule"])
    job = Job.from_dict(stored["job"])
    result = train(job, plan, epochs=2, output_dir=folder, schedule=schedule)
    assert result.epochs == 2
    assert result.samples == 2816


NEWER = [("table", 2), ("bundle", 99), ("recommendation", 7), ("convergence", 2)]


@pytest.mark.parametrize(("name", "version"), NEWER)
def test_a_newer_schema_names_the_way_out(name: str, version: int) -> None:
    with pytest.raises(
        SchemaError, match=f"schema_version {version} .*newer than 1.*pip install -U"
    ):
        READERS[name].from_dict(document(name) | {"schema_version": version})


@pytest.mark.parametrize("name", READERS)
def test_every_kind_says_what_it_is(name: str) -> None:
    stored = document(name)
    assert stored["schema_version"] == 1
    assert stored["kind"].startswith("tula.")
