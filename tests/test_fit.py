from __future__ import annotations

import json
import warnings

import numpy as np
import pandas as pd
import pytest

import mlflow_tula as tula
from mlflow_tula.errors import (
    ExtrapolationWarning,
    InvalidInputError,
    TableError,
    TooFewProbesWarning,
)
from mlflow_tula.table import Measurement

WORKLOAD = tula.Workload(model="m", dataset="d", dataset_size=10_000)
HARDWARE = tula.HardwareSpec(device_type="cuda", device_name="x", device_memory_bytes=2**34)
CONVERGENCE = pd.DataFrame(
    {"global_batch_size": [8, 32, 128, 512], "epochs_to_target": [5.0, 5.2, 6.1, 9.5]}
)


def table(frame: dict) -> tula.ProfileTable:
    return tula.ProfileTable.from_frame(pd.DataFrame(frame), workload=WORKLOAD, hardware=HARDWARE)


def good() -> tula.ProfileTable:
    sizes = np.array([8, 32, 128, 512])
    return table(
        {
            "local_batch_size": sizes,
            "step_time_s": 0.02 + 1e-4 * sizes,
            "peak_memory_bytes": 10**9 + 10**6 * sizes,
        }
    )


def test_a_good_table_fits_without_a_warning_and_reports_what_it_did() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bundle = tula.fit(good())
    report = bundle.report
    assert "floor-and-line" in report.step_time_form
    assert report.memory_form
    assert report.step_time_mape is not None
    assert 0 <= report.step_time_mape < 0.05
    assert report.memory_mape is not None
    assert report.coverage == 1.0
    assert (report.rows_used, report.rows_oom, report.rows_failed) == (4, 0, 0)
    assert report.warnings == ()
    assert bundle.convergence is None


def test_rows_that_did_not_run_are_counted_and_kept_out_of_the_fit() -> None:
    bundle = tula.fit(
        good().with_rows(
            [
                Measurement(local_batch_size=1024, status="oom", reason="CUDA out of memory"),
                Measurement(local_batch_size=64, status="failed", reason="killed"),
            ]
        )
    )
    assert (bundle.report.rows_used, bundle.report.rows_oom, bundle.report.rows_failed) == (4, 1, 1)
    assert bundle.step_time == tula.fit(good()).step_time
    assert bundle.probed.oom == ((1024, 1),)
    with pytest.warns(ExtrapolationWarning, match="1 of 2"):
        out = bundle.predict(pd.DataFrame({"local_batch_size": [512, 1024]}))
    assert out["fits"].tolist() == [True, False]


def test_convergence_as_a_frame_and_as_a_predictor_are_the_same() -> None:
    one = tula.fit(good(), convergence=CONVERGENCE)
    two = tula.fit(good(), convergence=tula.ConvergencePredictor.fit(CONVERGENCE))
    assert one == two
    assert one.report.convergence_form
    assert one.report.convergence_mape is not None


@pytest.mark.parametrize("not_a_table", [None, [], {"local_batch_size": [8]}])
def test_something_else_than_a_table_is_refused(not_a_table) -> None:
    with pytest.raises(InvalidInputError, match=r"ProfileTable\.from_frame"):
        tula.fit(not_a_table)


def test_nothing_but_rows_out_of_memory_is_an_error_that_names_them() -> None:
    rows = [
        Measurement(local_batch_size=size, status="oom", reason="CUDA out of memory")
        for size in (64, 32, 16)
    ]
    empty = tula.ProfileTable(workload=WORKLOAD, hardware=HARDWARE)
    with pytest.raises(TableError, match=r"16, 32, 64 all .* oom .CUDA out of memory.; measure a"):
        tula.fit(empty.with_rows(rows))
    with pytest.raises(TableError, match="no rows: measure at least one"):
        tula.fit(empty)


@pytest.mark.parametrize("time", [0.0, -1.0, np.inf])
def test_zero_negative_and_endless_times_never_reach_the_fit(time: float) -> None:
    with pytest.raises(TableError, match="row 2: step_time_s must be a finite number above 0"):
        table({"local_batch_size": [8, 16], "step_time_s": [0.1, time]})


def test_a_missing_time_never_reaches_the_fit() -> None:
    with pytest.raises(TableError, match="row 1: step_time_s is needed"):
        table({"local_batch_size": [8], "step_time_s": [np.nan]})


@pytest.mark.parametrize("rows", [1, 2])
def test_too_few_rows_warn_and_answer(rows: int) -> None:
    sizes = [8, 32][:rows]
    with pytest.warns(TooFewProbesWarning, match="batch size"):
        bundle = tula.fit(table({"local_batch_size": sizes, "step_time_s": [0.1, 0.2][:rows]}))
    assert any("batch size" in text for text in bundle.report.warnings)
    asked = pd.DataFrame(
        {"local_batch_size": [1, 32, 4096, 10**9], "nodes": [1, 2, 8, 64], "devices_per_node": 4}
    )
    with pytest.warns(ExtrapolationWarning, match="4 of 4"):
        out = bundle.predict(asked)
    for name in ("step_time_s", "step_time_s_lower", "step_time_s_upper"):
        assert np.isfinite(out[name]).all()
        assert (out[name] > 0).all()
    assert out["extrapolated"].tolist() == [True, True, True, True]


def test_rows_in_any_order_give_the_same_bundle_but_for_the_digest() -> None:
    one = good()
    other = tula.ProfileTable(
        workload=WORKLOAD, hardware=HARDWARE, measurements=one.measurements[::-1]
    )
    assert tula.fit(one).step_time == tula.fit(other).step_time


def test_a_fit_says_the_same_twice() -> None:
    texts = {json.dumps(tula.fit(good(), convergence=CONVERGENCE).to_dict()) for _ in range(2)}
    assert len(texts) == 1


def test_the_recorded_table_is_foretold_by_its_own_rows(table_and_held) -> None:
    """Leave each size of the recorded VGG11 sweep out in turn, ends excepted."""
    errors, inside = table_and_held
    assert np.median(errors) < 0.10
    assert np.mean(inside) >= 0.7


@pytest.fixture
def table_and_held(request):
    recorded = request.getfixturevalue("table")
    rows = [row for row in recorded.ok if row.world_size == 1]
    errors, inside = [], []
    for row in sorted(rows, key=lambda one: one.local_batch_size)[1:-1]:
        rest = tula.ProfileTable(
            workload=recorded.workload,
            hardware=recorded.hardware,
            measurements=tuple(other for other in rows if other != row),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bundle = tula.fit(rest)
        out = bundle.predict(pd.DataFrame({"local_batch_size": [row.local_batch_size]}))
        errors.append(abs(out["step_time_s"][0] / row.step_time_s - 1))
        inside.append(out["step_time_s_lower"][0] <= row.step_time_s <= out["step_time_s_upper"][0])
    return errors, inside
