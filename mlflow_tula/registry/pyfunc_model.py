"""The registered predictor as MLflow loads it: this file, a JSON document and the formulas.

MLflow copies this script into the model and runs it there ("models from code"), so nothing is
pickled. It imports mlflow, numpy and pandas alone and loads without torch and without mlflow_tula:
the files that hold the equations lie beside it as artifacts, under a package name made from their
content, so that predictors of different releases live side by side in one process.

    model = mlflow.pyfunc.load_model("models:/tula.vgg11.digits.<hardware>@champion")
    model.predict(pd.DataFrame({"global_batch_size": [32, 64]}), params={"epochs": 10.0})

Columns in: `global_batch_size`; optional `nodes`, `devices_per_node`, `accumulation_steps` (1).
Parameters: those of PARAMETERS; -1 means "not given". Columns out: README of `tula`, one row per
row in, same index.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from mlflow.pyfunc.model import PythonModel

NOT_GIVEN = -1.0
MAX_BYTES = 64 * 2**20
PARAMETERS: dict[str, tuple[str, float]] = {
    "level": ("double", 0.9),  # probability of the intervals
    "memory_limit_bytes": ("double", NOT_GIVEN),  # what a device may use; its memory
    "dataset_size": ("long", NOT_GIVEN),  # training samples; the profiled workload's
    "epochs": ("double", NOT_GIVEN),  # what cost_usd pays for; one
    "usd_per_device_hour": ("double", NOT_GIVEN),
    "usd_per_gb_hour": ("double", NOT_GIVEN),  # GB (1e9 bytes) of peak memory
}
"""Name, MLflow type and default of each parameter of `predict`."""

COLUMNS: dict[str, bool] = {
    "global_batch_size": True,
    "nodes": False,
    "devices_per_node": False,
    "accumulation_steps": False,
}
"""Input columns, all of MLflow type `long`, and whether they are required."""


class QuestionError(MlflowException, ValueError):  # type: ignore[misc, unused-ignore]
    """A question that cannot be asked, in one sentence.

    MLflow's server answers a bare ValueError with a stack trace, and an MlflowException with 400;
    but it puts the whole request in front of the message, which therefore stays what it was.
    """

    def __init__(self, message: str) -> None:
        """Take the sentence."""
        self._sentence = " ".join(message.split())[:600]
        super().__init__(self._sentence, error_code=INVALID_PARAMETER_VALUE)

    @property
    def message(self) -> str:
        """The sentence."""
        return self._sentence

    @message.setter
    def message(self, text: str) -> None:
        """Keep the sentence."""

    def __str__(self) -> str:
        """The sentence."""
        return self._sentence


class Predictor(PythonModel):
    """Answers one question a row from `bundle.json`, with the equations shipped beside it."""

    def load_context(self, context: Any) -> None:
        """Read the document and load the equations."""
        self.bundle = read_bundle(Path(context.artifacts["bundle"]))
        self.inference = load_formulas(Path(context.artifacts["predictors"]))
        self.inference.check_bundle(self.bundle)

    def predict(
        self,
        context: Any,
        model_input: pd.DataFrame,
        params: dict[str, Any] | None = None,
    ) -> pd.DataFrame:
        """One row out per row in, same index.

        Raises:
            QuestionError: a question that cannot be asked; a ValueError.
        """
        try:
            return self._answer(model_input, params or {})
        except ValueError as error:
            raise QuestionError(str(error)) from error

    def _answer(self, model_input: pd.DataFrame, params: Mapping[str, Any]) -> pd.DataFrame:
        """The equations' answer."""
        for name in COLUMNS:
            # A missing optional value of a row that came as JSON is "not given", and so 1.
            if name in model_input and name != "global_batch_size":
                column = model_input[name]
                if len(column) and column.isna().all():
                    model_input = model_input.drop(columns=name)
        answer = self.inference.predict_frame(self.bundle, model_input, **given(params))
        assert isinstance(answer, pd.DataFrame)
        return answer


def read_bundle(path: Path) -> Any:
    """The plain values of a JSON file; ValueError in one line where it is none."""
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path.name} is larger than {MAX_BYTES // 2**20} MiB; not read")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0][:200]
        raise ValueError(f"{path.name} of this model is damaged: {reason}") from error


def given(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that were given, checked; ValueError in one line."""
    out: dict[str, Any] = {}
    for name, value in params.items():
        if name not in PARAMETERS:
            raise ValueError(
                f"unknown parameter {str(name)[:60]!r}: known are {', '.join(PARAMETERS)}"
            )
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{name} must be a number, not {str(value)[:60]!r}") from error
        if not math.isfinite(number):
            raise ValueError(f"{name} must be finite, not {value!r} (leave it out, or give -1)")
        if number != NOT_GIVEN:
            out[name] = int(number) if PARAMETERS[name][0] == "long" else number
    return out


def load_formulas(folder: Path) -> Any:
    """Import `inference` from `folder` as part of a package of its own.

    The package's name is the digest of its files: equal files are imported once, and two
    predictors of different releases cannot get each other's equations.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    name = f"tula_formulas_{digest.hexdigest()[:16]}"
    if f"{name}.inference" not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    before = sys.dont_write_bytecode
    # The folder may be the artifact store itself: leave no __pycache__ in it.
    sys.dont_write_bytecode = True
    try:
        return importlib.import_module(f"{name}.inference")
    finally:
        sys.dont_write_bytecode = before


mlflow.models.set_model(Predictor())
