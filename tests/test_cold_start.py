"""Models that never ran here: real profiles of this repository, one model left out at a time."""

import dataclasses
import json
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from mlflow_tula.cold_start import Elsewhere, best_probe, cold_bundle, halving_probe
from mlflow_tula.errors import InvalidInputError, SchemaError, TulaWarning
from mlflow_tula.model_features import ModelFeatures
from mlflow_tula.predictors import cross_model_formulas as formulas
from mlflow_tula.predictors.bundle import PredictorBundle
from mlflow_tula.predictors.cross_model import CrossModelPredictor
from mlflow_tula.predictors.transfer import Transfer
from mlflow_tula.recommend import recommend
from mlflow_tula.specs import ClusterSpec
from mlflow_tula.table import ProfileTable

PROFILES = Path(__file__).parent.parent / "benchmarks" / "results" / "cold_start"
NAMES = ("resnet18", "resnet34", "mobilenet_v3_small", "shufflenet_v2_x1_0", "vgg11", "vgg13")

pytestmark = pytest.mark.filterwarnings("ignore::mlflow_tula.errors.TulaWarning")
Row = tuple[ModelFeatures, ProfileTable]


def profile_of(name: str, size: int = 32) -> Row:
    table = ProfileTable.from_dict(json.loads((PROFILES / f"{name}-{size}.json").read_text()))
    assert table.features is not None
    return table.features, table


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [profile_of(name, size) for name in NAMES for size in (32, 64)]


@pytest.fixture(scope="module")
def known(rows: list[Row]) -> CrossModelPredictor:
    """Everything but ResNet34."""
    return CrossModelPredictor.fit([row for row in rows if row[1].workload.model != "resnet34"])


def test_a_left_out_model_is_predicted_from_the_others(known: CrossModelPredictor) -> None:
    features, table = profile_of("resnet34", 64)
    sizes = np.array([row.local_batch_size for row in table.ok], float)
    seen = np.log([row.step_time_s for row in table.ok])
    mean, covariance = known.log_step_time(features, sizes)
    assert np.median(np.abs(np.expm1(mean - seen))) < 0.25
    assert (np.abs(mean - seen) < 3 * np.sqrt(np.diag(covariance))).all()
    allocated, _, _ = known.memory(features, sizes)
    real = np.array([row.allocated_memory_bytes for row in table.ok], float)
    assert np.median(np.abs(allocated / real - 1)) < 0.02


def test_an_own_probe_narrows_the_answer_and_moves_it(known: CrossModelPredictor) -> None:
    features, table = profile_of("resnet34")
    at = np.array([32.0])
    probe = dataclasses.replace(
        table, measurements=tuple(r for r in table.ok if r.local_batch_size == 32)
    )
    _, before = known.log_step_time(features, at)
    after, doubt = known.log_step_time(features, at, probe)
    assert doubt[0, 0] < before[0, 0] / 4
    assert np.exp(after[0]) == pytest.approx(probe.ok[0].step_time_s, rel=0.1)


def test_distance_from_what_was_seen_widens_the_answer(known: CrossModelPredictor) -> None:
    features, _ = profile_of("resnet34")
    like = known.log_step_time(features, np.array([32.0]))[1][0, 0]
    strange = ModelFeatures(
        operations=tuple(
            dataclasses.replace(one, kind="depthwise_convolution", flops_per_sample=1e9)
            for one in features.operations
            if one.kind == "convolution"
        ),
        peak_lines=features.peak_lines,
    )
    assert known.log_step_time(strange, np.array([32.0]))[1][0, 0] > 1.5 * like


def test_the_slopes_are_the_derivatives() -> None:
    features, _ = profile_of("mobilenet_v3_small")
    columns = formulas.work(features.to_dict()["operations"], np.array([8.0, 100.0]))
    theta = np.linspace(-28.0, -5.0, len(formulas.NAMES))
    value, slopes = formulas.log_step_time(theta, columns)
    for index in range(len(theta)):
        moved = theta.copy()
        moved[index] += 1e-6
        numeric = (formulas.log_step_time(moved, columns)[0] - value) / 1e-6
        assert slopes[:, index] == pytest.approx(numeric, abs=1e-5)


def test_a_cold_bundle_recommends_and_says_what_it_is(known: CrossModelPredictor) -> None:
    features, table = profile_of("resnet34")
    bundle = cold_bundle(known, features, table.workload)
    choice = recommend(bundle, cluster=ClusterSpec())
    assert any("never profiled here: predicted from 5 other" in text for text in choice.warnings)
    assert all(point.extrapolated for point in choice.curve)
    again = PredictorBundle.from_dict(json.loads(json.dumps(bundle.to_dict())))
    frame = pd.DataFrame({"local_batch_size": [8, 64]})
    pd.testing.assert_frame_equal(again.predict(frame), bundle.predict(frame))
    nothing = recommend(bundle, cluster=ClusterSpec(), memory_limit_bytes=2e9)
    assert nothing.global_batch_size <= choice.global_batch_size


