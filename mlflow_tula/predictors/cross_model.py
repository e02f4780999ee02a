"""What the models that were profiled on a hardware say of one that never ran there.

    known = CrossModelPredictor.fit([(features, table), ...])    # one pair a profiled workload
    bundle = known.bundle(features, workload)                     # predicts and recommends as any

The equation stands in cross_model_formulas.py. Its rates are the most probable ones under wide
log-normal priors (so that three models are enough to begin with); errors are those of models left
out whole, and an answer widens with its distance from the models seen: through the covariance of
the rates that it leans on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mlflow_tula.documents import check_document
from mlflow_tula.errors import InvalidInputError, SchemaError
from mlflow_tula.model_features import ModelFeatures
from mlflow_tula.predictors import cross_model_formulas as formulas
from mlflow_tula.predictors.formulas import student_quantile
from mlflow_tula.specs import HardwareSpec
from mlflow_tula.table import Measurement, ProfileTable

Array = NDArray[np.float64]

CROSS_MODEL_KIND = "tula.cross_model_predictor"
CROSS_MODEL_SCHEMA_VERSION = 1
LEAST_MODELS = 3
"""Fewer profiled models than this say nothing of another."""

PRIORS: Mapping[str, tuple[float, float]] = {
    "floor_s": (1e-5, 1.5),
    "s_per_flop": (1.5e-11, 1.0),
    "backward_factor": (1.2, 0.5),
    "s_per_byte": (1.5e-10, 1.0),
    "step_s": (1e-3, 1.5),
    "sample_s": (5e-6, 1.5),
}
"""Median and standard deviation of the logarithm, in units of the hardware's own pace."""
ROW_SD = 0.1
"""How far a row stands from the equation; rows of a model err together and count as ROWS."""
ROWS = 2.0
TRIAL_SD = 0.025
"""Noise of one measured trial (step_time.NOISE_SD)."""
LEVEL_SD, TILT_SD, NOISE_SD = 0.12, 0.03, 0.04
"""A model's own level, tilt per doubling and rest, before any was left out; worth PRIOR_MODELS."""
PRIOR_MODELS = 3.0
DEGREES = 6.0
MEMORY_SD = 0.05
PROBED_MEMORY = 0.5
"""What an own probe leaves of the deviation of memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownModel:
    """One profiled workload as rows: its kernels, and what was measured on one rank."""

    name: str
    features: ModelFeatures
    sizes: Array
    log_times: Array
    allocated: Array
    peaks: Array

    @classmethod
    def of(cls, features: ModelFeatures, table: ProfileTable) -> Self | None:
        """A table's rows of one rank, one pass a step; None where there are none.

        Of repeated trials the fastest: what else runs on a machine only slows.
        """
        rows: dict[int, list[Measurement]] = {}
        for row in table.ok:
            if row.world_size == 1 and row.accumulation_steps == 1:
                rows.setdefault(row.local_batch_size, []).append(row)
        if not rows or not features.operations:
            return None
        sizes = sorted(rows)

        def least(size: int, name: str) -> float:
            seen = [getattr(row, name) for row in rows[size] if getattr(row, name)]
            return float(min(seen)) if seen else math.nan

        return cls(
            name=table.workload.model,
            features=features,
            sizes=np.array(sizes, float),
            log_times=np.log([least(size, "step_time_s") for size in sizes]),
            allocated=np.array([least(size, "allocated_memory_bytes") for size in sizes]),
            peaks=np.array([least(size, "peak_memory_bytes") for size in sizes]),
        )

    def work(self) -> Array:
        """What the rates multiply, one row a size."""
        return formulas.work(self.features.to_dict()["operations"], self.sizes)


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossModelPredictor:
    """Step time and memory on one hardware for any model whose kernels can be counted.

    `params` are what cross_model_formulas reads. `step_time_error` and `memory_error` are median
    relative errors (fractions) of the models left out one at a time, `coverage` the share of
    left-out step times inside their 90 % interval; None below four models.
    """

    hardware: HardwareSpec
    params: dict[str, Any]
    models: tuple[str, ...]
    step_time_error: float | None = None
    memory_error: float | None = None
    coverage: float | None = None
    digests: tuple[str, ...] = field(default=())

    @classmethod
    def fit(
        cls, known: Sequence[tuple[ModelFeatures, ProfileTable]], *, left_out: bool = True
    ) -> Self:
        """Fit the tables of several models on one hardware.

        Args:
            known: counted features and measurements, one pair a workload.
            left_out: leave each model out in turn, for the errors and intervals.

        Raises:
            InvalidInputError: fewer than three models with rows of one rank, or several hardwares.
        """
        models = [found for one in known if (found := KnownModel.of(*one)) is not None]
        names = sorted({model.name for model in models})
        if len(names) < LEAST_MODELS:
            raise InvalidInputError(
                f"a cross-model predictor needs at least {LEAST_MODELS} profiled models with "
                f"counted kernels, not {len(names)}: profile more with `tula main --model NAME`"
            )
        hardware = known[0][1].hardware
        if any(table.hardware.fingerprint != hardware.fingerprint for _, table in known):
            raise InvalidInputError("the tables come from different hardware: fit one at a time")
        step = _fit_step_time(models, left_out)
        memory = _fit_memory(models, left_out)
        return cls(
            hardware=hardware,
            params={
                **step.params,
                "memory": memory.params,
                "half_width_90": student_quantile(0.95, DEGREES),
                "largest_local_batch_size": float(max(model.sizes[-1] for model in models)),
            },
            models=tuple(names),
            step_time_error=step.error,
            memory_error=memory.error,
            coverage=step.coverage,
            digests=tuple(sorted(table.digest for _, table in known)),
        )

    def log_step_time(
        self, features: ModelFeatures, sizes: Array, probes: ProfileTable | None = None
    ) -> tuple[Array, Array]:
        """Log seconds at each local batch size, and their covariance, given the model's probes."""
        operations = features.to_dict()["operations"]
        seen = None if probes is None else KnownModel.of(features, probes)
        given = None if seen is None else (seen.sizes, seen.log_times)
        return formulas.step_time_posterior(self.params, operations, sizes, given)

    def memory(
        self, features: ModelFeatures, sizes: Array, probes: ProfileTable | None = None
    ) -> tuple[Array, Array, float]:
        """Allocated and peak bytes at each local batch size, and their relative deviation."""
        known = self.params["memory"]
        columns = formulas.memory_columns(features.peak_lines, sizes)
        allocated = columns @ np.asarray(known["allocated"], float)
        peaks = columns @ np.asarray(known["peak"], float)
        deviation = float(known["relative_sd"])
        seen = None if probes is None else KnownModel.of(features, probes)
        if seen is not None:
            there = formulas.memory_columns(features.peak_lines, seen.sizes)
            allocated *= _ratio(seen.allocated, there @ np.asarray(known["allocated"], float))
            peaks *= _ratio(seen.peaks, there @ np.asarray(known["peak"], float))
            deviation *= PROBED_MEMORY
        return allocated, peaks, deviation

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "kind": CROSS_MODEL_KIND,
            "schema_version": CROSS_MODEL_SCHEMA_VERSION,
            "hardware": self.hardware.to_dict(),
            "params": self.params,
            "models": list(self.models),
            "step_time_error": self.step_time_error,
            "memory_error": self.memory_error,
            "coverage": self.coverage,
            "digests": list(self.digests),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; a trial prediction finds what is missing or no number."""
        check_document(data, kind=CROSS_MODEL_KIND, version=CROSS_MODEL_SCHEMA_VERSION)
        try:
            params = dict(data["params"])
            one = {"kind": "matmul", "phase": "forward", "count": 1, "flops_per_sample": 1.0}
            one |= {"flops_fixed": 0.0, "bytes_per_sample": 1.0, "bytes_fixed": 0.0}
            mean, spread = formulas.step_time_posterior(params, [one], np.array([8.0, 64.0]))
            memory = [np.asarray(params["memory"][name], float) for name in ("allocated", "peak")]
            float(params["memory"]["relative_sd"]), float(params["largest_local_batch_size"])
            float(params["half_width_90"])
            sound = np.isfinite([*mean, *spread.ravel(), *memory[0], *memory[1]]).all()
            made = cls(
                hardware=HardwareSpec.from_dict(data["hardware"]),
                params=params,
                models=tuple(str(name) for name in data["models"]),
                step_time_error=data.get("step_time_error"),
                memory_error=data.get("memory_error"),
                coverage=data.get("coverage"),
                digests=tuple(str(text) for text in data.get("digests", ())),
            )
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise SchemaError(
                f"the cross-model predictor is damaged: {type(error).__name__}: {error}"
            ) from error
        if not sound:
            raise SchemaError("the cross-model predictor is damaged: it predicts no finite time")
        return made


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fitted:
    params: dict[str, Any]
    error: float | None
    coverage: float | None = None


def _prior() -> tuple[Array, Array]:
    """Medians (log) and deviations of the rates."""
    pairs = [PRIORS[name.split(".")[0]] for name in formulas.NAMES]
    return np.log([median for median, _ in pairs]), np.array([sd for _, sd in pairs])


def _fit_step_time(models: Sequence[KnownModel], left_out: bool) -> _Fitted:
    """Rates, their covariance, and the spread of models that were left out."""
    from scipy.optimize import least_squares

    work = [model.work() for model in models]
    names = [model.name for model in models]
    middle, deviation = _prior()
    # the hardware's own pace: a machine ten times as fast has every rate a tenth
    pace = float(
        np.median(
            [
                np.median(model.log_times - formulas.log_step_time(middle, one)[0])
                for model, one in zip(models, work, strict=True)
            ]
        )
    )
    middle = middle + np.where(np.array(formulas.NAMES) == "backward_factor", 0.0, pace)

    def solve(chosen: Sequence[int]) -> tuple[Array, Array]:
        root = [math.sqrt(ROWS / len(models[i].sizes)) / ROW_SD for i in chosen]

        def residuals(theta: Array) -> Array:
            rows = [
                w * (formulas.log_step_time(theta, work[i])[0] - models[i].log_times)
                for w, i in zip(root, chosen, strict=True)
            ]
            return np.concatenate([*rows, (theta - middle) / deviation])

        def slopes(theta: Array) -> Array:
            rows = [
                w * formulas.log_step_time(theta, work[i])[1]
                for w, i in zip(root, chosen, strict=True)
            ]
            return np.concatenate([*rows, np.diag(1.0 / deviation)])

        found = least_squares(residuals, middle, slopes)
        jacobian = np.asarray(found.jac, float)
        return np.asarray(found.x, float), np.linalg.inv(jacobian.T @ jacobian)

    theta, covariance = solve(range(len(models)))
    spread = {
        "level_sd": LEVEL_SD,
        "tilt_sd": TILT_SD,
        "noise_sd": NOISE_SD,
        "trial_sd": TRIAL_SD,
        "scale": 1.0,
        "degrees": DEGREES,
    }
    params = {"log_theta": theta.tolist(), "covariance": covariance.tolist(), "spread": spread}
    distinct = sorted(set(names))
    if len(distinct) <= LEAST_MODELS or not left_out:
        return _Fitted(params=params, error=None)
    errors, scores = [], []
    left = []
    for name in distinct:
        rest, their = solve([i for i, other in enumerate(names) if other != name])
        for i in (i for i, other in enumerate(names) if other == name):
            mean, slope = formulas.log_step_time(rest, work[i])
            left.append((i, models[i].log_times - mean, np.sum(slope @ their * slope, axis=1)))
    spread |= _own_spread([(models[i].sizes, error) for i, error, _ in left])
    for i, error, shared in left:
        own = np.diag(formulas.own_covariance(spread, models[i].sizes, models[i].sizes))
        total = np.sqrt(shared + own + spread["noise_sd"] ** 2)
        errors.append(np.abs(np.expm1(-error)))
        scores.append(np.abs(error) / total)
    half = student_quantile(0.95, DEGREES)
    flat = np.sort(np.concatenate(scores))
    # the widest tenth decides: 90 % of left-out rows are to lie inside 90 % intervals
    needed = float(np.quantile(flat, 0.9)) / half
    weight = len(distinct) / (len(distinct) + PRIOR_MODELS)
    spread["scale"] = float(np.clip(math.exp(weight * math.log(max(needed, 1e-3))), 0.5, 3.0))
    return _Fitted(
        params=params,
        error=float(np.median(np.concatenate(errors))),
        coverage=float(np.mean(flat <= half * spread["scale"])),
    )


def _own_spread(left: Sequence[tuple[Array, Array]]) -> dict[str, float]:
    """Level, tilt and rest of the errors of left-out models, shrunk to the priors.

    By medians: one model unlike all others must not widen the answers for the rest (the covariance
    of the rates it leans on does that).
    """
    levels, tilts, rests = [], [], []
    for sizes, error in left:
        place = np.log2(sizes / formulas.REFERENCE_BATCH)
        if len(sizes) > 1:
            tilt, level = np.polyfit(place, error, 1)
            rests += (error - level - tilt * place).tolist()
            tilts.append(float(tilt))
        else:
            level = float(error[0])
        levels.append(float(level))

    def shrunk(seen: Sequence[float], before: float) -> float:
        usual = 1.4826 * float(np.median(np.abs(seen))) if len(seen) else before
        total = len(seen) * usual**2 + PRIOR_MODELS * before**2
        return math.sqrt(total / (len(seen) + PRIOR_MODELS))

    return {
        "level_sd": shrunk(levels, LEVEL_SD),
        "tilt_sd": shrunk(tilts, TILT_SD),
        "noise_sd": shrunk(rests, NOISE_SD),
    }


def _fit_memory(models: Sequence[KnownModel], left_out: bool) -> _Fitted:
    """Coefficients on (one, counted, counted less static) for allocated and peak bytes."""
    names = sorted({model.name for model in models})
    coefficients: dict[str, Any] = {}
    errors: dict[str, list[float]] = {"allocated": [], "peaks": []}
    for target in ("allocated", "peaks"):
        coefficients[target] = _memory_line(models, target)
        for name in names if left_out and len(names) > LEAST_MODELS else ():
            rest = [model for model in models if model.name != name]
            line = np.array(_memory_line(rest, target))
            for model in (model for model in models if model.name == name):
                guess = formulas.memory_columns(model.features.peak_lines, model.sizes) @ line
                seen = getattr(model, target)
                errors[target] += np.abs(guess / seen - 1.0)[np.isfinite(seen)].tolist()
    spread = errors["peaks"] or [MEMORY_SD]
    return _Fitted(
        params={
            "allocated": coefficients["allocated"],
            "peak": coefficients["peaks"],
            "relative_sd": max(1.4826 * float(np.median(spread)), 0.01),
        },
        error=float(np.median(errors["allocated"])) if errors["allocated"] else None,
    )


def _memory_line(models: Sequence[KnownModel], target: str) -> list[float]:
    """Non-negative least squares of relative errors; the bare count where nothing was read."""
    from scipy.optimize import nnls

    columns, values = [], []
    for model in models:
        seen = getattr(model, target)
        good = np.isfinite(seen) & (len(model.features.peak_lines) > 0)
        if good.any():
            here = formulas.memory_columns(model.features.peak_lines, model.sizes[good])
            columns.append(here / seen[good][:, None])
            values.append(np.ones(int(good.sum())))
    if not columns:
        return [0.0, 1.0, 0.0]
    found, _ = nnls(np.concatenate(columns), np.concatenate(values))
    return [float(value) for value in found]


def _ratio(seen: Array, foreseen: Array) -> float:
    """How much more a model takes than was foreseen, by its own probes; 1 where none was read."""
    good = np.isfinite(seen)
    return float(np.median(seen[good] / foreseen[good])) if good.any() else 1.0
