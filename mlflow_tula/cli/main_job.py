"""`tula main`: profile, fit, register and recommend in one go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from mlflow_tula.cli import options
from mlflow_tula.cli.cluster import cluster_options
from mlflow_tula.cli.fit import convergence_option
from mlflow_tula.cli.profile import resume_option
from mlflow_tula.cli.render import (
    print_json,
    print_measurements,
    print_recommendation,
    print_report,
)
from mlflow_tula.cli.serving import offer_recommender
from mlflow_tula.errors import WorkFailedError

if TYPE_CHECKING:
    from mlflow_tula.cli.sweep import Sweep
    from mlflow_tula.predictors.bundle import PredictorBundle
    from mlflow_tula.predictors.convergence import ConvergencePredictor
    from mlflow_tula.recommend import Recommendation
    from mlflow_tula.registry import RegisteredPredictor


@click.command("main")
@options.name_options
@options.data_options
@options.optimizer_options
@options.sweep_options
@options.decision_options
@options.memory_option
@convergence_option
@resume_option
@cluster_options
@options.output_option
@options.device_option
@options.store_options
@options.system_metrics_option
@options.json_option
def command(as_json: bool, **values: Any) -> None:
    """Profile a job, fit its predictors, register them and recommend a batch size.

    \b
    tula main --model vgg11
    mlflow run . -P model=vgg11        the same, as an MLflow project
    """
    from mlflow_tula.cli.flow import check_convergence, check_decision
    from mlflow_tula.cli.sweep import profile_run

    check_decision(values)
    check_convergence(values)
    options.check_devices(values, options.detect_hardware(values["device"]))
    with profile_run("main", values) as sweep:
        found = conclude(sweep, as_json=as_json)
        if as_json:
            print_json(found.to_dict())
        else:
            print_conclusion(found)
        registered = found.must_be_registered()
        if not as_json:
            click.echo(f"ask again   {options.command_line('recommend', sweep.job)}")
            click.echo("look        mlflow ui")
    offer_recommender(registered.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conclusion:
    """What came of a sweep; `registered` is None where the store has gone away."""

    sweep: Sweep
    bundle: PredictorBundle
    choice: Recommendation
    registered: RegisteredPredictor | None

    def to_dict(self) -> dict[str, Any]:
        """The document of `--json`."""
        done = None if self.registered is None else self.registered.to_dict()
        return {
            "run_id": self.sweep.run.run_id,
            "registered": done,
            "report": self.bundle.report.to_dict(),
            **self.choice.to_dict(),
        }

    def must_be_registered(self) -> RegisteredPredictor:
        """The registered version, or WorkFailedError."""
        if self.registered is None:
            raise WorkFailedError(
                f"the decision is made, but not registered: {self.sweep.trouble}; the same command "
                "goes on from here"
            )
        return self.registered


def conclude(
    sweep: Sweep, *, as_json: bool, known: ConvergencePredictor | None = None
) -> Conclusion:
    """Measure, fit, register and decide, within the open run.

    Args:
        sweep: the run, and the job it is about.
        as_json: do not print the measurements.
        known: epochs to the target where no `--convergence` is given; the champion's when None.
    """
    from mlflow_tula.cli.flow import fit_table

    table = sweep.measure()
    if not as_json:
        print_measurements(table)
    known = known or sweep.known_convergence(table)
    bundle = fit_table(table, sweep.values["convergence"], sweep.folder, known=known)
    registered = sweep.register(bundle, table)
    choice = sweep.decide(bundle, table, registered)
    return Conclusion(sweep=sweep, bundle=bundle, choice=choice, registered=registered)


def print_conclusion(found: Conclusion) -> None:
    """The decision and its evidence, for people."""
    click.echo()
    print_report(found.bundle.report)
    click.echo()
    print_recommendation(found.choice)
    done = found.registered
    if done is not None:
        click.echo()
        click.echo(f"registered {done.name} version {done.version}: {done.reason}")
