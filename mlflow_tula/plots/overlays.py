"""Measured and predicted values side by side, layout by layout: what figures and runs show.

A layout is (nodes, devices per node, accumulation steps); along a layout only the batch size
changes, so that each is one curve.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mlflow_tula.errors import TulaWarning
from mlflow_tula.predictors.bundle import PredictorBundle
from mlflow_tula.recommend.recommendation import CurvePoint, Recommendation
from mlflow_tula.table import Measurement, ProfileTable

if TYPE_CHECKING:
    import pandas as pd

BEYOND = 4
"""How far past the largest probe a curve is drawn; `fits` is not said further out either."""

_DENSE = 96


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlay:
    """One layout: its measured rows and the predictions along the batch sizes.

    `measured` has the columns of ProfileTable.to_frame, `global_batch_size`, `epoch_time_s`, and
    `error` (predicted over measured step time, less one) for the rows that ran. `predicted` has the
    columns of PredictorBundle.predict. `failed` are the rows that did not run.
    """

    nodes: int
    devices_per_node: int
    accumulation_steps: int
    measured: pd.DataFrame
    predicted: pd.DataFrame
    failed: tuple[Measurement, ...] = ()

    @property
    def name(self) -> str:
        """`1x2` (nodes x devices per node), with `a4` appended where steps accumulate."""
        extra = f"a{self.accumulation_steps}" if self.accumulation_steps > 1 else ""
        return f"{self.nodes}x{self.devices_per_node}{extra}"

    @property
    def label(self) -> str:
        """The layout in words."""
        world = self.nodes * self.devices_per_node
        text = f"{world} device{'s' if world > 1 else ''}"
        if self.nodes > 1:
            text += f" on {self.nodes} nodes"
        if self.accumulation_steps > 1:
            text += f", {self.accumulation_steps} passes a step"
        return text


def overlays(
    table: ProfileTable,
    bundle: PredictorBundle,
    recommendation: Recommendation | None = None,
    *,
    dense: bool = False,
) -> tuple[Overlay, ...]:
    """One Overlay per measured layout, and one for the chosen layout, the fewest devices first.

    Args:
        table: the measurements.
        bundle: the predictors.
        recommendation: the choice; on devices that were not measured it has a prediction only.
        dense: many sizes for a smooth line; else powers of two and the measured sizes.
    """
    known = {_layout(row) for row in table.measurements}
    if recommendation is not None:
        known.add(_layout(recommendation.choice))
    layouts = sorted(known, key=lambda layout: (layout[0] * layout[1], layout))
    return tuple(_curve(table, bundle, layout, dense) for layout in layouts)


def _layout(row: Measurement | CurvePoint) -> tuple[int, int, int]:
    return row.nodes, row.devices_per_node, row.accumulation_steps


def _curve(
    table: ProfileTable, bundle: PredictorBundle, layout: tuple[int, int, int], dense: bool
) -> Overlay:
    """The rows of one layout and the predictions along its batch sizes."""
    rows = [row for row in table.measurements if _layout(row) == layout]
    ran = [row for row in rows if row.status == "ok"]
    return Overlay(
        nodes=layout[0],
        devices_per_node=layout[1],
        accumulation_steps=layout[2],
        measured=_measured(table, bundle, ran),
        predicted=_predicted(
            bundle, _sizes(table, rows or table.measurements, layout, dense), layout
        ),
        failed=tuple(row for row in rows if row.status != "ok"),
    )


def _measured(
    table: ProfileTable, bundle: PredictorBundle, rows: Sequence[Measurement]
) -> pd.DataFrame:
    """The rows that ran, with what follows from them."""
    frame = ProfileTable(
        workload=table.workload, hardware=table.hardware, measurements=tuple(rows)
    ).to_frame()
    samples = [row.global_batch_size for row in rows]
    frame["global_batch_size"] = samples
    if not rows:
        return frame.assign(epoch_time_s=[], error=[])
    names = ["local_batch_size", "nodes", "devices_per_node", "accumulation_steps"]
    answer = _ask(bundle, frame[names])
    # The same steps per epoch as the prediction's, so that the two can be compared.
    steps = answer["epoch_time_s"] / answer["step_time_s"]
    frame["epoch_time_s"] = frame["step_time_s"] * steps
    frame["error"] = answer["step_time_s"] / frame["step_time_s"].astype(float) - 1.0
    return frame


def _predicted(
    bundle: PredictorBundle, sizes: Sequence[int], layout: tuple[int, int, int]
) -> pd.DataFrame:
    """Predictions at these local batch sizes."""
    import pandas as pd

    nodes, devices, accumulation = layout
    frame = pd.DataFrame({"local_batch_size": list(sizes)}).assign(
        nodes=nodes, devices_per_node=devices, accumulation_steps=accumulation
    )
    return _ask(bundle, frame)


def _ask(bundle: PredictorBundle, frame: pd.DataFrame) -> pd.DataFrame:
    """Predict; that a curve runs past the probes is shown by its dashes, not by a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TulaWarning)
        return bundle.predict(frame)


def _sizes(
    table: ProfileTable, rows: Sequence[Measurement], layout: tuple[int, int, int], dense: bool
) -> list[int]:
    """Local batch sizes from the smallest tried to four times the largest, within the dataset."""
    tried = [row.local_batch_size for row in rows]
    parts = math.prod(layout)
    most = max(max(tried), math.ceil(table.workload.dataset_size / parts))
    first, last = min(tried), min(BEYOND * max(tried), most)
    if dense:
        spread = np.geomspace(first, max(last, first), _DENSE).round().astype(int)
        return sorted({*spread.tolist(), *tried})
    powers = [2**n for n in range(64) if first <= 2**n <= last]
    return sorted({*powers, *tried})
