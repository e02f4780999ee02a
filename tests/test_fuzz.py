"""Inputs that somebody may send: none crashes, hangs or changes anything.

The campaign of 100,000 is benchmarks/reliability/fuzz.py; what it found is kept here by name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import mlflow_tula as tula
from mlflow_tula.errors import InvalidInputError, SchemaError, TableError
from mlflow_tula.predictors.checks import check_bundle

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "benchmarks" / "reliability"


@pytest.mark.slow
def test_two_thousand_inputs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPTS / "fuzz.py", "--short", "--folder", tmp_path],
        cwd=tmp_path,
        env={**os.environ, "MLFLOW_TRACKING_URI": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    crashes = tmp_path / "fuzz" / "crashes.jsonl"
    assert done.returncode == 0, crashes.read_text()[:4000] if crashes.exists() else done.stderr
    lines = (tmp_path / "fuzz.jsonl").read_text().splitlines()
    outcomes = [one for one in map(json.loads, lines) if "case" in one]
    assert sum(one["injected"] for one in outcomes) == 2000
    assert {one["case"] for one in outcomes} == {
        "table", "bundle", "cli", "invocations", "decisions",
    }  # fmt: skip


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import fuzz

    return fuzz


def test_a_campaign_is_cut_into_chunks_and_adds_up(fuzz) -> None:
    for inputs in (17, 2000, 100_000):
        planned = fuzz.chunks(inputs)
        assert sum(count for one in planned.values() for _, count in one) == inputs


def test_crashes_and_hangs_are_found(fuzz) -> None:
    """The fuzzer itself: an input that crashes or hangs does not stay unseen."""
    import time

    from fuzz_targets import Target
    from hypothesis import strategies as st

    def run(number: int) -> str:
        if number == 1:
            raise KeyError("boom")
        if number == 2:
            time.sleep(30)
        return "taken"

    found = fuzz.run_chunk(Target(inputs=st.integers(0, 3), run=run), 1, 4, 0.2)
    assert found["ends"]["crash"] == 2
    assert any("boom" in one["error"] for one in found["crashes"])
    assert any("no end within" in one["error"] for one in found["crashes"])


def test_what_is_done_is_not_done_again(fuzz, tmp_path: Path) -> None:
    folder = tmp_path / "fuzz"
    folder.mkdir()
    for name, planned in fuzz.chunks(10).items():
        for number, count in planned:
            document = {"ends": {"refused": count}, "crashes": [], "seconds": 1.0}
            (folder / f"{name}-1-{number}-{count}.json").write_text(json.dumps(document))
    assert fuzz.main(["--inputs", "10", "--folder", str(tmp_path), "--targets", ""]) == 0
    assert '"injected": 3' in (tmp_path / "fuzz.jsonl").read_text()


# --- options without a value (mlflow 6811: `mlflow run . -P model=`)


def test_every_option_refuses_an_empty_value(
    fuzz, clean_mlflow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fuzz_targets import cli, options_of_commands

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    arguments = {"import": ["x.csv"], "monitor": ["x"]}
    named = {f"registry {verb}" for verb in ("show", "compare", "promote", "rollback", "prune")}
    odd = []
    for verb, names in options_of_commands().items():
        words = [*verb.split(), *arguments.get(verb, []), *(["a/b"] if verb in named else [])]
        for name in names:
            for value in ("", "''"):
                code, _, err = cli([*words, f"{name}={value}"])
                if code != 2 or err.count("\n") != 1 or not err.startswith("Error: "):
                    odd.append((verb, name, value, code, err[:200]))
    assert odd == []
    assert list(clean_mlflow.iterdir()) == []


@pytest.mark.slow
def test_mlflow_6811_an_empty_parameter_of_a_project_run(store: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["mlflow", "run", ".", "-e", "recommend", "-P", "model="],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "MLFLOW_TRACKING_URI": f"sqlite:///{store}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0
    assert "Error: Invalid value for '--model': '' is empty" in done.stderr
    assert "Traceback" not in done.stderr


# --- what the campaign found


def table_with(table, **changes):
    rows = [row.to_dict() | changes for row in table.measurements[:1]]
    return table.to_dict() | {"measurements": rows}


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("local_batch_size", 10**400, "a whole number of 1329 bits"),
        ("local_batch_size", 10**15, "at most 1000000000000, not 1000000000000000"),
        ("local_batch_size", "8" * 30, "at most"),
        ("step_time_s", 1e300, "at most 1e[+]09"),
        ("step_time_s", 1e-300, "at least 1e-09 s"),
        ("sync_time_s", 5.0, "sync_time_s is a part of step_time_s: it must be at most 0.414"),
        ("peak_memory_bytes", 2**70, "at most|64 bits"),
        ("reason", 5, "reason must be a string"),
        ("status", ["ok"], "unknown status"),
        ("nodes", True, "whole number"),
    ],
)
def test_a_cell_out_of_range_is_refused(table, field: str, value: object, match: str) -> None:
    with pytest.raises(InvalidInputError, match=match):
        tula.ProfileTable.from_dict(table_with(table, **{field: value}))


def test_an_endless_reason_is_cut(table) -> None:
    document = table_with(table, reason="x" * 5000)
    assert len(tula.ProfileTable.from_dict(document).measurements[0].reason) == 2000


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"local_batch_size,step_time_s\n8,0.1,3\n", "more cells than its header"),
        (b"a" * 30_000 + b"\n1\n", "no text with a short first line"),
        (b",".join(b"x" for _ in range(300)) + b"\n", "more than 200 columns"),
        ("local_batch_size,step_time_s\n8,0.1\n".encode("utf-16"), "no text"),
        (b"local_batch_size,step_time_s\n8,\xff\xfe\n", "cannot read"),
        (b"", "is empty"),
        (b'local_batch_size,step_time_s\n8,"0.1\n', "cannot read"),
        (b"local_batch_size,step_time_s,step_time_s\n8,1,2\n", "unknown"),
    ],
)
def test_a_csv_that_is_no_table(table, tmp_path: Path, content: bytes, match: str) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(TableError, match=match) as caught:
        tula.ProfileTable.from_csv(path, workload=table.workload, hardware=table.hardware)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("path", ["/dev/zero", "http://127.0.0.1:9/x.csv", "a\0b"])
def test_a_csv_is_a_file_of_this_machine(table, path: str) -> None:
    with pytest.raises(TableError, match=r"cannot read|larger than 64 MiB"):
        tula.ProfileTable.from_csv(path, workload=table.workload, hardware=table.hardware)


@pytest.mark.parametrize(
    ("place", "value", "match"),
    [
        (("step_time", "compute", "weights"), [1.0], "must have 11 values"),
        (("step_time", "compute", "sizes"), [8, 8, 8, 8, 8, 8], "must rise"),
        (("step_time", "compute", "offsets_s"), [], "list of 1 to"),
        (("step_time", "range", "setups"), [[1, 1, 8]], "list of 4 to 4"),
        (("step_time", "spread", "noise_sd"), float("nan"), "not finite"),
        (("step_time", "spread", "noise_sd"), 1e9, "number from 0 to 10"),
        (("step_time", "intra_node", "powers"), "x" * 9, "must be a list"),
        (("step_time", "intra_node", "rest"), [[0.0] * 5] * 9, "rest and its levels"),
        (("step_time", "warnings"), None, "must be a list"),
        (("step_time", "form"), {"a": 1}, "must be a text"),
        (("step_time", "backward"), "x", "must be a JSON object"),
        (("memory", "batch_sizes"), [1.0], "must have"),
        (("memory", "probes"), [{"local_batch_size": 1}], "no field 'world_size'"),
        (("report", "step_time_mape"), "5 %", "step_time_mape must be"),
        (("workload", "dataset_size"), "many", "dataset_size must be"),
        (("probed", "ok"), [[0, 1]], "probed.ok"),
    ],
)
def test_a_damaged_bundle_is_refused_before_it_is_asked(bundle, place, value, match: str) -> None:
    document = json.loads(json.dumps(bundle.to_dict()))
    inner = document
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    with pytest.raises(InvalidInputError, match=match):
        tula.PredictorBundle.from_dict(document)


def test_every_field_that_an_equation_reads_is_checked() -> None:
    """Where a new field is read: its kind and range belong into predictors/checks.py."""
    import re

    from mlflow_tula import predictors

    folder = Path(predictors.__file__).parent
    checked = (folder / "checks.py").read_text()
    source = "".join(
        (folder / name).read_text()
        for name in predictors.PORTABLE_FILES
        if name.endswith("formulas.py")
    )
    read = re.findall(
        r"""(?:params|tier|known|link|curve|spread|data|process|probe|one)\b
        (?:\[|\.get\()"(\w+)\"""",
        source,
        re.VERBOSE,
    )
    assert len(set(read)) > 40
    assert [name for name in sorted(set(read)) if f'"{name}"' not in checked] == []


def test_a_registered_model_checks_its_bundle_without_this_package(bundle) -> None:
    check_bundle(bundle.to_dict())
    with pytest.raises(ValueError, match="has no field 'workload'"):
        check_bundle({})
    with pytest.raises(ValueError, match="must be a JSON object, not list"):
        check_bundle([])


@pytest.mark.parametrize(
    ("document", "match"),
    [
        ({"a": float("inf")}, "inf is not finite"),
        ({"a": 2**70}, "at most 64 bits"),
        ({"a": "x" * 30_000}, "text of 30,000 characters"),
        ({"a": "\ud800"}, "no valid Unicode"),
        ({"a": {1: 2}}, "no text"),
        ({"a": {1, 2}}, "set, which is no JSON value"),
    ],
)
def test_values_that_are_no_json(bundle, document, match: str) -> None:
    with pytest.raises(SchemaError, match=match):
        tula.PredictorBundle.from_dict(bundle.to_dict() | {"more": document})


def test_a_hundred_thousand_questions_are_answered_in_parts(bundle) -> None:
    count = 100_000
    frame = pd.DataFrame(
        {
            "local_batch_size": 1 + np.arange(count) % 1000,
            "nodes": 1 + np.arange(count) % 300,
            "accumulation_steps": 1 + np.arange(count) % 77,
        },
        index=np.arange(count)[::-1],
    )
    with pytest.warns(tula.errors.ExtrapolationWarning, match="beyond what was measured"):
        whole, some = bundle.predict(frame), bundle.predict(frame.iloc[5000:5010])
    pd.testing.assert_frame_equal(whole.iloc[5000:5010], some)
    with pytest.raises(InvalidInputError, match="at most 100000: ask in parts"):
        bundle.predict(pd.concat([frame, frame]))


def test_a_served_predictor_refuses_without_a_stack_trace(registered: str) -> None:
    import mlflow
    from fastapi.testclient import TestClient
    from mlflow.pyfunc import scoring_server

    model = mlflow.pyfunc.load_model(f"models:/{registered}@champion")
    client = TestClient(scoring_server.init(model))
    body = {"dataframe_records": [{"global_batch_size": -1}]}
    answer = client.post("/invocations", json=body)
    assert answer.status_code == 400
    assert "Traceback" not in answer.text
    assert answer.json()["message"].startswith("global_batch_size must be a whole number")
