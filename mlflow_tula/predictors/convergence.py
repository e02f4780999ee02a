"""Epochs to the target: fitted from (global batch size, epochs) rows, with seeds as weights.

The equation stands in convergence_formulas.py. Here the forms get their weights: a prior over the
critical batch size, the U shape and the wiggle, times the evidence of the rows.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from mlflow_tula.errors import (
    InvalidInputError,
    MayNotReachTargetWarning,
    SchemaError,
    TableError,
    TooFewProbesWarning,
    TulaWarning,
)
from mlflow_tula.predictors import convergence_formulas as formulas
from mlflow_tula.predictors.convergence_rows import ConvergenceRow, merge, read_rows
from mlflow_tula.specs import check_choice, check_real
from mlflow_tula.table import check_document

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]
Form = Literal["pooled", "hyperbola", "scavenger"]

CONVERGENCE_KIND = "tula.convergence_predictor"
CONVERGENCE_SCHEMA_VERSION = 1

SEED_SPREAD = 0.05
"""Relative spread of epochs over seeds where nothing was told (3.6 % on MLPerf's points)."""
PRIOR_RUNS = 4.0
"""How many runs that prior spread is worth."""
UNEXPLAINED = 0.01
"""Relative error of a row that no number of seeds removes."""
NOISE_SCALE_FACTOR = 5.0
"""Critical batch size over noise scale: 283 over 55-65 on MNIST-1D (docs/method.md)."""
NOISE_SCALE_SPREAD = 0.9
"""Spread of the logarithm of that factor between tasks."""

# prior weights: a form costs its share until rows speak for it
POWERS = ((1.0, 0.7), (2.0, 0.3))
PROCESSES = ((2.0, 0.05, 0.3), (2.0, 0.1, 0.4), (2.0, 0.2, 0.3))  # length, amplitude, weight
HYPERBOLA_PROCESSES = ((0.0, 0.03, 0.4), (0.0, 0.1, 0.4), (0.0, 0.3, 0.2))
U_SHAPE_WEIGHT = 0.15
NUM_CRITICAL = 24
NUM_SMALL = 7
KEPT_WEIGHT = 1e-3
MAX_SIZES = 200
MAX_BATCH_SIZE = 1e12


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """The forms that share one Gaussian process, each with its posterior weight."""

    length: float
    amplitude: float
    weights: tuple[float, ...]
    critical_batch_sizes: tuple[float, ...]
    powers: tuple[float, ...]
    small_batch_sizes: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvergencePredictor:
    """Epochs to the target against the global batch size.

        log epochs(B) = log E0 + (1 / q) log(1 + (B / Bc)^q) + log(1 + Bs / B) + f(log B)

    E0: epochs of a batch small against Bc. Bc: critical batch size, in samples. q: sharpness of
    the turn. Bs: batch size, in samples, below which smaller batches need more epochs too. f: a
    Gaussian process in log B. All are pooled, each form weighted by its prior and its evidence
    (McCandlish et al. 2018 for the hyperbola). Valid from 1/4 of the smallest to 4x the largest
    measured size; further out the interval widens and says so.

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
            **_parameters(reached, form, scale),
            reach_batch_sizes=tuple(sizes),
            reach_rates=tuple(rates[size][0] / rates[size][1] for size in sizes),
            leave_one_out_mape=_leave_one_out(reached, form, scale),
            warnings=tuple(text for _, text in notes),
        )

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
            fields["warnings"] = tuple(str(text) for text in fields.get("warnings", ()))
            made = cls(**fields)
        except (TypeError, ValueError, KeyError) as error:
            raise SchemaError(f"a {CONVERGENCE_KIND} document is damaged: {error}") from error
        lengths = {len(made.global_batch_sizes), len(made.epochs_to_target), len(made.variances)}
        numbers = (*made.global_batch_sizes, *made.epochs_to_target, *made.variances)
        if made.form not in get_args(Form) or len(lengths) != 1 or min(numbers, default=0.0) <= 0:
            raise SchemaError(f"a {CONVERGENCE_KIND} document is damaged: form or rows")
        if not made.reach_batch_sizes or len(made.reach_batch_sizes) != len(made.reach_rates):
            raise SchemaError(f"a {CONVERGENCE_KIND} document is damaged: reach_rates")
        return made


_PROCESS_LISTS = ("weights", "critical_batch_sizes", "powers", "small_batch_sizes")
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
                f"convergence is fitted from {len(sizes)} batch sizes from {min(sizes)} to "
                f"{max(sizes)}: measure 3 or more, at least 4x apart",
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
        params = {"form": form, **_parameters(rest, form, noise_scale)}
        params["processes"] = [dataclasses.asdict(one) for one in params.get("processes", ())]
        function = formulas.scavenger if form == "scavenger" else formulas.log_epochs
        mean, _ = function(params, np.array([math.log(rows[index].global_batch_size)]))
        errors.append(abs(math.exp(float(mean[0])) / _epochs(rows[index]) - 1.0))
    return float(np.mean(errors))


def _epochs(row: ConvergenceRow) -> float:
    """Epochs of a row that reached the target."""
    assert row.epochs_to_target is not None
    return row.epochs_to_target


def _variances(rows: Sequence[ConvergenceRow]) -> tuple[Array, float]:
    """Relative variance of each row's mean, and of a new row of as many runs as usual.

    The spread over seeds is shrunk twice: of all rows together to SEED_SPREAD, of each row to
    that of all. Two runs that agree by chance do not make a row exact.
    """
    runs = np.array([row.runs_reached for row in rows], float)
    told = np.array([row.std is not None and row.runs_reached > 1 for row in rows])
    square = np.array([((row.std or 0.0) / _epochs(row)) ** 2 for row in rows])
    degrees = np.where(told, runs - 1.0, 0.0)
    shared = (PRIOR_RUNS * SEED_SPREAD**2 + degrees @ square) / (PRIOR_RUNS + degrees.sum())
    own = (PRIOR_RUNS * shared + degrees * square) / (PRIOR_RUNS + degrees)
    usual = float(shared / np.median(runs)) + UNEXPLAINED**2
    return own / runs + UNEXPLAINED**2, usual


def _parameters(
    rows: Sequence[ConvergenceRow], form: Form, noise_scale: float | None
) -> dict[str, Any]:
    """The fields of ConvergencePredictor that one fit decides."""
    sizes = np.array([row.global_batch_size for row in rows], float)
    epochs = np.array([_epochs(row) for row in rows])
    variance, usual = _variances(rows)
    fields: dict[str, Any] = {
        "global_batch_sizes": tuple(sizes.tolist()),
        "epochs_to_target": tuple(epochs.tolist()),
        "variances": tuple(variance.tolist()),
        "run_variance": usual,
    }
    if form == "scavenger":
        return fields | _scavenger(sizes, epochs, variance)
    centre = float(np.average(np.log(epochs), weights=1.0 / variance))
    processes = _pool(np.log(sizes), np.log(epochs) - centre, variance, form, noise_scale)
    return fields | {"centre": centre, "processes": processes}


def _forms(log_batch: Array, form: Form, noise_scale: float | None) -> tuple[Array, ...]:
    """Every (Bc, q, Bs) that is tried, and its log prior."""
    low, high = float(log_batch.min()), float(log_batch.max())
    grid = np.linspace(low - math.log(30), high + math.log(100), NUM_CRITICAL)
    prior = np.full(grid.shape, -math.log(len(grid)))
    if noise_scale is not None:
        expected = math.log(noise_scale * NOISE_SCALE_FACTOR)
        grid = np.linspace(min(grid[0], expected - 2), max(grid[-1], expected + 2), NUM_CRITICAL)
        prior = -0.5 * ((grid - expected) / NOISE_SCALE_SPREAD) ** 2
        prior -= np.logaddexp.reduce(prior)
    small = np.linspace(low - math.log(4), low + math.log(16), NUM_SMALL)
    falls = [(0.0, math.log(1.0 if form == "hyperbola" else 1.0 - U_SHAPE_WEIGHT))]
    if form == "pooled":
        falls += [(math.exp(one), math.log(U_SHAPE_WEIGHT / NUM_SMALL)) for one in small]
    powers = POWERS if form == "pooled" else ((1.0, 1.0),)
    table = np.array(
        [
            (math.exp(bc), power, fall, weight + math.log(share) + chance)
            for bc, weight in zip(grid, prior, strict=True)
            for power, share in powers
            for fall, chance in falls
        ]
    )
    return tuple(table.T)


def _pool(
    log_batch: Array, target: Array, variance: Array, form: Form, noise_scale: float | None
) -> tuple[Process, ...]:
    """Weigh every form under every Gaussian process by prior and evidence; keep what matters."""
    critical, power, small, prior = _forms(log_batch, form, noise_scale)
    residuals = target - formulas.trend(log_batch, critical, power, small)
    priors = PROCESSES if form == "pooled" else HYPERBOLA_PROCESSES
    nowhere = np.empty(0)
    scores = np.array(
        [
            prior
            + math.log(share)
            + formulas.posterior(log_batch, residuals, variance, nowhere, amplitude, length)[0]
            for length, amplitude, share in priors
        ]
    )
    weights = np.exp(scores - scores.max())
    weights[weights < KEPT_WEIGHT * weights.max()] = 0.0
    weights /= weights.sum()
    return tuple(
        Process(
            length=length,
            amplitude=amplitude,
            weights=tuple(own[own > 0].tolist()),
            critical_batch_sizes=tuple(critical[own > 0].tolist()),
            powers=tuple(power[own > 0].tolist()),
            small_batch_sizes=tuple(small[own > 0].tolist()),
        )
        for (length, amplitude, _), own in zip(priors, weights, strict=True)
        if own.any()
    )


def _scavenger(sizes: Array, epochs: Array, variance: Array) -> dict[str, float]:
    """Weighted least squares of e* + theta / sqrt(B), relative, both kept non-negative."""
    from scipy.optimize import nnls

    scale = epochs * np.sqrt(variance)
    design = np.c_[np.ones_like(sizes), sizes**-0.5] / scale[:, None]
    floor, theta = nnls(design, epochs / scale)[0]
    errors = np.log((floor + theta * sizes**-0.5) / epochs)
    # never said to be surer than the 30 % that the form errs on published points
    spread = max(float(np.sqrt(np.sum(errors**2) / max(len(sizes) - 2, 1))), 0.3)
    return {"floor_epochs": float(floor), "theta": float(theta), "log_sd": spread}
