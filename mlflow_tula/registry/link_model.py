"""A registered link as MLflow loads it: this file and a JSON document, like `pyfunc_model.py`.

    model = mlflow.pyfunc.load_model("models:/tula.link.<hardware>@champion")
    model.predict(pd.DataFrame({"message_bytes": [44_700_000], "nodes": [2]}))

Columns in: `message_bytes`; optional `nodes`, `devices_per_node`, `num_messages` (1). Out: the
seconds of one all-reduce, `time_s`, NaN where the link that it needs was not measured.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
from mlflow.pyfunc.model import PythonModel


class LinkPredictor(PythonModel):
    """Latency and bandwidth of each link class of one hardware."""

    def load_context(self, context: Any) -> None:
        """Read the document."""
        document = json.loads(Path(context.artifacts["link"]).read_text(encoding="utf-8"))
        self.links = document["links"]

    def predict(
        self,
        context: Any,
        model_input: pd.DataFrame,
        params: dict[str, Any] | None = None,
    ) -> pd.DataFrame:
        """One row out per row in: `latency k log2(n) + 2 (n - 1) / n bytes / bandwidth`, summed."""
        ones = np.ones(len(model_input))
        columns = {
            name: model_input[name].to_numpy(float) if name in model_input else ones
            for name in ("message_bytes", "nodes", "devices_per_node", "num_messages")
        }
        seconds = np.zeros(len(model_input))
        for scope, name in (("inter_node", "nodes"), ("intra_node", "devices_per_node")):
            count, link = columns[name], self.links.get(scope)
            if link is None:
                seconds = np.where(count > 1, np.nan, seconds)
                continue
            seconds = seconds + link["latency_s"] * columns["num_messages"] * np.log2(count)
            ring = 2.0 * (count - 1.0) / count * columns["message_bytes"]
            seconds = seconds + ring / link["bandwidth_bytes_per_s"]
        return pd.DataFrame({"time_s": seconds}, index=model_input.index)


mlflow.models.set_model(LinkPredictor())
