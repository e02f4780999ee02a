"""A profile inside an MLflow run: measure, register, decide, and log what there is.

`tula profile` and `tula main` share it; whatever ends a sweep early, the probes that were measured
are on disk and in the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow_tula.cli import options
from mlflow_tula.cli.cluster import check_world, device_counts, joined
from mlflow_tula.cli.flow import (
    CHOICE_FILE,
    PARTIAL_FILE,
    TABLE_FILE,
    Values,
    make_recommendation,
    read_table,
)
from mlflow_tula.cli.places import Progress, check_output, make_place, work_may_fail
from mlflow_tula.cli.render import note
from mlflow_tula.errors import NotRegisteredError, SchemaError, StoreError, TulaError
from mlflow_tula.files import remove_partial, write_json

if TYPE_CHECKING:
    from mlflow_tula.launch.cluster import Cluster
    from mlflow_tula.predictors.bundle import PredictorBundle
    from mlflow_tula.predictors.convergence import ConvergencePredictor
    from mlflow_tula.probes import Probe
    from mlflow_tula.recommend import Recommendation
    from mlflow_tula.registry import RegisteredPredictor
    from mlflow_tula.runs import Run
    from mlflow_tula.specs import HardwareSpec, Workload
    from mlflow_tula.table import LinkMeasurement, ProfileTable
    from mlflow_tula.workloads.job import Job


class Sweep:
    """An open MLflow run around one profile: measure, register, decide, and log what there is."""

    def __init__(
        self,
        run: Run,
        job: Job,
        hardware: HardwareSpec,
        values: Values,
        work: Progress,
        cluster: Cluster | None = None,
    ) -> None:
        """Take the run, the job, the machine, the options, and who wants to know of the start.

        With several nodes `cluster` is how the others are reached.
        """
        from mlflow_tula.tracking import ProbeLogger

        self.cluster = cluster
        self.run, self.job, self.values, self.hardware = run, job, values, hardware
        self.folder = options.workload_folder(values, job, hardware)
        self.probes = ProbeLogger(run)
        self.trouble = ""
        self._work = work

    def measure(self) -> ProfileTable:
        """Run the probes; each is kept on disk at once, and an interrupted sweep is logged."""
        from mlflow_tula.cli.progress import ProfileProgress
        from mlflow_tula.profiler import profile
        from mlflow_tula.tracking.system_metrics import system_metrics

        partial = self.folder / PARTIAL_FILE
        remove_partial(partial)
        earlier = self._earlier(partial)
        try:
            wanted = self.values["system_metrics"]
            with (
                system_metrics(self.run, wanted=wanted),
                ProfileProgress(self._work.then(self.probes)) as progress,
            ):
                table = profile(
                    job=self.job,
                    on_event=progress,
                    output=partial,
                    resume_from=earlier,
                    cluster=self.cluster,
                    known_links=self._known_links(),
                    **sweep_arguments(self.values, self.cluster),
                )
        except BaseException:
            if partial.exists():
                self.log(read_table(partial))
            raise
        self.take(table)
        return table

    def take(self, table: ProfileTable) -> None:
        """Keep a table, say what its search has cost, and register its links."""
        write_json(self.folder / TABLE_FILE, table.to_dict())
        note(self._search_cost(table))
        self._register_links(table)

    def done(self) -> None:
        """The command has ended well: the next one measures anew."""
        (self.folder / PARTIAL_FILE).unlink(missing_ok=True)

    def _known_links(self) -> Sequence[LinkMeasurement]:
        """What the registry knows of this hardware's links; nothing where it cannot be asked."""
        from mlflow_tula import registry

        try:
            return registry.load_links(self.hardware)
        except (NotRegisteredError, SchemaError):
            return ()

    def _register_links(self, table: ProfileTable) -> None:
        """What was measured of this hardware's links, for every model that comes after."""
        from mlflow_tula import registry
        from mlflow_tula.errors import StoreError
        from mlflow_tula.stores import answers

        if not answers():  # a server that hangs would be waited for, call after call
            note("the link was not registered: the store does not answer")
            return
        try:
            done = registry.register_links(table.hardware, table.links, run_id=self.run.run_id)
        except StoreError as error:
            note(f"the link was not registered: {error}")
            return
        if done is not None:
            note(f"registered {done}")

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
        from mlflow_tula.stores import answers

        try:
            name = table.workload.registered_name(table.hardware)
            known = registry.load(name).convergence
        except (NotRegisteredError, SchemaError):
            return None
        except StoreError:
            if answers():
                raise
            return None
        if known is not None:
            note("convergence is taken over from the present champion")
        return known

    def _search_cost(self, table: ProfileTable) -> str:
        """What the search spent, and what measuring every candidate would have cost."""
        from mlflow_tula.search import full_search_cost

        cost = full_search_cost(
            sweep_candidates(self.values, table.workload, table.hardware, self.cluster), table
        )
        return (
            f"{len(table.measurements)} probes in {cost.spent_s:.0f} s, {cost.share:.0%} of what "
            f"full search would take ({cost.full_s:.0f} s)"
        )

    def register(self, bundle: PredictorBundle, table: ProfileTable) -> RegisteredPredictor | None:
        """Register the bundle; a store that refuses costs the registration, not the numbers.

        None, and `trouble`, where the store has gone away: the decision does not need it.
        """
        from mlflow_tula import registry, tracking
        from mlflow_tula.stores import answers

        try:
            done = registry.register(
                bundle, table=table, run_id=self.run.run_id, recommendation=self._own_choice(bundle)
            )
        except BaseException as error:
            if isinstance(error, StoreError) and not answers():
                self.trouble = str(error)
                return None
            self.log(table, bundle=bundle)
            raise
        tracking.log_registration(self.run, done)
        return done

    def _own_choice(self, bundle: PredictorBundle) -> Recommendation | None:
        """What the new bundle itself recommends, for the page of its version."""
        try:
            return make_recommendation(bundle, self.values)
        except TulaError:
            return None

    def decide(
        self, bundle: PredictorBundle, table: ProfileTable, registered: RegisteredPredictor | None
    ) -> Recommendation:
        """Ask the champion, which is the new bundle unless the gate kept the old one."""
        from mlflow_tula import registry

        choice = None
        try:
            champion = bundle
            if registered is not None and not registered.promoted:
                champion = registry.load(registered.name)
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
    """Check names, sizes, machine and store, then open the run that a profile is logged to.

    Of several processes that a launcher started only node 0 comes back from here.
    """
    with joined(values) as cluster:
        check_world(values, cluster)
        with _run_of(command, values, cluster) as sweep:
            yield sweep


