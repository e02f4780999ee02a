"""`mlflow.models.evaluate` of a predictor on a profile table, and the numbers behind it."""

from __future__ import annotations

import mlflow
import numpy as np
import pandas as pd
import pytest
from mlflow.exceptions import MlflowException
from mlflow.models import MetricThreshold

from mlflow_tula.registry import load, load_table
from mlflow_tula.registry.evaluation import Evaluation, evaluate, evaluate_bundle, measured_frame

pytestmark = pytest.mark.filterwarnings("ignore::mlflow_tula.errors.TulaWarning")


def questions(sizes, nodes=1) -> pd.DataFrame:
    return pd.DataFrame(
        {"global_batch_size": sizes, "nodes": nodes, "devices_per_node": 1, "accumulation_steps": 1}
    )


def test_error_and_coverage_by_hand() -> None:
    measured = questions([8, 16]).assign(step_time_s=[1.0, 2.0], peak_memory_bytes=[100.0, np.nan])
    predicted = pd.DataFrame(
        {
            "step_time_s": [1.1, 1.6],
            "step_time_s_lower": [0.9, 1.5],
            "step_time_s_upper": [1.3, 1.7],
            "peak_memory_bytes": [125.0, 50.0],
        }
    )
    found = evaluate(predicted, measured)
    assert found.mape == pytest.approx((0.1 + 0.2) / 2)
    assert found.coverage == 0.5
    assert (found.rows, found.memory_rows) == (2, 1)
    assert found.memory_mape == pytest.approx(0.25)
    assert found.memory_coverage is None
    assert Evaluation.from_dict(found.to_dict()) == found


def test_regret_is_what_the_wrong_choice_costs() -> None:
    # Per sample: 1/8, 1/16, 1.2/32 measured; the predictions think that 16 is best.
    measured = questions([8, 16, 32]).assign(step_time_s=[1.0, 1.0, 1.2])
    predicted = pd.DataFrame({"step_time_s": [1.0, 0.9, 4.0]})
    found = evaluate(predicted, measured)
    assert found.regret == found.regret_worst == pytest.approx((1.0 / 16) / (1.2 / 32) - 1)
    assert evaluate(measured, measured).regret == 0.0


def test_layouts_do_not_compete_and_one_size_has_no_choice() -> None:
    two = pd.concat([questions([8, 16]), questions([16, 32], nodes=2)], ignore_index=True)
    measured = two.assign(step_time_s=[1.0, 1.0, 1.0, 1.0])
    predicted = pd.DataFrame({"step_time_s": [1.0, 1.0, 1.0, 9.0]})
    assert evaluate(predicted, measured).regret == pytest.approx(0.5)
    alone = questions([8]).assign(step_time_s=[1.0])
    assert evaluate(alone, alone).regret is None


def test_a_bundle_on_its_own_table(table, bundle) -> None:
    found = evaluate_bundle(bundle, table.measurements)
    assert found.rows == len(table.ok)
    assert found.mape is not None
    assert found.mape < 0.1
    assert evaluate_bundle(bundle, []) == Evaluation(rows=0)
    assert len(measured_frame(table.measurements)) == len(table.ok)


def test_mlflow_evaluates_a_registered_predictor(registered: str) -> None:
    frame = load_table(registered).to_frame()
    with mlflow.start_run() as run:
        result = mlflow.models.evaluate(
            f"models:/{registered}@champion", frame, model_type="tula", evaluators="tula"
        )
    own = evaluate_bundle(load(registered), load_table(registered).measurements)
    assert result.metrics == pytest.approx(own.metrics())
    done = mlflow.get_run(run.info.run_id)
    assert done.data.metrics == pytest.approx(own.metrics())
    client = mlflow.MlflowClient()
    files = {one.path for one in client.list_artifacts(run.info.run_id, "tula_evaluation")}
    assert files == {"tula_evaluation/residuals.png", "tula_evaluation/rows.csv"}
    assert result.artifacts["residuals"].content.size[0] > 500
    assert set(result.artifacts["rows"].content) >= {"step_time_s", "step_time_s_predicted"}
    assert done.inputs.dataset_inputs
    # The numbers stand on the logged model too, once.
    model_id = mlflow.pyfunc.load_model(f"models:/{registered}@champion").model_id
    found = [(one.key, one.value) for one in client.get_logged_model(model_id).metrics or ()]
    mine = [(key, value) for key, value in found if key in result.metrics]
    assert dict(mine) == pytest.approx(result.metrics)
    assert len(mine) == len(result.metrics)


def test_a_loaded_model_is_evaluated_once(registered: str) -> None:
    model = mlflow.pyfunc.load_model(f"models:/{registered}/1")
    with mlflow.start_run() as run:
        result = mlflow.models.evaluate(
            model, load_table(registered).to_frame(), model_type="tula", evaluators="tula"
        )
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "mape")
    assert [one.value for one in history] == [pytest.approx(result.metrics["mape"])]


def test_the_result_passes_through_mlflows_gate(registered: str) -> None:
    frame = load_table(registered).to_frame()
    with mlflow.start_run():
        result = mlflow.models.evaluate(
            f"models:/{registered}/3", frame, model_type="tula", evaluators="tula"
        )
    good = {"mape": MetricThreshold(threshold=0.1, greater_is_better=False)}
    mlflow.validate_evaluation_results(good, result)
    with pytest.raises(MlflowException, match="mape"):
        mlflow.validate_evaluation_results(
            {"mape": MetricThreshold(threshold=1e-9, greater_is_better=False)}, result
        )


def test_targets_and_a_plain_function_will_do(registered: str, bundle) -> None:
    frame = load_table(registered).to_frame()[
        ["local_batch_size", "devices_per_node", "step_time_s"]
    ]
    frame = frame.dropna()
    with mlflow.start_run() as run:
        result = mlflow.models.evaluate(
            bundle.predict, frame, model_type="tula", targets="step_time_s", evaluators="tula"
        )
    assert result.metrics["rows"] == len(frame)
    assert "memory_mape" not in result.metrics
    logged = mlflow.get_run(run.info.run_id).data.metrics
    assert logged["mape"] == pytest.approx(result.metrics["mape"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.drop(columns="step_time_s"), "must have a column step_time_s"),
        (lambda f: f.drop(columns="local_batch_size"), "local_batch_size or global_batch_size"),
        (lambda f: f.assign(local_batch_size=8.5), "local_batch_size must hold whole numbers"),
        (lambda f: f.assign(status="oom"), "at least one row that ran"),
        (lambda f: f.assign(local_batch_size=-8), "the model cannot answer"),
    ],
)
def test_bad_data_is_one_sentence(registered: str, change, message: str) -> None:
    frame = change(load_table(registered).to_frame())
    with mlflow.start_run(), pytest.raises(MlflowException, match=message) as caught:
        mlflow.models.evaluate(
            f"models:/{registered}/3", frame, model_type="tula", evaluators="tula"
        )
    assert "\n" not in caught.value.message


def test_other_peoples_regressors_are_left_alone(store) -> None:
    data = pd.DataFrame({"x": [1.0, 2.0, 3.0], "y": [2.0, 4.0, 6.0]})
    with mlflow.start_run() as run:
        result = mlflow.models.evaluate(
            lambda frame: 2.0 * frame["x"],
            data,
            model_type="regressor",
            targets="y",
            evaluator_config={"log_explainer": False, "log_model_explainability": False},
        )
    assert result.metrics["mean_absolute_error"] == 0.0
    assert "mape" not in result.metrics
    assert not mlflow.MlflowClient().list_artifacts(run.info.run_id, "tula_evaluation")
