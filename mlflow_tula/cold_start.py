"""A bundle for a workload that never ran on this hardware, and the probe that sharpens it most.

    bundle = cold_bundle(known, features, workload)              # known: a CrossModelPredictor
    size = best_probe(known, features, bundle, around=64, seconds=20)
    bundle = cold_bundle(known, features, workload, probes=table)  # with what was measured since

The bundle predicts and recommends as any other: its curve is foreseen, its interval is that of
models which were left out.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlflow_tula.errors import InvalidInputError, TulaWarning
from mlflow_tula.fit import fit
from mlflow_tula.model_features import ModelFeatures
from mlflow_tula.predictors.bundle import ColdStart, FitReport, PredictorBundle, Probed
from mlflow_tula.predictors.cross_model import TRIAL_SD, CrossModelPredictor
from mlflow_tula.predictors.memory import probe_of
from mlflow_tula.predictors.transfer import Transfer, transferred_log_times
from mlflow_tula.specs import Spec, Workload
from mlflow_tula.table import LinkMeasurement, Measurement, ProfileTable

Array = NDArray[np.float64]

SMALLEST = 8
BEYOND = 4
"""Answers reach this many times the largest size of the models learnt from."""
STEPS_OF_A_PROBE = 7.0
"""Steps of a short probe: two untimed, three timed, evaluation and gradient passes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbePlan(Spec):
    """A probe worth its time: what it costs and what it leaves of the interval's half width."""

    local_batch_size: int
    seconds: float
    relative_interval: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Elsewhere:
    """A workload's own table on other hardware, what other models say there, what travels."""

    table: ProfileTable
    known: CrossModelPredictor
    how: Transfer


def answered_sizes(known: CrossModelPredictor, workload: Workload) -> list[int]:
    """Powers of two from 8 (or the dataset) to four times the largest size learnt from."""
    largest = min(int(BEYOND * known.params["largest_local_batch_size"]), workload.dataset_size)
    sizes = [2**k for k in range(48) if SMALLEST <= 2**k <= largest]
    return sizes or [max(largest, 1)]


def cold_bundle(
    known: CrossModelPredictor,
    features: ModelFeatures,
    workload: Workload,
    *,
    probes: ProfileTable | None = None,
    links: Sequence[LinkMeasurement] = (),
    elsewhere: Elsewhere | None = None,
) -> PredictorBundle:
    """The predictors of a workload that was not profiled on `known.hardware`.

    Args:
        known: what other models there say.
        features: the workload's counted kernels.
        workload: what is to be trained.
        probes: measurements of the workload itself since, if there are any.
        links: all-reduce times of the hardware, if there are any.
        elsewhere: the workload's own table on other hardware, if there is one and no probe here.

    Raises:
        InvalidInputError: the kernels could not be counted.
    """
    if not features.operations or not features.peak_lines:
        raise InvalidInputError(
            f"the kernels of {workload.model} could not be counted ({features.problem}): profile "
            "it instead, with `tula main`"
        )
    sizes = answered_sizes(known, workload)
    own = () if probes is None else probes.measurements
    sizes = sorted({*sizes, *(row.local_batch_size for row in own if row.status == "ok")})
    batch = np.array(sizes, float)
    if elsewhere is None or own:
        elsewhere = None
        mean, covariance = known.log_step_time(features, batch, probes)
    else:
        mean, covariance = transferred_log_times(
            elsewhere.how, known, elsewhere.known, features, elsewhere.table, batch
        )
    allocated, peaks, memory_sd = known.memory(features, batch, probes)
    foreseen = tuple(
        Measurement(
            local_batch_size=size,
            step_time_s=float(np.exp(log_time)),
            allocated_memory_bytes=int(live),
            peak_memory_bytes=int(peak),
        )
        for size, log_time, live, peak in zip(sizes, mean, allocated, peaks, strict=True)
    )
    table = ProfileTable(
        workload=workload, hardware=known.hardware, measurements=foreseen, links=tuple(links)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TulaWarning)
        bundle = fit(table)
    deviations = [float(value) for value in np.sqrt(np.diag(covariance))]
    cold = ColdStart(
        source="cross_model" if elsewhere is None else "transferred",
        models=known.models if elsewhere is None else elsewhere.how.models,
        local_batch_sizes=tuple(int(size) for size in sizes),
        other_hardware="" if elsewhere is None else elsewhere.table.hardware.slug,
    )
    return _as_foreseen(bundle, known, own, cold, deviations, memory_sd, features.problem)


