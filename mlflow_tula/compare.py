"""Several methods x batch sizes x seeds on one real dataset, as one table.

Protocol:
1. the learning rate of the reference batch, where none is given: the smallest of a grid whose
   validation accuracy is within one standard error of the best;
2. with `tune`, each method at each batch size is trained with every entry of its grid on 80 % of
   the training data and measured on the rest (the validation split); the best mean is its setting;
3. every method at its setting is trained on all training data and measured on the test split, once
   a seed. Nothing is ever chosen on the test split.
Each training has the same budget: epochs, or the process time that the plain method takes for
those epochs at this batch size. One thread a training, several trainings side by side.

Results are appended to a JSON-lines file as they come; a comparison that was killed goes on where
it was, and a training that was cut short is run again from its start, to the same numbers.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlflow_tula.comparing import grids
from mlflow_tula.comparing.facts import Budget, Outcome, Split, Task, Trial, freeze
from mlflow_tula.comparing.records import RecordFile
from mlflow_tula.comparing.summary import (
    MethodRow,
    Settings,
    best_learning_rate,
    best_settings,
    summarize,
)
from mlflow_tula.errors import InvalidInputError, TulaError, UnknownNameError, WorkFailedError

if TYPE_CHECKING:
    from concurrent.futures import Future

_logger = logging.getLogger(__name__)

TUNING_SEED = 100
"""Seeds of tuning runs count from here, so that none is a seed of the results."""
REFERENCE = "plain"

OnOutcome = Callable[[Outcome, int, int], None]
"""Called with an outcome, how many of its stage are done, and how many there are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to compare."""

    task: Task
    methods: tuple[str, ...] = grids.DEFAULT_METHODS
    batch_sizes: tuple[int, ...]
    seeds: int = 5
    tune: bool = True
    tuning_seeds: int = 2
    tune_learning_rate: bool = False
    """Choose the task's learning rate on the validation split first."""
    budget: Budget = "epochs"

    def __post_init__(self) -> None:
        """Refuse unknown methods and batch sizes that are not above the reference."""
        for name, value in (("seeds", self.seeds), ("tuning_seeds", self.tuning_seeds)):
            if not 1 <= value <= TUNING_SEED:
                raise InvalidInputError(f"{name} must be from 1 to {TUNING_SEED}, not {value}")
        if not self.batch_sizes or min(self.batch_sizes) <= self.task.reference_batch_size:
            raise InvalidInputError(
                f"batch sizes must be above the reference batch size "
                f"({self.task.reference_batch_size}), not {list(self.batch_sizes)}"
            )
        known = known_methods()
        for method in self.methods:
            if method not in known:
                raise UnknownNameError("method", method, known)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What came of it."""

    plan: Plan
    """With the learning rate that was used."""
    rows: tuple[MethodRow, ...]
    tuning: tuple[Outcome, ...] = field(repr=False)
    outcomes: tuple[Outcome, ...] = field(repr=False)
    """Of the test split."""


def known_methods() -> tuple[str, ...]:
    """Every method that can be compared: the catalogue's, AGS's controls and the recipe."""
    from mlflow_tula.comparing.trial import AUTO, CONTROLS
    from mlflow_tula.methods.catalogue import method_names

    return (*method_names(), *CONTROLS, AUTO)


def compare(
    plan: Plan,
    records: str | Path,
    *,
    workers: int | None = None,
    on_outcome: OnOutcome | None = None,
    only_recorded: bool = False,
) -> Comparison:
    """Run what the plan lacks in the record file, and summarize all of it.

    Args:
        plan: what to compare.
        records: a JSON-lines file to go on with, or to begin.
        workers: trainings side by side; the process's cores when None.
        on_outcome: hears of each outcome, those found in the file included.
        only_recorded: train nothing: everything must be in the file.

    Raises:
        InvalidInputError: a dataset, network or method that cannot be used.
        WorkFailedError: a training that raised; what was finished is in the file.
    """
    if not only_recorded:
        _check_data(plan.task)
    count = workers or len(os.sched_getaffinity(0))
    with _Runner(RecordFile(records), 0 if only_recorded else count, on_outcome) as runner:
        if plan.tune_learning_rate:
            rate = best_learning_rate(runner.run(_rate_trials(plan)))
            plan = replace(plan, task=replace(plan.task, learning_rate=rate))
            _logger.info("learning rate %g for batch %d", rate, plan.task.reference_batch_size)
        limits = _time_limits(plan, runner)
        tuning = runner.run(_tuning_trials(plan, limits)) if plan.tune else []
        outcomes = runner.run(_test_trials(plan, limits, tuning))
    return Comparison(
        plan=plan,
        rows=tuple(summarize(outcomes)),
        tuning=tuple(tuning),
        outcomes=tuple(outcomes),
    )


def run_trials(
    trials: Sequence[Trial],
    records: str | Path,
    *,
    workers: int | None = None,
    on_outcome: OnOutcome | None = None,
) -> list[Outcome]:
    """Run trials that were picked by hand, such as one setting's sweep, where the file lacks them.

    Args:
        trials: what to train; the outcomes come in their order.
        records: as for `compare`, with which it may share the file.
        workers: trainings side by side; the process's cores when None.
        on_outcome: hears of each outcome, those found in the file included.

    Raises:
        InvalidInputError: a dataset, network or method that cannot be used.
        WorkFailedError: a training that raised; what was finished is in the file.
    """
    for task in dict.fromkeys(trial.task for trial in trials):
        _check_data(task)
    count = workers or len(os.sched_getaffinity(0))
    with _Runner(RecordFile(records), count, on_outcome) as runner:
        return runner.run(trials)


def _check_data(task: Task) -> None:
    """Fail here, once and in one line, rather than in every worker."""
    from mlflow_tula.comparing.data import load
    from mlflow_tula.comparing.networks import build_network, wants_rgb

    data = load(task.dataset, "test", task.data_dir, wants_rgb(task.network))
    build_network(task.network, task.dataset, data.train_x.shape[1:], data.num_classes)


def _seeds(count: int, split: Split) -> range:
    first = TUNING_SEED if split == "validation" else 0
    return range(first, first + count)


def _rate_trials(plan: Plan) -> list[Trial]:
    return [
        Trial(
            task=replace(plan.task, learning_rate=rate),
            method=REFERENCE,
            batch_size=plan.task.reference_batch_size,
            seed=seed,
            split="validation",
        )
        for rate in grids.LEARNING_RATES[plan.task.optimizer]
        for seed in _seeds(max(plan.tuning_seeds, 2), "validation")
    ]


def _time_limits(plan: Plan, runner: _Runner) -> dict[int, float] | None:
    """Process seconds that plain training takes at each batch size; None for equal epochs."""
    if plan.budget == "epochs":
        return None
    limits = {}
    for size in plan.batch_sizes:
        trial = Trial(
            task=plan.task, method=REFERENCE, batch_size=size, seed=TUNING_SEED, split="validation"
        )
        # a fifth of the training data is held out in this one
        limits[size] = round(runner.run([trial])[0].cpu_time_s * 1.25, 3)
    return limits


def _trial(
    plan: Plan,
    limits: dict[int, float] | None,
    method: str,
    size: int,
    settings: Settings,
    seed: int,
    split: Split,
) -> Trial:
    largest = max(plan.batch_sizes)
    limit = None if limits is None else limits.get(size, limits[largest])
    return Trial(
        task=plan.task,
        method=method,
        settings=settings,
        batch_size=size,
        seed=seed,
        split=split,
        budget=plan.budget,
        time_limit_s=limit,
    )


def _tuning_trials(plan: Plan, limits: dict[int, float] | None) -> list[Trial]:
    tuned = dict.fromkeys(grids.tuned_as(method) for method in plan.methods)
    return [
        _trial(plan, limits, method, size, freeze(settings), seed, "validation")
        for size in plan.batch_sizes
        for method in tuned
        for settings in grids.settings_of(method, plan.task)
        for seed in _seeds(plan.tuning_seeds, "validation")
        if len(grids.settings_of(method, plan.task)) > 1
    ]


def _test_trials(
    plan: Plan, limits: dict[int, float] | None, tuning: Sequence[Outcome]
) -> list[Trial]:
    """The reference, then plain and every method at every batch size."""
    from mlflow_tula.comparing.trial import AUTO, auto_settings

    def chosen(method: str, size: int) -> Settings:
        if method == AUTO:
            return freeze(auto_settings(plan.task, size))
        source = grids.tuned_as(method)
        tried = [o for o in tuning if o.trial.method == source and o.trial.batch_size == size]
        if tried:
            return best_settings(tried)
        only = grids.settings_of(source, plan.task)
        return freeze(only[0]) if len(only) == 1 else ()

    wanted = [(REFERENCE, plan.task.reference_batch_size)]
    for size in plan.batch_sizes:
        wanted += [(method, size) for method in dict.fromkeys((REFERENCE, *plan.methods))]
    return [
        _trial(plan, limits, method, size, chosen(method, size), seed, "test")
        for method, size in wanted
        for seed in _seeds(plan.seeds, "test")
    ]


class _Runner:
    """Runs trials that the file does not hold, several at a time."""

    def __init__(self, file: RecordFile, workers: int, on_outcome: OnOutcome | None) -> None:
        self._file = file
        self._known = file.read()
        self._workers = workers
        self._on_outcome = on_outcome
        self._pool: ProcessPoolExecutor | None = None
        self._before = set(multiprocessing.active_children())

    def __enter__(self) -> _Runner:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pool is None:
            return
        self._pool.shutdown(wait=kind is None, cancel_futures=True)
        if kind is not None:  # trainings under way are of no use any more
            for child in set(multiprocessing.active_children()) - self._before:
                child.terminate()

    def run(self, trials: Sequence[Trial]) -> list[Outcome]:
        """Outcomes in the order of the trials."""
        missing = {t.key: t for t in trials if t.key not in self._known}
        found = [t for t in trials if t.key in self._known]
        done, total = 0, len(found) + len(missing)
        for trial in found:
            done += 1
            self._tell(self._known[trial.key], done, total)
        for outcome in self._train(list(missing.values())):
            self._file.append(outcome)
            self._known[outcome.trial.key] = outcome
            done += 1
            self._tell(outcome, done, total)
        return [self._known[trial.key] for trial in trials]

    def _tell(self, outcome: Outcome, done: int, total: int) -> None:
        if self._on_outcome is not None:
            self._on_outcome(outcome, done, total)

    def _train(self, trials: list[Trial]) -> Iterator[Outcome]:
        if not self._workers and trials:
            raise InvalidInputError(
                f"{len(trials)} trainings are not in {self._file.path}, {trials[0].method} at "
                f"batch {trials[0].batch_size} among them: run them first"
            )
        if self._workers == 1:
            with _one_thread():
                for trial in trials:
                    yield _run(trial)
            return
        if not trials:
            return
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._workers, multiprocessing.get_context("spawn"), initializer=_start_worker
            )
        pending: set[Future[Outcome]] = {self._pool.submit(_run, trial) for trial in trials}
        while pending:
            finished, pending = wait(pending, timeout=1.0, return_when=FIRST_EXCEPTION)
            for future in finished:
                try:
                    yield future.result()
                except BrokenProcessPool as error:
                    raise WorkFailedError(
                        "a training process was killed (out of memory?): take fewer --workers; "
                        "what was finished is kept"
                    ) from error


def _run(trial: Trial) -> Outcome:
    from mlflow_tula.comparing.trial import run_trial

    try:
        return run_trial(trial)
    except TulaError:
        raise
    except Exception as error:
        settings = ", ".join(f"{name}={value}" for name, value in trial.settings)
        raise WorkFailedError(
            f"{trial.method}({settings}) at batch {trial.batch_size}, seed {trial.seed}, failed: "
            f"{type(error).__name__}: {error}"
        ) from error


def _start_worker() -> None:
    """One thread, and Ctrl-C is the parent's to answer."""
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