def test_what_ran_is_no_extrapolation_and_is_not_planned_again(known: CrossModelPredictor) -> None:
    features, table = profile_of("resnet34")
    probe = dataclasses.replace(
        table, measurements=tuple(r for r in table.ok if r.local_batch_size == 64)
    )
    bundle = cold_bundle(known, features, table.workload, probes=probe)
    out = bundle.predict(pd.DataFrame({"local_batch_size": [32, 64]}))
    assert out["extrapolated"].tolist() == [True, False]
    assert "and 1 own probe" in bundle.report.warnings[0]
    plan = best_probe(known, features, bundle, around=64, seconds=60.0, probes=probe)
    assert plan is not None
    assert plan.local_batch_size != 64
    # What is left is the noise of a trial: no other single probe halves that.
    assert halving_probe(known, features, bundle, around=64, probes=probe) is None


def test_what_was_inexact_about_the_count_is_a_warning(known: CrossModelPredictor) -> None:
    features, table = profile_of("resnet34")
    told = dataclasses.replace(features, problem="meta: a branch on a value")
    bundle = cold_bundle(known, told, table.workload)
    assert bundle.report.warnings[1] == "kernels not counted as usual: meta: a branch on a value"


def test_the_probe_of_most_value_is_near_the_choice_and_within_its_time(
    known: CrossModelPredictor,
) -> None:
    features, table = profile_of("resnet34")
    bundle = cold_bundle(known, features, table.workload)
    plan = best_probe(known, features, bundle, around=64, seconds=60.0)
    assert plan is not None
    assert plan.local_batch_size in (32, 64, 128)
    assert best_probe(known, features, bundle, around=64, seconds=0.001) is None
    half = halving_probe(known, features, bundle, around=64)
    before = np.sqrt(known.log_step_time(features, np.array([64.0]))[1][0, 0])
    assert half is not None
    assert half.relative_interval <= before / 2


def test_too_few_models_and_uncounted_kernels_are_refused(
    rows: list[Row], known: CrossModelPredictor
) -> None:
    with pytest.raises(InvalidInputError, match="at least 3 profiled models"):
        CrossModelPredictor.fit(rows[:4])
    _, table = profile_of("resnet34")
    with pytest.raises(InvalidInputError, match="could not be counted"):
        cold_bundle(known, ModelFeatures(problem="a branch"), table.workload)
    moved = dataclasses.replace(rows[0][1].hardware, device_name="another", torch_version="9.9")
    other = [(rows[0][0], dataclasses.replace(rows[0][1], hardware=moved)), *rows[1:]]
    with pytest.raises(InvalidInputError, match="different hardware"):
        CrossModelPredictor.fit(other)


def test_the_predictor_round_trips_and_refuses_damage(known: CrossModelPredictor) -> None:
    document = json.loads(json.dumps(known.to_dict()))
    assert CrossModelPredictor.from_dict(document).to_dict() == known.to_dict()
    document["params"]["log_theta"][0] = None
    with pytest.raises(SchemaError, match="is damaged"):
        CrossModelPredictor.from_dict(document)


def test_a_models_own_pace_travels_to_hardware_twice_as_fast(rows: list[Row]) -> None:
    # The same machine, every time halved but for noise of each row: a pace of its own travels.
    noise = np.random.default_rng(0)
    away = dataclasses.replace(rows[0][1].hardware, device_name="slow one")
    there = [
        (
            features,
            dataclasses.replace(
                table,
                hardware=away,
                measurements=tuple(
                    dataclasses.replace(
                        row, step_time_s=2 * (row.step_time_s or 0.0) * noise.normal(1.0, 0.01)
                    )
                    for row in table.ok
                ),
            ),
        )
        for features, table in rows
    ]
    mine = [row for row in rows if row[1].workload.model != "vgg13"]
    theirs = [row for row in there if row[1].workload.model != "vgg13"]
    how = Transfer.fit(mine, theirs)
    assert how.rho > 0.7
    here, other = CrossModelPredictor.fit(mine), CrossModelPredictor.fit(theirs)
    features, table = next(row for row in there if row[1].workload.model == "vgg13")
    elsewhere = Elsewhere(table=table, known=other, how=how)
    bundle = cold_bundle(here, features, table.workload, elsewhere=elsewhere)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TulaWarning)
        out = bundle.predict(
            pd.DataFrame({"local_batch_size": [r.local_batch_size for r in table.ok]})
        )
    real = [
        row.step_time_s
        for other_table in (t for _, t in rows if t.workload == table.workload)
        for row in other_table.ok
    ]
    assert out["step_time_s"].to_numpy() == pytest.approx(real, rel=0.2)
    assert "transferred from" in bundle.report.warnings[0]
    with pytest.raises(InvalidInputError, match="at least 2 models profiled on both"):
        Transfer.fit(mine[:1], theirs)
