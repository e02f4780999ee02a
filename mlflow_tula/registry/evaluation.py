"""Predictions against measurements: error, coverage of the intervals, regret of the choice.

    mape      mean of |predicted / measured - 1| over rows
    coverage  share of measured values inside their interval
    regret    measured time of the size that the predictions would choose, over that of the best
              size measured, less one; one value for each layout (nodes x devices) of two sizes
              or more

A low error and a good choice are different goals (regret is what a person pays), so both
are given. All of them are fractions.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mlflow_tula.errors import TulaWarning
from mlflow_tula.predictors.bundle import PredictorBundle
from mlflow_tula.specs import Spec
from mlflow_tula.table import Measurement

if TYPE_CHECKING:
    import pandas as pd

CONFIGURATION = ("global_batch_size", "nodes", "devices_per_node", "accumulation_steps")
"""Columns that say what was run."""

QUANTITIES = ("step_time_s", "peak_memory_bytes")
"""Columns that are compared."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation(Spec):
    """How well predictions agree with measured rows; None where there was nothing to compare."""

    rows: int
    mape: float | None = None
    median_ape: float | None = None
    p90_ape: float | None = None
    coverage: float | None = None
    regret: float | None = None
    regret_worst: float | None = None
    memory_rows: int = 0
    memory_mape: float | None = None
    memory_coverage: float | None = None

    def metrics(self) -> dict[str, float]:
        """The numbers that are known, by name."""
        return {name: float(value) for name, value in self.to_dict().items() if value is not None}


def measured_frame(rows: Iterable[Measurement]) -> pd.DataFrame:
    """The rows that ran, as questions (CONFIGURATION) beside what was measured (QUANTITIES)."""
    import pandas as pd

    names = (*CONFIGURATION, *QUANTITIES)
    ran = [row for row in rows if row.status == "ok"]
    return pd.DataFrame(
        [{name: getattr(row, name) for name in names} for row in ran], columns=names
    )


def evaluate_bundle(bundle: PredictorBundle, rows: Iterable[Measurement]) -> Evaluation:
    """Ask a bundle for every row that ran, and compare."""
    measured = measured_frame(rows)
    if measured.empty:
        return Evaluation(rows=0)
    return evaluate(ask(bundle, measured), measured)


def ask(bundle: PredictorBundle, measured: pd.DataFrame) -> pd.DataFrame:
    """A bundle's predictions for the rows of `measured_frame`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TulaWarning)
        return bundle.predict(measured[list(CONFIGURATION)].astype("int64"))


def evaluate(predicted: pd.DataFrame, measured: pd.DataFrame) -> Evaluation:
    """Compare predictions with measurements, row by row.

    Args:
        predicted: what `PredictorBundle.predict` or a registered model gives.
        measured: CONFIGURATION and at least one of QUANTITIES, row for row; NaN is left out.
    """
    errors, inside = compare(predicted, measured, "step_time_s")
    memory_errors, memory_inside = compare(predicted, measured, "peak_memory_bytes")
    lost = list(regrets(predicted, measured))
    return Evaluation(
        rows=len(errors),
        mape=_mean(errors),
        median_ape=float(np.median(errors)) if len(errors) else None,
        p90_ape=float(np.quantile(errors, 0.9)) if len(errors) else None,
        coverage=_mean(inside),
        regret=_mean(np.asarray(lost)),
        regret_worst=max(lost, default=None),
        memory_rows=len(memory_errors),
        memory_mape=_mean(memory_errors),
        memory_coverage=_mean(memory_inside),
    )


def compare(predicted: pd.DataFrame, measured: pd.DataFrame, quantity: str) -> tuple[Array, Array]:
    """Absolute errors (fractions), and 1 where the interval holds the measured value, else 0."""
    if quantity not in measured or quantity not in predicted:
        return np.empty(0), np.empty(0)
    truth, guess = _column(measured, quantity), _column(predicted, quantity)
    known = np.isfinite(truth) & np.isfinite(guess) & (truth > 0)
    errors = np.abs(guess[known] / truth[known] - 1.0)
    if f"{quantity}_lower" not in predicted or f"{quantity}_upper" not in predicted:
        return errors, np.empty(0)
    low, high = (_column(predicted, f"{quantity}_{end}") for end in ("lower", "upper"))
    inside = (low[known] <= truth[known]) & (truth[known] <= high[known])
    return errors, inside.astype(np.float64)


def regrets(predicted: pd.DataFrame, measured: pd.DataFrame) -> Iterator[float]:
    """What the predicted choice of each layout costs over the best one that was measured."""
    if "step_time_s" not in measured or "step_time_s" not in predicted:
        return
    size = _column(measured, "global_batch_size")
    # Time per sample: the length of an epoch, but for its last, partial step.
    truth = _column(measured, "step_time_s") / size
    guess = _column(predicted, "step_time_s") / size
    known = np.isfinite(truth) & np.isfinite(guess)
    layouts = list(zip(measured["nodes"], measured["devices_per_node"], strict=True))
    for layout in sorted(set(layouts)):
        mine = known & np.array([one == layout for one in layouts])
        sizes = np.unique(size[mine])
        if len(sizes) < 2:
            continue
        # Repeated rows of one size are one candidate.
        times = np.array([np.median(truth[mine & (size == one)]) for one in sizes])
        expected = np.array([np.median(guess[mine & (size == one)]) for one in sizes])
        yield float(times[np.argmin(expected)] / times.min() - 1.0)


def _column(frame: pd.DataFrame, name: str) -> Array:
    return frame[name].to_numpy(dtype=np.float64, na_value=np.nan)


def _mean(values: Array) -> float | None:
    return float(np.mean(values)) if len(values) else None