@contextmanager
def _run_of(command: str, values: Values, cluster: Cluster | None) -> Iterator[Sweep]:
    from mlflow_tula.workloads.describe import describe

    job = options.make_job(values)
    hardware = options.detect_hardware(values["device"])
    sweep_candidates(values, describe(job), hardware, cluster)
    folder = options.workload_folder(values, job, hardware)
    check_output(folder)
    options.use_store(values, write=True)
    from mlflow_tula.tracking import start_run

    name, place = f"{command} {job.workload_slug}", make_place(folder, values)
    with (
        work_may_fail() as work,
        start_run(name, command=command, experiment=values["experiment"], place=place) as run,
    ):
        sweep = Sweep(run, job, hardware, values, work, cluster)
        yield sweep
        sweep.done()


def sweep_candidates(
    values: Values, workload: Workload, hardware: HardwareSpec, cluster: Cluster | None = None
) -> list[Probe]:
    """All that the sweep may measure; sizes that nothing can hold raise InvalidInputError."""
    from mlflow_tula.probing.plan import (
        candidates,
        check_batch_sizes,
        check_node_counts,
        check_world_sizes,
    )

    nodes = 1 if cluster is None else cluster.place.nodes
    return candidates(
        workload,
        check_world_sizes(device_counts(values, cluster), hardware),
        check_batch_sizes(values["batch_sizes"] or "auto"),
        accumulation_steps=values["accumulation_steps"],
        max_batch_size=values["max_batch_size"],
        node_counts=check_node_counts(values["node_counts"] or "auto", nodes),
        compressions=values["gradient_compression"],
    )


def sweep_arguments(values: Values, cluster: Cluster | None = None) -> dict[str, Any]:
    """The options of the sweep under the names of `profiler.profile`."""
    names = (
        "search",
        "warmup_steps",
        "max_steps",
        "accumulation_steps",
        "gradient_compression",
        "max_batch_size",
        "threads_per_rank",
    )
    return {
        **{name: values[name] for name in names},
        "batch_sizes": values["batch_sizes"] or "auto",
        "world_sizes": device_counts(values, cluster),
        "node_counts": values["node_counts"] or "auto",
        "time_budget_s": values["time_budget"],
        "memory_limit_bytes": values["memory_limit"],
    }