def _as_foreseen(
    bundle: PredictorBundle,
    known: CrossModelPredictor,
    own: Sequence[Measurement],
    cold: ColdStart,
    deviations: Sequence[float],
    memory_sd: float,
    problem: str,
) -> PredictorBundle:
    """The bundle with the intervals and words of a foreseen curve, not of a measured one."""
    spread = {
        **bundle.step_time.params["spread"],
        "noise_sd": TRIAL_SD,
        "scale": 1.0,
        "foreseen": {
            "log2_sizes": [float(np.log2(size)) for size in cold.local_batch_sizes],
            "deviations": list(deviations),
        },
    }
    ran = tuple(row for row in own if row.status == "ok")
    measured = f", and {len(ran)} own probe{'s' * (len(ran) > 1)}" if ran else ""
    words = str(cold) + measured
    memory = bundle.memory
    if memory is not None:
        memory = dataclasses.replace(
            memory,
            probes=tuple(probe_of(row) for row in own),
            relative_sd=memory_sd,
            counted_batch_size=float(max(cold.local_batch_sizes)),
            form="counted bytes, calibrated on other models",
            leave_one_out_mape=known.memory_error,
            warnings=(),
        )
    return dataclasses.replace(
        bundle,
        step_time=dataclasses.replace(
            bundle.step_time,
            params={**bundle.step_time.params, "spread": spread},
            form=f"roofline over counted kernels, from {len(known.models)} models",
            leave_one_out_mape=known.step_time_error,
            leave_one_out_coverage=known.coverage,
            warnings=(),
        ),
        memory=memory,
        probed=Probed(
            ok=tuple(sorted({(row.local_batch_size, row.world_size) for row in ran})),
            oom=tuple(
                sorted({(r.local_batch_size, r.world_size) for r in own if r.status == "oom"})
            ),
        ),
        report=FitReport(
            step_time_form=f"roofline over counted kernels, from {len(known.models)} models",
            memory_form="counted bytes, calibrated on other models",
            step_time_mape=known.step_time_error,
            memory_mape=known.memory_error,
            coverage=known.coverage,
            rows_used=len(ran),
            rows_oom=sum(row.status == "oom" for row in own),
            warnings=(words, *([f"kernels not counted as usual: {problem}"] if problem else [])),
        ),
        cold_start=cold,
        table_digest="",
    )


def best_probe(
    known: CrossModelPredictor,
    features: ModelFeatures,
    bundle: PredictorBundle,
    *,
    around: int,
    seconds: float,
    probes: ProfileTable | None = None,
    memory_limit_bytes: float | None = None,
) -> ProbePlan | None:
    """The probe of at most so many seconds that leaves least open of the step time at `around`.

    Args:
        known: what other models say.
        features: the workload's counted kernels.
        bundle: the answer so far, for what fits.
        around: the local batch size that matters, the chosen one.
        seconds: what a probe may take, besides the start of its process.
        probes: what was measured already; the same size is not planned twice.
        memory_limit_bytes: of a device; its own where None.

    Returns:
        None where no size that fits is quick enough.
    """
    plans = [
        plan
        for plan in _plans(known, features, bundle, around, probes, memory_limit_bytes)
        if plan.seconds <= seconds
    ]
    return min(plans, key=lambda plan: (plan.relative_interval, plan.seconds), default=None)


def halving_probe(
    known: CrossModelPredictor,
    features: ModelFeatures,
    bundle: PredictorBundle,
    *,
    around: int,
    probes: ProfileTable | None = None,
    memory_limit_bytes: float | None = None,
) -> ProbePlan | None:
    """The quickest probe after which the bundle's interval at `around` is half as wide, or None."""
    foreseen = bundle.step_time.params["spread"]["foreseen"]
    sizes, deviations = foreseen["log2_sizes"], foreseen["deviations"]
    before = float(np.interp(np.log2(around), sizes, deviations))
    plans = [
        plan
        for plan in _plans(known, features, bundle, around, probes, memory_limit_bytes)
        if plan.relative_interval <= before / 2
    ]
    return min(plans, key=lambda plan: plan.seconds, default=None)


def _plans(
    known: CrossModelPredictor,
    features: ModelFeatures,
    bundle: PredictorBundle,
    around: int,
    probes: ProfileTable | None,
    memory_limit_bytes: float | None,
) -> list[ProbePlan]:
    """Every size that fits and was not tried: what a probe of it takes and leaves open."""
    import pandas as pd

    cold = bundle.cold_start
    assert cold is not None, "only bundles of cold_bundle are sharpened by probes"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TulaWarning)
        curve = bundle.predict(
            pd.DataFrame({"local_batch_size": cold.local_batch_sizes}),
            memory_limit_bytes=memory_limit_bytes,
        )
    tried = () if probes is None else probes.measurements
    done = {row.local_batch_size for row in tried}
    target = np.array([float(around)])
    found = []
    for size, fits, step in zip(
        curve["local_batch_size"], curve["fits"], curve["step_time_s"], strict=True
    ):
        if not fits or int(size) in done:
            continue
        row = Measurement(local_batch_size=int(size), step_time_s=float(step))
        table = ProfileTable(
            workload=bundle.workload, hardware=bundle.hardware, measurements=(*tried, row)
        )
        _, after = known.log_step_time(features, target, table)
        found.append(
            ProbePlan(
                local_batch_size=int(size),
                seconds=STEPS_OF_A_PROBE * float(step),
                relative_interval=float(np.sqrt(after[0, 0])),
            )
        )
    return found
