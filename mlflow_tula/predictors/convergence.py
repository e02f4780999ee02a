"""Epochs to the target: fitted from (global batch size, epochs) rows, with seeds as weights.

The equation stands in convergence_formulas.py, how its forms get their weights in
convergence_forms.py.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, get_args

import numpy as np
from numpy.typing import NDArray

from mlflow_tula.documents import check_document
from mlflow_tula.errors import (
    InvalidInputError,
    MayNotReachTargetWarning,
    SchemaError,
    TableError,
    TooFewProbesWarning,
    TulaWarning,
)
from mlflow_tula.predictors import convergence_formulas as formulas
from mlflow_tula.predictors.convergence_forms import Form, Process, parameters
from mlflow_tula.predictors.convergence_rows import ConvergenceRow, merge, read_rows
from mlflow_tula.specs import check_choice, check_real

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]

CONVERGENCE_KIND = "tula.convergence_predictor"
CONVERGENCE_SCHEMA_VERSION = 1

RELATIVE_TO = 32
"""The batch size whose epochs are 1 where only the noise scale is known."""
MAX_SIZES = 100
MAX_BATCH_SIZE = 1e12


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvergencePredictor:
    """Epochs to the target against the global batch size.

        log epochs(B) = log E0 + log(1 + (B / Bc)^q) + log(1 + (Bs / B)^3) + f(log B)

    E0: epochs of a batch small against Bc. Bc: critical batch size, in samples. q: 1, or more
    where the target is nearly out of reach of large batches. Bs: batch size, in samples, below
    which smaller batches need more epochs too. f: a Gaussian process in log B. All are pooled,
    each form weighted by its prior and its evidence (McCandlish et al. 2018 for the hyperbola).
    Valid from 1/4 of the smallest to 4x the largest measured size; further out the interval
    widens and says so.

    `form="scavenger"` is e* + theta / sqrt(B) (Scavenger, arXiv 2303.06659), kept for comparison.
    The curve is that of the recipe it was measured with: a fixed learning rate and the best rate
    for each size are two different curves.
    """

    form: Form = "pooled"
    global_batch_sizes: tuple[float, ...]
    epochs_to_target: tuple[float, ...]
    variances: tuple[float, ...]
    run_variance: float
    reach_batch_sizes: tuple[float, ...]
    reach_rates: tuple[float, ...]
    centre: float = 0.0
    processes: tuple[Process, ...] = ()
    floor_epochs: float = 0.0
    theta: float = 0.0
    log_sd: float = 0.0
    leave_one_out_mape: float | None = None
    warnings: tuple[str, ...] = ()

    @classmethod
    def fit(
        cls, frame: pd.DataFrame, *, form: Form = "pooled", noise_scale: float | None = None
    ) -> Self:
        """Fit the rows of a frame.

        Args:
            frame: columns `global_batch_size`, `epochs_to_target` (NaN: never reached), optional
                `std` (over runs), `runs_total`, `runs_reached`.
            form: `pooled` (default), `hyperbola` alone, or `scavenger`.
            noise_scale: gradient noise scale in samples; a prior for the critical batch size that
                matters where there are few rows.

        Raises:
            TableError: a bad column or value, by name and row; or no size reached the target.
        """
        check_choice("form", form, Form)
        scale = None if noise_scale is None else check_real("noise_scale", noise_scale, strict=True)
        rows = read_rows(frame)
        reached = merge(rows, MAX_SIZES)
        if not reached:
            raise TableError(
                f"none of the {len(rows)} batch sizes reached the target: train longer, or take "
                "an easier target"
            )
        notes = _notes(rows, reached, form)
        for kind, text in notes:
            warnings.warn(text, kind, stacklevel=2)
        rates = {row.global_batch_size: (0, 0) for row in rows}
        for row in rows:
            hit, total = rates[row.global_batch_size]
            rates[row.global_batch_size] = (hit + row.runs_reached, total + row.runs_total)
        sizes = sorted(rates)
        return cls(
            form=form,
            **parameters(reached, form, scale),
            reach_batch_sizes=tuple(sizes),
            reach_rates=tuple(rates[size][0] / rates[size][1] for size in sizes),
            leave_one_out_mape=_leave_one_out(reached, form, scale),
            warnings=tuple(text for _, text in notes),
        )

    @classmethod
    def of_noise_scale(cls, noise_scale: float) -> Self:
        """What the gradient noise scale alone says, before any training has reached a target.

            epochs(B) / epochs(32) = (1 + B / Bc) / (1 + 32 / Bc)

        Bc is taken as five times the noise scale (in samples), within a factor of four either way.
        Times to target are then in units of the epochs that a batch of 32 needs: right for a
        choice among batch sizes, and not to be read as seconds.

        Raises:
            InvalidInputError: a noise scale that is not above zero.
        """
        import pandas as pd

        scale = check_real("noise_scale", noise_scale, strict=True)
        frame = pd.DataFrame({"global_batch_size": [RELATIVE_TO], "epochs_to_target": [1.0]})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TooFewProbesWarning)
            made = cls.fit(frame, noise_scale=scale)
        note = (
            f"epochs rest on the gradient noise scale alone ({scale:.3g} samples) and are relative "
            f"to those of batch {RELATIVE_TO}: compare times to target, do not read them as seconds"
        )
        warnings.warn(note, TooFewProbesWarning, stacklevel=2)
        return dataclasses.replace(made, warnings=(note,))

    def predict(self, batch_sizes: Sequence[float] | Array, level: float = 0.9) -> pd.DataFrame:
        """Epochs at each global batch size, with the interval of a new measurement.

        Returns:
            One row a size: `epochs_to_target`, `_lower`, `_upper`, `may_not_reach_target`.
        """
        import pandas as pd

        number = check_real("level", level, strict=True)
        if number >= 1:
            raise InvalidInputError(f"level must lie between 0 and 1, not {level!r}")
        try:
            sizes = np.atleast_1d(np.asarray(batch_sizes, float))
        except (TypeError, ValueError) as error:
            raise InvalidInputError("batch sizes must be numbers") from error
        bad = ~(np.isfinite(sizes) & (sizes >= 1) & (sizes <= MAX_BATCH_SIZE))
        if sizes.ndim != 1 or bad.any():
            found = sizes[bad][0] if bad.any() else f"an array of {sizes.ndim} dimensions"
            raise InvalidInputError(f"a batch size must be a number from 1 to 1e12, not {found}")
        value, lower, upper, doubtful = formulas.epochs_to_target(self.to_dict(), sizes, number)
        return pd.DataFrame(
            {
                "global_batch_size": sizes,
                "epochs_to_target": value,
                "epochs_to_target_lower": lower,
                "epochs_to_target_upper": upper,
                "may_not_reach_target": doubtful,
            }
        )

    @property
    def critical_batch_size(self) -> float | None:
        """Posterior geometric mean of Bc, in samples; None for Scavenger's form."""
        if not self.processes:
            return None
        total = sum(
            weight * math.log(size)
            for process in self.processes
            for weight, size in zip(process.weights, process.critical_batch_sizes, strict=True)
        )
        return math.exp(total)

    @property
    def summary(self) -> str:
        """The form in words, for reports."""
        if self.form == "scavenger":
            return f"scavenger: {self.floor_epochs:.3g} + {self.theta:.3g} / sqrt(batch)"
        falling = sum(
            weight
            for process in self.processes
            for weight, small in zip(process.weights, process.small_batch_sizes, strict=True)
            if small > 0
        )
        text = f"{self.form}: critical batch size about {self.critical_batch_size:.3g}"
        return text + (", more epochs for small batches too" if falling > 0.5 else "")

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types with `schema_version`."""
        return {
            "kind": CONVERGENCE_KIND,
            "schema_version": CONVERGENCE_SCHEMA_VERSION,
            **_lists(dataclasses.asdict(self)),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; checked, SchemaError names what is wrong."""
        check_document(data, kind=CONVERGENCE_KIND, version=CONVERGENCE_SCHEMA_VERSION)
        fields = {key: data[key] for key in data if key not in ("kind", "schema_version")}
        try:
            fields["processes"] = tuple(
                Process(
                    length=float(one["length"]),
                    amplitude=float(one["amplitude"]),
                    **{name: _floats(one[name]) for name in _PROCESS_LISTS},
                )
                for one in fields.get("processes", ())
            )
            for name in _LISTS:
                fields[name] = _floats(fields[name])
            for name in _NUMBERS:
                fields[name] = _floats([fields[name]])[0]
            fields["warnings"] = tuple(str(text) for text in fields.get("warnings", ()))
            made = cls(**fields)
        except (TypeError, ValueError, KeyError) as error:
            raise SchemaError(f"a {CONVERGENCE_KIND} document is damaged: {error}") from error
        uneven = any(
            len({len(getattr(one, name)) for name in _PROCESS_LISTS}) != 1 for one in made.processes
        )
        lengths = {len(made.global_batch_sizes), len(made.epochs_to_target), len(made.variances)}
        numbers = (*made.global_batch_sizes, *made.epochs_to_target, *made.variances)
        if (
            made.form not in get_args(Form)
            or uneven
            or len(lengths) != 1
            or min(numbers, default=0.0) <= 0
        ):
            raise SchemaError(f"a {CONVERGENCE_KIND} document is damaged: form or rows")
        if not made.reach_batch_sizes or len(made.reach_batch_sizes) != len(made.reach_rates):
            raise SchemaError(f"a {CONVERGENCE_KIND} document is damaged: reach_rates")
        return made


