from __future__ import annotations

import importlib
import json
import math
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlflow_tula import predictors
from mlflow_tula.predictors.inference import predict_frame

QUANTITIES = (
    "step_time_s",
    "peak_memory_bytes",
    "throughput",
    "epoch_time_s",
    "epochs_to_target",
    "time_to_target_s",
)


@pytest.fixture(scope="module")
def document(bundle) -> dict[str, Any]:
    return json.loads(json.dumps(bundle.to_dict()))


def frame(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame(columns)


def test_one_row_out_per_row_in_with_the_same_index(document) -> None:
    asked = frame(local_batch_size=[8, 16, 32]).set_index(pd.Index(["a", "b", "a"]))
    out = predict_frame(document, asked)
    assert list(out.index) == ["a", "b", "a"]
    for name in QUANTITIES:
        assert {name, f"{name}_lower", f"{name}_upper"} <= set(out.columns)
    assert out["extrapolated"].dtype == bool
    assert out["fits"].dtype == bool
    assert out["may_not_reach_target"].dtype == bool


def test_no_rows_in_no_rows_out(document) -> None:
    out = predict_frame(document, frame(local_batch_size=[]).astype(int))
    assert len(out) == 0
    assert "step_time_s" in out


def test_local_and_global_batch_sizes_ask_the_same_question(document) -> None:
    local = predict_frame(
        document,
        frame(local_batch_size=[8, 16], devices_per_node=[2, 2], accumulation_steps=[1, 4]),
    )
    assert local["global_batch_size"].tolist() == [16, 128]
    asked = local[["global_batch_size", "devices_per_node", "accumulation_steps"]]
    pd.testing.assert_frame_equal(local, predict_frame(document, asked))


def test_quantities_follow_from_step_time(document) -> None:
    out = predict_frame(document, frame(local_batch_size=[8, 32]), dataset_size=1000)
    assert out["throughput"].to_numpy() == pytest.approx(
        out["global_batch_size"] / out["step_time_s"]
    )
    drop = document["workload"]["drop_last"]
    steps = [125, 31 if drop else 32]
    assert out["epoch_time_s"].to_numpy() == pytest.approx(steps * out["step_time_s"].to_numpy())
    assert (out["throughput_lower"] < out["throughput"]).all()
    assert out["epochs_to_target"].isna().all()
    assert out["time_to_target_s"].isna().all()


def test_dollars_come_with_a_price_and_pay_for_the_epochs_asked(document) -> None:
    asked = frame(local_batch_size=[32], devices_per_node=[2])
    assert math.isnan(predict_frame(document, asked)["cost_usd"][0])
    one = predict_frame(document, asked, usd_per_device_hour=3.6)
    assert one["cost_usd"][0] == pytest.approx(one["epoch_time_s"][0] * 2 * 1e-3)
    ten = predict_frame(document, asked, usd_per_device_hour=3.6, epochs=10)
    assert ten["cost_usd"][0] == pytest.approx(10 * one["cost_usd"][0])
    assert math.isnan(one["cost_to_target_usd"][0])


@given(cheap=st.floats(0, 10), more=st.floats(0, 10), gb=st.floats(0, 1))
@settings(max_examples=25, deadline=None)
def test_cost_never_falls_with_the_price(cheap: float, more: float, gb: float) -> None:
    document = _DOCUMENT()
    asked = frame(local_batch_size=[8, 64])
    low = predict_frame(document, asked, usd_per_device_hour=cheap, usd_per_gb_hour=gb)
    high = predict_frame(document, asked, usd_per_device_hour=cheap + more, usd_per_gb_hour=gb)
    assert (high["cost_usd"] >= low["cost_usd"]).all()


def _DOCUMENT() -> dict[str, Any]:  # noqa: N802
    """The recorded table's bundle, for tests that hypothesis drives."""
    global _cached
    if _cached is None:
        from mlflow_tula.fit import fit
        from mlflow_tula.table import ProfileTable

        path = Path(__file__).parent / "data" / "vgg11_digits_cpu.json"
        _cached = fit(ProfileTable.from_dict(json.loads(path.read_text("utf-8")))).to_dict()
    return _cached


_cached: dict[str, Any] | None = None


def test_beyond_what_was_measured_is_marked(document) -> None:
    known = document["step_time"]["range"]
    small, large = known["smallest_local_batch_size"], known["largest_local_batch_size"]
    out = predict_frame(
        document,
        frame(
            local_batch_size=[small, large, large + 1, large, large],
            devices_per_node=[1, 1, 1, known["most_devices_per_node"] + 1, 1],
            nodes=[1, 1, 1, 1, 2],
        ),
    )
    assert out["extrapolated"].tolist() == [False, False, True, True, True]


def test_a_huge_batch_is_a_wide_finite_answer_that_does_not_fit(document) -> None:
    out = predict_frame(document, frame(local_batch_size=[10**9]))
    numbers = out[["step_time_s", "step_time_s_lower", "step_time_s_upper", "epoch_time_s"]]
    assert np.isfinite(numbers.to_numpy()).all()
    assert out["step_time_s_upper"][0] > 2 * out["step_time_s_lower"][0]
    assert out["extrapolated"][0]
    assert not out["fits"][0]
    assert "larger than the dataset" in out["fits_reason"][0]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "exactly one of the columns"),
        ({"local_batch_size": [8], "global_batch_size": [8]}, "exactly one of the columns"),
        ({"local_batch_size": [0]}, r"whole number from 1 .* not 0 \(row 1\)"),
        ({"local_batch_size": [8, -1]}, r"not -1 \(row 2\)"),
        ({"local_batch_size": [8.5]}, "not 8.5"),
        ({"local_batch_size": [math.nan]}, "not nan"),
        ({"local_batch_size": [math.inf]}, "not inf"),
        ({"local_batch_size": [True]}, "not True"),
        ({"local_batch_size": ["many"]}, "must hold whole numbers"),
        ({"local_batch_size": [10**13]}, "whole number from 1 to"),
        ({"local_batch_size": [10**12], "nodes": [10**12]}, "samples at once"),
        ({"local_batch_size": [8], "nodes": [math.nan]}, "nodes must be a whole number"),
        ({"local_batch_size": [8], "node": [1]}, "did you mean 'nodes'"),
        ({"batch_size": [8], "local_batch_size": [8]}, "did you mean 'local_batch_size'"),
        (
            {"global_batch_size": [10], "devices_per_node": [4]},
            "10 cannot be shared out over 4 .* nearest valid sizes are 8 and 12",
        ),
        ({"global_batch_size": [3], "devices_per_node": [4]}, "nearest valid sizes are 4$"),
    ],
)
def test_a_question_that_cannot_be_asked(document, columns, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict_frame(document, frame(**columns))


def test_a_column_that_stands_twice(document) -> None:
    doubled = pd.DataFrame([[8, 1, 1]], columns=["local_batch_size", "nodes", "nodes"])
    with pytest.raises(ValueError, match="stands twice"):
        predict_frame(document, doubled)
    with pytest.raises(ValueError, match="pandas DataFrame, not list"):
        predict_frame(document, [8])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("level", 0.0, "between 0 and 1"),
        ("level", 1.0, "between 0 and 1"),
        ("level", math.nan, "between 0 and 1"),
        ("level", "high", "between 0 and 1"),
        ("memory_limit_bytes", 0, "above 0"),
        ("dataset_size", -5, "above 0"),
        ("epochs", math.inf, "above 0"),
        ("usd_per_device_hour", -1.0, "usd_per_device_hour must be a finite number"),
        ("usd_per_gb_hour", True, "usd_per_gb_hour must be a finite number"),
        ("inter_node_bandwidth_bytes_per_s", 0.0, "above 0"),
        ("inter_node_latency_s", -1.0, "inter_node_latency_s must be a finite number"),
    ],
)
def test_an_option_that_is_no_such_number(document, option: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict_frame(document, frame(local_batch_size=[8]), **{option: value})


def copied(folder: Path) -> Path:
    folder.mkdir()
    for name in predictors.PORTABLE_FILES:
        shutil.copy(Path(predictors.__file__).parent / name, folder / name)
    return folder


def test_the_shipped_files_predict_without_this_package(document, tmp_path: Path) -> None:
    """As in a registered model: numpy and pandas alone, in a package of another name."""
    copied(tmp_path / "shipped")
    (tmp_path / "shipped" / "__init__.py").write_text("")
    (tmp_path / "bundle.json").write_text(json.dumps(document))
    script = """
        import json, sys
        import pandas as pd
        from shipped.inference import predict_frame
        document = json.load(open("bundle.json"))
        out = predict_frame(document, pd.DataFrame({"local_batch_size": [8, 300], "nodes": [1, 2]}))
        foreign = {"mlflow_tula", "mlflow", "torch", "scipy", "sklearn"} & set(sys.modules)
        assert not foreign, foreign
        print(out.to_json(double_precision=15))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    there = pd.DataFrame(json.loads(done.stdout))
    here = predict_frame(document, frame(local_batch_size=[8, 300], nodes=[1, 2]))
    for name in QUANTITIES[:4]:
        assert there[name].to_numpy(float) == pytest.approx(
            here[name].to_numpy(float), rel=1e-9, nan_ok=True
        )


def test_two_copies_live_side_by_side(document, tmp_path: Path, monkeypatch) -> None:
    """mlflow 4061, 12377: the code of two model versions clashes in one process."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("first_copy", "second_copy"):
        copied(tmp_path / name)
        (tmp_path / name / "__init__.py").write_text("")
    path = tmp_path / "second_copy" / "formulas.py"
    text = path.read_text("utf-8")
    assert "steps = dataset_size /" in text
    path.write_text(text.replace("steps = dataset_size /", "steps = 2 * dataset_size /"), "utf-8")
    first, second = (
        importlib.import_module(f"{name}.inference").predict_frame(
            document, frame(local_batch_size=[8])
        )
        for name in ("first_copy", "second_copy")
    )
    assert second["epoch_time_s"][0] == pytest.approx(2 * first["epoch_time_s"][0], rel=0.02)
