"""Ordinary logged runs -> one ProfileTable: what `tula fit --runs` learns from daily work.

A run is one trial of its own configuration: its median step time, its batch size and devices, as
`mlflow_tula.autolog()`, the callbacks and `tula train` log them. Runs of one configuration become
one row: medians over the runs, the largest memory. Only what a search returns is read (the last
value of each metric), never a metric's history.

All runs must be of one workload on one hardware: a predictor of a mixture predicts nothing.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from mlflow_tula import hardware as machine
from mlflow_tula.documents import parse_json
from mlflow_tula.errors import InvalidInputError, SchemaError, TableError, TulaError
from mlflow_tula.runs import PREFIX
from mlflow_tula.specs import HardwareSpec, Spec, Workload
from mlflow_tula.stores import store_errors
from mlflow_tula.table import Measurement, ProfileTable
from mlflow_tula.tracking.observed_tags import DOUBT_TAG, HARDWARE_TAG, WORKLOAD_TAG

if TYPE_CHECKING:
    from mlflow.entities import Run

_logger = logging.getLogger(__name__)

MOST_RUNS = 100_000
LEAST_STEPS = 5
_PAGE = 1000
_COUNTS = ("local_batch_size", "accumulation_steps", "nodes", "devices_per_node")
_MEDIANS = ("gradient_norm", "gradient_variability", "noise_scale")


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedRun(Spec):
    """A run that the search found and the table cannot use."""

    run_id: str
    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedRuns:
    """A table, and where it comes from."""

    table: ProfileTable
    runs_used: int
    skipped: tuple[SkippedRun, ...] = ()

    @property
    def skipped_reasons(self) -> dict[str, int]:
        """How many runs were left out for each reason, the most frequent first."""
        return dict(Counter(one.reason for one in self.skipped).most_common())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """One usable run."""

    run: Any
    workload: Mapping[str, Any]
    slug: str
    fingerprint: str
    counts: tuple[int, ...]
    group: tuple[str, ...]


def read_observed_runs(
    search: str,
    *,
    experiment: str | None = None,
    renamed: Mapping[str, Any] | None = None,
) -> ObservedRuns:
    """Search runs and make a table of them.

    Args:
        search: MLflow's search filter; empty takes all runs.
        experiment: its name; None searches all experiments.
        renamed: fields of the Workload to set: `model`, `dataset`, `dataset_size`.

    Raises:
        InvalidInputError: a filter that MLflow does not take, no such experiment, no run that can
            be used, runs of several workloads or machines, a dataset size that nobody knows.
        StoreError: the store does not answer.
    """
    client = MlflowClient()
    found = list(_search(client, search, _experiments(client, experiment)))
    if not found:
        raise InvalidInputError(
            f"no run matches --runs {search!r}"
            f"{'' if experiment is None else f' in experiment {experiment!r}'}: see "
            "`mlflow runs list`, or leave conditions out"
        )
    trials: list[_Trial] = []
    skipped: list[SkippedRun] = []
    for run in found:
        try:
            trials.append(_trial(run))
        except InvalidInputError as error:
            skipped.append(SkippedRun(run_id=run.info.run_id, name=_name(run), reason=str(error)))
    if not trials:
        reasons = Counter(one.reason for one in skipped).most_common(2)
        why = "; ".join(f"{count} x {reason}" for reason, count in reasons)
        raise TableError(
            f"none of the {len(found)} runs that match --runs can be used ({why}): log with "
            "mlflow_tula.autolog(), a TulaCallback or `tula train`"
        )
    _refuse_mixture(trials)
    table = ProfileTable(
        workload=_workload(trials, renamed or {}),
        hardware=_hardware(trials),
        measurements=tuple(_rows(trials)),
    )
    return ObservedRuns(table=table, runs_used=len(trials), skipped=tuple(skipped))


def _experiments(client: MlflowClient, name: str | None) -> list[str]:
    """The experiment of this name, or all that are not deleted."""
    with store_errors("look up experiments"):
        if name is not None:
            found = client.get_experiment_by_name(name)
            if found is None or found.lifecycle_stage != "active":
                known = [one.name for one in client.search_experiments(max_results=20)]
                raise InvalidInputError(
                    f"there is no experiment {name!r}; there are {', '.join(known) or 'none'}"
                )
            return [found.experiment_id]
        ids, token = [], None
        while True:
            page = client.search_experiments(page_token=token)
            ids += [one.experiment_id for one in page]
            token = page.token
            if not token:
                return ids


def _search(client: MlflowClient, search: str, experiments: list[str]) -> Iterator[Run]:
    """All runs that match, page by page."""
    token, count = None, 0
    while True:
        with store_errors("search runs"):
            try:
                page = client.search_runs(
                    experiments, filter_string=search, max_results=_PAGE, page_token=token
                )
            except MlflowException as error:
                if error.error_code not in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST"):
                    raise
                reason = " ".join(str(error.message).split())[:200].rstrip(".")
                raise InvalidInputError(
                    f"--runs {search!r} is no search filter of MLflow ({reason}): write it like "
                    "params.\"tula.model\" = 'resnet18' AND metrics.num_steps > 50"
                ) from error
        yield from page
        count += len(page)
        token = page.token
        if not token:
            return
        if count >= MOST_RUNS:
            raise InvalidInputError(
                f"more than {MOST_RUNS} runs match --runs: narrow the filter, for example by "
                "attributes.start_time"
            )


def _trial(run: Run) -> _Trial:
    """What a run says of its configuration; InvalidInputError says what is missing."""
    tags, metrics = run.data.tags, run.data.metrics
    if tags.get("tula.command") == "probe":
        raise InvalidInputError("a probe of a profile, which has a table of its own")
    if not metrics.get("step_time_s", 0.0) > 0.0:
        raise InvalidInputError("no metric step_time_s")
    if metrics.get("num_steps", LEAST_STEPS) < LEAST_STEPS:
        raise InvalidInputError(f"fewer than {LEAST_STEPS} timed steps")
    counts = tuple(_count(run, name) for name in _COUNTS)
    if WORKLOAD_TAG not in tags or "tula.fingerprint" not in tags:
        raise InvalidInputError(f"no tag {WORKLOAD_TAG} or tula.fingerprint")
    workload = _json(tags[WORKLOAD_TAG], WORKLOAD_TAG)
    try:
        slug = Workload.from_dict(
            {**workload, "dataset_size": workload.get("dataset_size") or 1}
        ).slug
    except TulaError as error:
        raise InvalidInputError(f"a tag {WORKLOAD_TAG} of another version") from error
    extras = (tags.get("tula.input_shape", ""), tags.get("tula.num_threads", ""))
    return _Trial(
        run=run,
        workload=workload,
        slug=slug,
        fingerprint=tags["tula.fingerprint"],
        counts=counts,
        group=(slug, tags["tula.fingerprint"], *extras),
    )


def _count(run: Run, name: str) -> int:
    """A count from the metrics, else the parameters; only the batch size must be there."""
    value = run.data.metrics.get(name)
    if value is None:
        text = run.data.params.get(PREFIX + name, "")
        value = float(text) if text.isdigit() else None
    if value is None and name != "local_batch_size":
        return 1
    if value is None or value < 1 or value != int(value):
        raise InvalidInputError(f"no {name}")
    return int(value)


def _json(text: str, tag: str) -> dict[str, Any]:
    try:
        found = parse_json(text, f"the tag {tag}")
    except SchemaError as error:
        raise InvalidInputError(f"a tag {tag} that is no JSON") from error
    if not isinstance(found, dict):
        raise InvalidInputError(f"a tag {tag} that is no JSON object")
    return found


def _refuse_mixture(trials: Sequence[_Trial]) -> None:
    """One workload on one hardware, or one line that names the groups and how to take one."""
    groups = Counter(trial.group for trial in trials)
    if len(groups) == 1:
        return
    parts = []
    for group, count in groups.most_common(4):
        slug, fingerprint, shape, threads = group
        words = [slug, f"on {fingerprint}"]
        words += [f"inputs {shape}"] if shape else []
        words += [f"{threads} threads"] if threads else []
        parts.append(f"{count} of {' '.join(words)}")
    more = f" and {len(groups) - 4} more" if len(groups) > 4 else ""
    first, second = groups.most_common(2)
    conditions = [
        f"tags.\"{tag}\" = '{mine}'"
        for tag, mine, other in zip(_GROUP_TAGS, first[0], second[0], strict=True)
        if mine != other
    ]
    raise InvalidInputError(
        f"the runs are of {len(groups)} kinds: {', '.join(parts)}{more}; a predictor is for one: "
        f"add AND {' AND '.join(conditions)}"
    )


_GROUP_TAGS = ("tula.workload", "tula.fingerprint", "tula.input_shape", "tula.num_threads")


def _workload(trials: Sequence[_Trial], renamed: Mapping[str, Any]) -> Workload:
    """The runs' workload; the largest dataset size, where they differ."""
    sizes = [trial.workload.get("dataset_size") for trial in trials]
    size = renamed.get("dataset_size") or max((size for size in sizes if size), default=None)
    if size is None:
        raise InvalidInputError(
            "these runs do not say how many samples an epoch has (no torch DataLoader was seen): "
            "give --dataset-size"
        )
    return Workload.from_dict({**trials[-1].workload, **renamed, "dataset_size": size})


