"""`mlflow.models.evaluate(model, table.to_frame(), model_type="tula", evaluators="tula")`.

Evaluates a predictor on a profile table: mape, coverage and regret as metrics (evaluation.py says
what they mean), a figure of the residuals and the rows. MLflow itself logs the metrics where it
knows the logged model, and the evaluator only where it does not.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from mlflow.models.evaluation.base import ModelEvaluator

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from mlflow.models import EvaluationResult

MODEL_TYPE = "tula"
_logger = logging.getLogger(__name__)


class PredictorEvaluator(ModelEvaluator):  # type: ignore[misc, unused-ignore]
    """Compares a registered predictor with measured rows."""

    @classmethod
    def can_evaluate(cls, *, model_type: str, evaluator_config: Any, **kwargs: Any) -> bool:
        """`tula`, and any regressor: `evaluate` steps aside for those that are no predictor."""
        return model_type in (MODEL_TYPE, "regressor")

    def evaluate(
        self,
        *,
        model_type: str,
        dataset: Any,
        run_id: str,
        evaluator_config: Any = None,
        model: Any = None,
        model_id: str | None = None,
        **kwargs: Any,
    ) -> EvaluationResult | None:
        """Predict for every row of the dataset, compare, and log.

        Returns:
            Metrics and artifacts; None for a regressor that does not predict step times, which is
            not for this evaluator.

        Raises:
            MlflowException: a model or data that cannot be compared, when `tula` was asked for.
        """
        import mlflow
        from mlflow.exceptions import MlflowException

        from mlflow_tula.registry.evaluation import evaluate

        try:
            measured = _measured(dataset)
            predicted = _predicted(model, measured)
        except ValueError as error:
            if model_type != MODEL_TYPE:
                return None
            raise MlflowException.invalid_parameter_value(str(error)) from error
        metrics = evaluate(predicted, measured).metrics()
        if model_id is None:
            # MLflow finds it in `models:/<id>` alone, not in a registered name, and logs only then.
            mlflow.log_metrics(metrics, run_id=run_id, model_id=getattr(model, "model_id", None))
        return _result(metrics, predicted, measured, run_id)


def _measured(dataset: Any) -> pd.DataFrame:
    """Configuration and measured columns of the rows that ran, as `evaluation.evaluate` takes them.

    Raises:
        ValueError: a column that is missing or holds no numbers.
    """
    import pandas as pd

    from mlflow_tula.registry.evaluation import CONFIGURATION, QUANTITIES

    frame = dataset.features_data
    if not isinstance(frame, pd.DataFrame):
        raise ValueError("the data must be a pandas DataFrame, such as ProfileTable.to_frame()")
    frame = frame.copy()
    if dataset.has_targets:
        frame[dataset.targets_name] = dataset.labels_data
    if "status" in frame:
        frame = frame[frame["status"] == "ok"]
    if "step_time_s" not in frame:
        raise ValueError(f"the data must have a column step_time_s, not only {list(frame.columns)}")
    if frame.empty:
        raise ValueError("the data must have at least one row that ran (status ok)")
    for name in CONFIGURATION[1:]:
        frame[name] = _whole(frame[name]) if name in frame else 1
    if "global_batch_size" not in frame:
        if "local_batch_size" not in frame:
            raise ValueError("the data must have a column local_batch_size or global_batch_size")
        parts = frame["nodes"] * frame["devices_per_node"] * frame["accumulation_steps"]
        frame["global_batch_size"] = _whole(frame["local_batch_size"]) * parts
    frame["global_batch_size"] = _whole(frame["global_batch_size"])
    columns = [*CONFIGURATION, *(name for name in QUANTITIES if name in frame)]
    return frame[columns].reset_index(drop=True)


def _whole(column: pd.Series[Any]) -> pd.Series[Any]:
    """A column of whole numbers as MLflow's signature wants them."""
    try:
        if (column != column.astype("int64")).any():
            raise ValueError("fractions")
        return column.astype("int64")
    except (TypeError, ValueError) as error:
        raise ValueError(f"column {column.name} must hold whole numbers") from error


def _predicted(model: Any, measured: pd.DataFrame) -> pd.DataFrame:
    """The model's answers.

    Raises:
        ValueError: it gives no step times.
    """
    import pandas as pd

    from mlflow_tula.registry.evaluation import CONFIGURATION

    if model is None:
        raise ValueError("the model must be a registered predictor, not None")
    try:
        predicted = model.predict(measured[list(CONFIGURATION)])
    except Exception as error:
        raise ValueError(f"the model cannot answer this table: {error}") from error
    if not isinstance(predicted, pd.DataFrame) or "step_time_s" not in predicted:
        raise ValueError("the model must predict a column step_time_s, as registered predictors do")
    return predicted.reset_index(drop=True)


def _result(
    metrics: dict[str, float],
    predicted: pd.DataFrame,
    measured: pd.DataFrame,
    run_id: str,
) -> EvaluationResult:
    """Log the figure and the rows once, and hand both to the caller."""
    import tempfile
    from pathlib import Path

    from mlflow import MlflowClient
    from mlflow.models import EvaluationResult
    from mlflow.models.evaluation.artifacts import CsvEvaluationArtifact, ImageEvaluationArtifact

    client = MlflowClient()
    rows = measured.join(predicted.drop(columns=measured.columns, errors="ignore"))
    for name in ("step_time_s", "peak_memory_bytes"):
        if name in predicted:
            rows[f"{name}_predicted"] = predicted[name]
    folder = "tula_evaluation"
    with tempfile.TemporaryDirectory(prefix="tula-") as scratch:
        picture, table = Path(scratch) / "residuals.png", Path(scratch) / "rows.csv"
        _figure(predicted, measured).savefig(picture, dpi=110)
        rows.to_csv(table, index=False)
        for path in (picture, table):
            client.log_artifact(run_id, str(path), folder)
        root = f"{client.get_run(run_id).info.artifact_uri}/{folder}"
        image = ImageEvaluationArtifact(uri=f"{root}/residuals.png")
        image._load(str(picture))
        csv = CsvEvaluationArtifact(uri=f"{root}/rows.csv", content=rows)
    return EvaluationResult(metrics=metrics, artifacts={"residuals": image, "rows": csv})


def _figure(predicted: pd.DataFrame, measured: pd.DataFrame) -> Figure:
    """Predicted over measured step time less one, in percent, with the interval as a bar."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from mlflow_tula.plots.panels import batch_axis

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.axhline(0.0, color="0.4", linewidth=0.8)
    truth = measured["step_time_s"].astype(float)
    worlds = measured["nodes"] * measured["devices_per_node"]
    for number, world in enumerate(sorted(worlds.unique())):
        mine = worlds == world
        error, *ends = (
            100 * (predicted.loc[mine, name].astype(float) / truth[mine] - 1.0)
            for name in ("step_time_s", "step_time_s_lower", "step_time_s_upper")
            if name in predicted
        )
        # A little apart, or the bars of one size would hide each other.
        axes.errorbar(
            measured.loc[mine, "global_batch_size"] * 1.04**number,
            error,
            yerr=[abs(error - end) for end in ends] if len(ends) == 2 else None,
            fmt="o",
            capsize=3,
            label=f"{world} device{'s' if world > 1 else ''}",
        )
    axes.set_title("step time: predictions with their interval against measurements")
    axes.set_ylabel("predicted / measured - 1, %")
    sizes = sorted({int(size) for size in measured["global_batch_size"]})
    batch_axis(axes, "global batch size, samples", sizes)
    axes.legend()
    return figure