_PROCESS_LISTS = ("weights", "critical_batch_sizes", "powers", "small_batch_sizes")
_NUMBERS = ("run_variance", "centre", "floor_epochs", "theta", "log_sd")
_LISTS = (
    "global_batch_sizes",
    "epochs_to_target",
    "variances",
    "reach_batch_sizes",
    "reach_rates",
)


def _lists(value: Any) -> Any:
    """Tuples as lists, all the way down: JSON knows no other."""
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, (tuple, list)) else value


def _floats(values: Any) -> tuple[float, ...]:
    """A JSON list of finite numbers."""
    numbers = tuple(float(value) for value in values)
    if not all(math.isfinite(number) for number in numbers):
        raise ValueError("a number is not finite")
    return numbers


def _notes(
    rows: Sequence[ConvergenceRow], reached: Sequence[ConvergenceRow], form: Form
) -> list[tuple[type[TulaWarning], str]]:
    """What a person should know about the fit, each with its warning class."""
    notes: list[tuple[type[TulaWarning], str]] = []
    sizes = [row.global_batch_size for row in reached]
    if len(sizes) < 3 or max(sizes) < 4 * min(sizes):
        notes.append(
            (
                TooFewProbesWarning,
                f"convergence rests on few batch sizes, or near ones "
                f"({', '.join(map(str, sizes))}): measure 3 or more, at least 4x apart",
            )
        )
    failing = sorted({row.global_batch_size for row in rows if row.runs_reached < row.runs_total})
    if failing:
        shown = ", ".join(map(str, failing[:8]))
        notes.append(
            (MayNotReachTargetWarning, f"some runs never reached the target at batch {shown}")
        )
    if form == "scavenger":
        notes.append(
            (
                TulaWarning,
                "scavenger's form is kept for comparison: on published points it errs 30 %, the "
                "default 6 %",
            )
        )
    return notes


def _leave_one_out(
    rows: Sequence[ConvergenceRow], form: Form, noise_scale: float | None
) -> float | None:
    """Mean absolute error, a fraction, of each size predicted from the others."""
    if len(rows) < 3:
        return None
    # a long table is thinned: the mean over 24 left-out sizes is as good
    left_out = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), 24)).round().astype(int))
    errors = []
    for index in left_out:
        rest = [row for number, row in enumerate(rows) if number != index]
        params = {"form": form, **parameters(rest, form, noise_scale)}
        params["processes"] = [dataclasses.asdict(one) for one in params.get("processes", ())]
        function = formulas.scavenger if form == "scavenger" else formulas.log_epochs
        mean, _ = function(params, np.array([math.log(rows[index].global_batch_size)]))
        errors.append(
            abs(math.exp(float(mean[0])) / float(rows[index].epochs_to_target or 1.0) - 1.0)
        )
    return float(np.mean(errors))
