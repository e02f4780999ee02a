"""The cross-model predictor as MLflow loads it: this file, a JSON document and one formula file.

Models-from-code, as pyfunc_model.py: mlflow, numpy and pandas alone, nothing pickled.

    model = mlflow.pyfunc.load_model("models:/tula.anymodel.<hardware>@champion")
    model.predict(pd.DataFrame({"local_batch_size": [8, 64], "features": [text, text]}))

Columns in: `local_batch_size`; `features`, the JSON that `python -m mlflow_tula.probing.counting`
prints for a job. Columns out: seconds with their 90 % interval, and bytes.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from mlflow.pyfunc.model import PythonModel

MAX_DOCUMENT = 64 * 2**20
MAX_FEATURES = 10 * 2**20


class QuestionError(MlflowException, ValueError):  # type: ignore[misc, unused-ignore]
    """A question that cannot be asked, in one sentence; MLflow's server answers it with 400."""

    def __init__(self, message: str) -> None:
        """Take the sentence."""
        super().__init__(" ".join(message.split())[:600], error_code=INVALID_PARAMETER_VALUE)


class AnyModel(PythonModel):
    """Answers one question a row."""

    def load_context(self, context: Any) -> None:
        """Read the document and load the equation."""
        path = Path(context.artifacts["cross_model"])
        if path.stat().st_size > MAX_DOCUMENT:
            raise ValueError(f"{path.name} is larger than {MAX_DOCUMENT // 2**20} MiB; not read")
        self.params = json.loads(path.read_text(encoding="utf-8"))["params"]
        self.formulas = load_formulas(Path(context.artifacts["formulas"]))

    def predict(
        self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        """One row out per row in, same index; QuestionError where one cannot be asked."""
        try:
            rows = [
                self._answer(size, text)
                for size, text in zip(
                    model_input["local_batch_size"], model_input["features"], strict=True
                )
            ]
        except (ValueError, TypeError, OverflowError) as error:
            raise QuestionError(str(error)) from error
        return pd.DataFrame(rows, index=model_input.index)

    def _answer(self, size: Any, text: Any) -> dict[str, float]:
        if not float(size) >= 1 or float(size) != int(size):
            raise ValueError(f"local_batch_size must be a whole number of at least 1, not {size!r}")
        features = read_features(text)
        batch = np.array([float(size)])
        mean, spread = self.formulas.step_time_posterior(self.params, features["operations"], batch)
        half = self.params["half_width_90"] * float(np.sqrt(spread[0, 0]))
        columns = self.formulas.memory_columns(features["peak_lines"], batch)[0]
        memory = self.params["memory"]
        return {
            "step_time_s": float(np.exp(mean[0])),
            "step_time_s_lower": float(np.exp(mean[0] - half)),
            "step_time_s_upper": float(np.exp(mean[0] + half)),
            "allocated_memory_bytes": float(columns @ np.asarray(memory["allocated"])),
            "peak_memory_bytes": float(columns @ np.asarray(memory["peak"])),
        }


def read_features(text: Any) -> Any:
    """The counted kernels of a request; ValueError in one line where they are none."""
    if not isinstance(text, str) or len(text) > MAX_FEATURES:
        raise ValueError(f"features must be JSON text of at most {MAX_FEATURES // 2**20} MiB")
    try:
        found = json.loads(text)
        numbers = ("count", "flops_per_sample", "flops_fixed", "bytes_per_sample", "bytes_fixed")
        sound = all(
            isinstance(one["kind"], str)
            and np.isfinite([float(one[name]) for name in numbers]).all()
            for one in found["operations"]
        ) and all(np.isfinite([float(a), float(b)]).all() for a, b in found["peak_lines"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"features are damaged: {type(error).__name__}: {error}") from error
    if not sound or not found["operations"] or not found["peak_lines"]:
        raise ValueError("features must list operations and peak_lines of finite numbers")
    return found


def load_formulas(path: Path) -> Any:
    """Import the shipped equation; the folder may be the artifact store: no __pycache__ there."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec = importlib.util.spec_from_file_location("tula_cross_model_formulas", path)
        assert spec is not None, "a path of a file always has a spec"
        assert spec.loader is not None, "and a loader"
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.dont_write_bytecode = before


mlflow.models.set_model(AnyModel())
