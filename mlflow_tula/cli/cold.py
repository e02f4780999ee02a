"""An answer for a workload never profiled on this hardware, and the probes that sharpen it.

`find_bundle` falls through to `cold_answer`; `tula recommend --refine` goes on with `refine`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlflow_tula.cli.render import note, seconds
from mlflow_tula.errors import InvalidInputError, NotRegisteredError, ProfilingError, TulaError

if TYPE_CHECKING:
    from mlflow_tula.model_features import ModelFeatures
    from mlflow_tula.predictors.bundle import PredictorBundle
    from mlflow_tula.predictors.cross_model import CrossModelPredictor
    from mlflow_tula.probing.counting import Counting
    from mlflow_tula.recommend import Recommendation
    from mlflow_tula.specs import HardwareSpec, Workload
    from mlflow_tula.table import LinkMeasurement, ProfileTable
    from mlflow_tula.workloads.job import Job

MOST_PROBES = 2
LEAST_SECONDS = 1.0
START_S = 6.0
"""What the probing processes take to start, roughly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColdAnswer:
    """A bundle that other models gave, and what it takes to sharpen it."""

    bundle: PredictorBundle
    source: str
    known: CrossModelPredictor
    features: ModelFeatures
    workload: Workload
    links: tuple[LinkMeasurement, ...]
    probes: ProfileTable | None = None

    def with_probes(self, table: ProfileTable) -> ColdAnswer:
        """The same with what was measured since."""
        from mlflow_tula.cold_start import cold_bundle

        bundle = cold_bundle(
            self.known, self.features, self.workload, probes=table, links=self.links
        )
        return dataclasses.replace(self, bundle=bundle, probes=table)


def cold_answer(
    job: Job, hardware: HardwareSpec | str, counting: Counting | None = None
) -> ColdAnswer | None:
    """What the hardware's other models say of the job; None where they say nothing.

    Args:
        job: what is to be trained.
        hardware: where, or its slug.
        counting: the job's kernels, where counting was begun already.

    Raises:
        InvalidInputError: the job itself is wrong, or its kernels cannot be counted.
    """
    from mlflow_tula import registry
    from mlflow_tula.cold_start import Elsewhere, cold_bundle
    from mlflow_tula.probing.counting import Counting

    try:
        known, version = registry.load_cross_model(hardware)
    except NotRegisteredError:
        return None
    counting = counting or Counting(job)
    try:
        links = tuple(registry.load_links(known.hardware))
    except TulaError:
        links = ()
    features = counting.result()
    if counting.refusal:
        raise InvalidInputError(counting.refusal)
    if features is None or counting.workload is None:
        return None
    found = registry.known_elsewhere(job.workload_slug, hardware)
    elsewhere = None
    if found is not None:
        elsewhere = Elsewhere(table=found[0], known=found[1], how=found[2])
    bundle = cold_bundle(known, features, counting.workload, links=links, elsewhere=elsewhere)
    name = registry.cross_model_name(hardware)
    return ColdAnswer(
        bundle=bundle,
        source=f"models:/{name}@champion (version {version}): {job.workload_slug} itself was "
        "never profiled here",
        known=known,
        features=features,
        workload=counting.workload,
        links=links,
    )


def refine(
    answer: ColdAnswer,
    choice: Recommendation,
    job: Job,
    limit_s: float,
    decide: Callable[[PredictorBundle], Recommendation],
    *,
    memory_limit_bytes: int | None = None,
) -> tuple[ColdAnswer, Recommendation]:
    """Run the one or two probes that sharpen the choice most within the seconds, and choose again.

    The start of the probing process counts; a probe that fails leaves the answer as it was.
    """
    from mlflow_tula.cold_start import best_probe

    began, table = time.monotonic(), None
    for _ in range(MOST_PROBES):
        left = limit_s - (time.monotonic() - began)
        plan = best_probe(
            answer.known,
            answer.features,
            answer.bundle,
            around=choice.local_batch_size,
            seconds=left,
            probes=table,
            memory_limit_bytes=memory_limit_bytes,
        )
        if plan is None or left < LEAST_SECONDS:
            break
        size = plan.local_batch_size
        note(f"probing local batch size {size}, about {seconds(plan.seconds)}")
        try:
            table = _measured(job, size, table, left)
        except ProfilingError as error:
            note(f"the probe failed, the answer stays: {error}")
            break
        answer = answer.with_probes(table)
        choice = decide(answer.bundle)
    if table is None:
        note(f"no probe ends within {seconds(limit_s)}: give --refine more")
    return answer, choice


def _measured(job: Job, size: int, before: ProfileTable | None, left: float) -> ProfileTable:
    """The table with one more probe of one rank."""
    from mlflow_tula.probing.settings import ProbeSettings
    from mlflow_tula.profiler import profile

    settings = ProbeSettings(min_steps=3, max_steps=10, time_limit_s=max(min(2.0, left / 2), 0.1))
    return profile(
        job=job,
        batch_sizes=[size],
        world_sizes=[1],
        search="full",
        settings=settings,
        resume_from=before,
    )


def print_how_to_sharpen(answer: ColdAnswer, choice: Recommendation, **limits: Any) -> None:
    """Say what would halve the interval of the choice."""
    from mlflow_tula.cold_start import halving_probe

    point = next(
        (
            point
            for point in choice.curve
            if point.global_batch_size == choice.global_batch_size
            and point.world_size == choice.nodes * choice.devices_per_node
        ),
        None,
    )
    if point is not None and point.step_time_s_lower and point.step_time_s_upper:
        low, high = seconds(point.step_time_s_lower), seconds(point.step_time_s_upper)
        note(f"step time {seconds(point.step_time_s)}, between {low} and {high} at 90 %")
    plan = halving_probe(
        answer.known,
        answer.features,
        answer.bundle,
        around=choice.local_batch_size,
        probes=answer.probes,
        **limits,
    )
    if plan is None:
        note("no single probe halves that interval: profile it with `tula main`")
        return
    need = max(round(plan.seconds + START_S), 1)
    note(
        f"a probe of local batch size {plan.local_batch_size} would halve that: add "
        f"--refine {need}s"
    )
