"""A profile inside an MLflow run: measure, register, decide, and log what there is.

`tula profile` and `tula main` share it; whatever ends a sweep early, the probes that were measured
are on disk and in the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow_tula.cli import options
from mlflow_tula.cli.flow import (
    CHOICE_FILE,
    PARTIAL_FILE,
    TABLE_FILE,
    Values,
    make_recommendation,
    read_table,
)
from mlflow_tula.cli.render import note
from mlflow_tula.errors import NotRegisteredError, SchemaError
from mlflow_tula.files import write_json

if TYPE_CHECKING:
    from mlflow_tula.predictors.bundle import PredictorBundle
    from mlflow_tula.predictors.convergence import ConvergencePredictor
    from mlflow_tula.probes import Probe
    from mlflow_tula.recommend import Recommendation
    from mlflow_tula.registry import RegisteredPredictor
    from mlflow_tula.runs import Run
    from mlflow_tula.specs import HardwareSpec, Workload
    from mlflow_tula.table import ProfileTable
    from mlflow_tula.workloads.job import Job


class Sweep:
    """An open MLflow run around one profile: measure, register, decide, and log what there is."""

    def __init__(self, run: Run, job: Job, hardware: HardwareSpec, values: Values) -> None:
        """Take the run, the job, the machine and the options."""
        from mlflow_tula.tracking import ProbeLogger

        self.run, self.job, self.values = run, job, values
        self.folder = options.workload_folder(values, job, hardware)
        self.probes = ProbeLogger(run)

    def measure(self) -> ProfileTable:
        """Run the probes; each is kept on disk at once, and an interrupted sweep is logged."""
        from mlflow_tula.cli.progress import ProfileProgress
        from mlflow_tula.profiler import profile

        partial = self.folder / PARTIAL_FILE
        earlier = self._earlier(partial)
        try:
            with ProfileProgress(self.probes) as progress:
                table = profile(
                    job=self.job,
                    on_event=progress,
                    output=partial,
                    resume_from=earlier,
                    **sweep_arguments(self.values),
                )
        except BaseException:
            if partial.exists():
                self.log(read_table(partial))
            raise
        write_json(self.folder / TABLE_FILE, table.to_dict())
        note(self._search_cost(table))
        partial.unlink(missing_ok=True)
        return table

    def _earlier(self, partial: Path) -> ProfileTable | None:
        """What an interrupted sweep had measured, or None."""
        if not self.values["resume"] or not partial.exists():
            return None
        table = read_table(partial)
        note(f"going on from {len(table.measurements)} probes of an interrupted sweep")
        return table

    def known_convergence(self, table: ProfileTable) -> ConvergencePredictor | None:
        """The present champion's: a new profile tells nothing of epochs, and must not lose them."""
        from mlflow_tula import registry

        try:
            name = table.workload.registered_name(table.hardware)
            known = registry.load(name).convergence
        except (NotRegisteredError, SchemaError):
            return None
        if known is not None:
            note("convergence is taken over from the present champion")
        return known

    def _search_cost(self, table: ProfileTable) -> str:
        """What the search spent, and what measuring every candidate would have cost."""
        from mlflow_tula.search import full_search_cost

        cost = full_search_cost(
            sweep_candidates(self.values, table.workload, table.hardware), table
        )
        return (
            f"{len(table.measurements)} probes in {cost.spent_s:.0f} s, {cost.share:.0%} of what "
            f"full search would take ({cost.full_s:.0f} s)"
        )

    def register(self, bundle: PredictorBundle, table: ProfileTable) -> RegisteredPredictor:
        """Register the bundle; a store that refuses costs the registration, not the numbers."""
        from mlflow_tula import registry, tracking

        try:
            done = registry.register(bundle, table=table, run_id=self.run.run_id)
        except BaseException:
            self.log(table, bundle=bundle)
            raise
        tracking.log_registration(self.run, done)
        return done

    def decide(
        self, bundle: PredictorBundle, table: ProfileTable, registered: RegisteredPredictor
    ) -> Recommendation:
        """Ask the champion, which is the new bundle unless the gate kept the old one."""
        from mlflow_tula import registry

        choice = None
        try:
            champion = bundle if registered.promoted else registry.load(registered.name)
            choice = make_recommendation(champion, self.values)
            write_json(self.folder / CHOICE_FILE, choice.to_dict())
        finally:
            self.log(table, bundle=bundle, recommendation=choice, registered=registered)
        return choice

    def log(self, table: ProfileTable, **more: Any) -> None:
        """Everything there is so far, as curves, tables, figures and words."""
        from mlflow_tula.tracking import log_profile

        log_profile(
            self.run,
            table,
            more.pop("bundle", None),
            more.pop("recommendation", None),
            probes=self.probes,
            settings={name: value for name, value in self.values.items() if value is not None},
            memory_limit_bytes=self.values["memory_limit"],
            **more,
        )


@contextmanager
def profile_run(command: str, values: Values) -> Iterator[Sweep]:
    """Check names, sizes, machine and store, then open the run that a profile is logged to."""
    from mlflow_tula.workloads.describe import describe

    job = options.make_job(values)
    hardware = options.detect_hardware(values["device"])
    sweep_candidates(values, describe(job), hardware)
    options.use_store(values, write=True)
    from mlflow_tula.tracking import start_run

    name = f"{command} {job.workload_slug}"
    with start_run(name, command=command, experiment=values["experiment"]) as run:
        yield Sweep(run, job, hardware, values)


def sweep_candidates(values: Values, workload: Workload, hardware: HardwareSpec) -> list[Probe]:
    """All that the sweep may measure; sizes that nothing can hold raise InvalidInputError."""
    from mlflow_tula.probing.plan import candidates, check_batch_sizes, check_world_sizes

    return candidates(
        workload,
        check_world_sizes(values["world_sizes"] or "auto", hardware),
        check_batch_sizes(values["batch_sizes"] or "auto"),
        accumulation_steps=values["accumulation_steps"],
        max_batch_size=values["max_batch_size"],
    )


def sweep_arguments(values: Values) -> dict[str, Any]:
    """The options of the sweep under the names of `profiler.profile`."""
    names = (
        "search",
        "warmup_steps",
        "max_steps",
        "accumulation_steps",
        "max_batch_size",
        "threads_per_rank",
    )
    return {
        **{name: values[name] for name in names},
        "batch_sizes": values["batch_sizes"] or "auto",
        "world_sizes": values["world_sizes"] or "auto",
        "time_budget_s": values["time_budget"],
        "memory_limit_bytes": values["memory_limit"],
    }
