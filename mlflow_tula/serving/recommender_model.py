"""The recommender as MLflow loads it: this file, run from the model ("models from code").

    mlflow models serve -m models:/tula.recommender@champion --env-manager local

Columns in: recommender.COLUMNS; `model` and `dataset` are needed, or `name`. Out: one decision a
row. The registry is asked when a request comes, so that the model itself never grows old; it is the
one that MLFLOW_REGISTRY_URI or MLFLOW_TRACKING_URI names.

The signature says nothing of the columns: MLflow would drop a misspelt one in silence, and answer a
text in the place of a number with a traceback. All of that is checked here.
"""

from __future__ import annotations

import os
from typing import Any

import mlflow
import pandas as pd
from mlflow.pyfunc.model import PythonModel

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.serving.faults import as_request_errors
from mlflow_tula.serving.questions import records
from mlflow_tula.serving.recommender import Recommender
from mlflow_tula.serving.scoring_guard import guard

_SCORING_SERVER = "__pyfunc_model_path__"
"""Set by `mlflow models serve` for its workers."""


class ServedRecommender(PythonModel):
    """Answers one question a row."""

    def load_context(self, context: Any) -> None:
        """An empty memory; in a scoring server, see to refusals, retries and champions too."""
        self.recommender = Recommender()
        if _SCORING_SERVER in os.environ:
            guard(self.recommender.answer)
            self.recommender.catalogue.warm()
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")

    def predict(
        self,
        context: Any,
        model_input: pd.DataFrame,
        params: dict[str, Any] | None = None,
    ) -> pd.DataFrame:
        """One row out per row in, same index.

        Raises:
            MlflowException: a request that cannot be answered, in one sentence.
        """
        with as_request_errors():
            if params:
                raise InvalidInputError(
                    f"the recommender takes columns, no params: {', '.join(map(str, params))[:80]}"
                )
            frame = as_frame(model_input)
            rows = self.recommender.answer(records(frame))
            # Objects, so that "not known" is null in JSON and not the NaN that JSON lacks.
            return pd.DataFrame(rows, index=frame.index, dtype=object)


def as_frame(given: Any) -> pd.DataFrame:
    """The questions as a frame: `inputs` and `instances` of a request come as other types."""
    if isinstance(given, pd.DataFrame):
        return given
    if isinstance(given, dict) and given:
        several = all(getattr(v, "ndim", 0) or isinstance(v, list | tuple) for v in given.values())
        plain = {key: v.tolist() if hasattr(v, "tolist") else v for key, v in given.items()}
        try:
            return pd.DataFrame(plain if several else [plain])
        except ValueError as error:
            raise InvalidInputError(
                f"the columns of a request differ in length: {error}"
            ) from error
    if isinstance(given, list) and given and all(isinstance(one, dict) for one in given):
        return pd.DataFrame(given)
    raise InvalidInputError(
        'send {"dataframe_records": [{"model": "vgg11", "dataset": "cifar100", ...}]}'
    )


mlflow.models.set_model(ServedRecommender())