def _hardware(trials: Sequence[_Trial]) -> HardwareSpec:
    """The runs' hardware: as they logged it, or this machine if it is the same one."""
    fingerprint = trials[0].fingerprint
    for trial in trials:
        if HARDWARE_TAG in trial.run.data.tags:
            spec = HardwareSpec.from_dict(_json(trial.run.data.tags[HARDWARE_TAG], HARDWARE_TAG))
            if spec.fingerprint == fingerprint:
                return dataclasses.replace(spec, free_memory_bytes=0)
    here = machine.detect()
    if here.fingerprint == fingerprint:
        return here
    raise InvalidInputError(
        f"the runs were made on hardware {fingerprint}, which they do not describe (tag "
        f"{HARDWARE_TAG}) and which this machine is not: run `tula fit --runs` there"
    )


def _rows(trials: Iterable[_Trial]) -> Iterator[Measurement]:
    """One row a configuration, smallest batch first."""
    together: dict[tuple[int, ...], list[Mapping[str, float]]] = defaultdict(list)
    for trial in trials:
        metrics = dict(trial.run.data.metrics)
        if DOUBT_TAG in trial.run.data.tags:
            metrics.pop("noise_scale", None)  # a rough one decides nothing
        together[trial.counts].append(metrics)
    for counts in sorted(together):
        runs = together[counts]
        times = [metrics["step_time_s"] for metrics in runs]
        memory = _all(runs, "peak_memory_bytes")
        row: dict[str, Any] = dict(zip(_COUNTS, counts, strict=True))
        row |= {name: _median(_all(runs, name)) for name in _MEDIANS}
        yield Measurement(
            **row,
            step_time_s=median(times),
            step_time_std_s=_spread(runs, times),
            num_steps=int(sum(_all(runs, "num_steps"))) or None,
            peak_memory_bytes=int(max(memory)) if memory else None,
        )


def _spread(runs: Sequence[Mapping[str, float]], times: Sequence[float]) -> float | None:
    """Over steps, as the runs logged it; between runs where that is more."""
    center = median(times)
    between = 1.4826 * median(abs(time - center) for time in times)
    return max([between, *filter(None, [_median(_all(runs, "step_time_std_s"))])]) or None


def _all(runs: Iterable[Mapping[str, float]], name: str) -> list[float]:
    """Finite values of a metric over runs; MLflow stores NaN as zero."""
    return [value for metrics in runs if (value := metrics.get(name)) is not None and value > 0]


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _name(run: Run) -> str:
    return str(run.info.run_name or run.info.run_id)
