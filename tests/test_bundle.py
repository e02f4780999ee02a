from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import mlflow_tula as tula
from mlflow_tula.errors import (
    ExtrapolationWarning,
    InvalidInputError,
    MayNotReachTargetWarning,
    SchemaError,
)
from mlflow_tula.predictors.bundle import BUNDLE_SCHEMA_VERSION, FitReport, Probed

DATA = Path(__file__).parent / "data" / "vgg11_digits_cpu.json"


def frame(**columns) -> pd.DataFrame:
    return pd.DataFrame(columns)


def test_json_round_trip_gives_the_same_bundle_and_the_same_answers(bundle) -> None:
    text = json.dumps(bundle.to_dict(), allow_nan=False)
    again = tula.PredictorBundle.from_dict(json.loads(text))
    assert again == bundle
    assert json.dumps(again.to_dict(), allow_nan=False) == text
    asked = frame(local_batch_size=[8, 64], devices_per_node=[1, 2])
    pd.testing.assert_frame_equal(again.predict(asked), bundle.predict(asked))


def test_another_process_writes_the_same_bytes(table, bundle) -> None:
    script = (
        "import json, sys, warnings; warnings.simplefilter('ignore')\n"
        "import mlflow_tula as tula\n"
        "table = tula.ProfileTable.from_dict(json.load(open(sys.argv[1])))\n"
        "print(json.dumps(tula.fit(table).to_dict(), allow_nan=False), end='')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(DATA)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == json.dumps(bundle.to_dict(), allow_nan=False)
    assert bundle.table_digest == table.digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "something.else"}, "expected a tula.predictor_bundle"),
        ({"schema_version": BUNDLE_SCHEMA_VERSION + 1}, "newer than"),
        ({"schema_version": None}, "needs a schema_version"),
        ({"step_time": []}, "JSON object"),
        ({"step_time": {}}, "damaged"),
        ({"memory": {"limit_bytes": 1}}, "damaged"),
        ({"convergence": {"schema_version": 1}}, "damaged"),
        ({"workload": {"model": "m"}}, "incomplete"),
        ({"workload": {"colour": "red"}}, "no field 'colour'"),
        ({"report": {"mood": "good"}}, "no field 'mood'"),
        ({"probed": {"ok": [[1]]}}, r"probed.ok must list"),
    ],
)
def test_a_document_that_is_not_ours_is_refused(bundle, change, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        tula.PredictorBundle.from_dict(bundle.to_dict() | change)


def test_a_document_without_step_time_is_refused(bundle) -> None:
    data = bundle.to_dict()
    del data["step_time"]
    with pytest.raises(SchemaError, match="needs 'step_time'"):
        tula.PredictorBundle.from_dict(data)


def test_questions_that_cannot_be_asked_are_our_errors(bundle) -> None:
    with pytest.raises(InvalidInputError, match="exactly one of the columns"):
        bundle.predict(frame(nodes=[1]))
    with pytest.raises(InvalidInputError, match="level must be a finite number"):
        bundle.predict(frame(local_batch_size=[8]), level=2)


def test_a_pricing_and_its_two_prices_are_the_same(bundle) -> None:
    asked = frame(local_batch_size=[8])
    pricing = tula.Pricing(usd_per_device_hour=2.0, usd_per_gb_hour=0.15)
    one = bundle.predict(asked, pricing=pricing)
    two = bundle.predict(asked, usd_per_device_hour=2.0, usd_per_gb_hour=0.15)
    pd.testing.assert_frame_equal(one, two)


def test_extrapolation_is_warned_of_and_marked(bundle) -> None:
    with pytest.warns(ExtrapolationWarning, match="beyond what was measured: 1 of 2"):
        out = bundle.predict(frame(local_batch_size=[8, 100_000]))
    assert out["extrapolated"].tolist() == [False, True]


def test_sizes_that_may_not_reach_the_target_are_warned_of(table) -> None:
    conv = frame(
        global_batch_size=[8, 64, 256],
        epochs_to_target=[5.0, 6.0, 9.0],
        runs_total=[4, 4, 4],
        runs_reached=[4, 4, 2],
    )
    with pytest.warns(MayNotReachTargetWarning, match="batch 256"):
        bundle = tula.fit(table, convergence=conv)
    with pytest.warns(MayNotReachTargetWarning, match="1 of 2 rows"):
        out = bundle.predict(frame(local_batch_size=[8, 256]))
    assert out["may_not_reach_target"].tolist() == [False, True]
    both = (out["time_to_target_s_upper"] / out["time_to_target_s"]).to_numpy()
    assert (both > (out["epoch_time_s_upper"] / out["epoch_time_s"]).to_numpy()).all()
    assert (both > (out["epochs_to_target_upper"] / out["epochs_to_target"]).to_numpy()).all()
    assert out["time_to_target_s"].to_numpy() == pytest.approx(
        (out["epochs_to_target"] * out["epoch_time_s"]).to_numpy()
    )


def test_the_report_reads_as_sentences() -> None:
    report = FitReport(
        step_time_form="a line",
        step_time_mape=0.034,
        memory_form="two lines",
        rows_used=4,
        rows_oom=1,
        warnings=("measure more",),
    )
    assert str(report).splitlines() == [
        "step time: a line (leave-one-out error 3.4 %)",
        "memory: two lines",
        "rows: 4 used, 1 out of memory, 0 failed",
        "warning: measure more",
    ]
    assert FitReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_what_was_probed_round_trips() -> None:
    probed = Probed(ok=((8, 1), (16, 2)), oom=((64, 1),))
    assert Probed.from_dict(json.loads(json.dumps(probed.to_dict()))) == probed
