"""`tula main`: profile, fit, register and recommend in one go."""

from __future__ import annotations

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
    from mlflow_tula.cli.flow import check_convergence, check_decision, fit_table
    from mlflow_tula.cli.sweep import profile_run

    check_decision(values)
    check_convergence(values)
    options.check_devices(values, options.detect_hardware(values["device"]))
    with profile_run("main", values) as sweep:
        table = sweep.measure()
        if not as_json:
            print_measurements(table)
        bundle = fit_table(
            table, values["convergence"], sweep.folder, known=sweep.known_convergence(table)
        )
        registered = sweep.register(bundle, table)
        choice = sweep.decide(bundle, table, registered)
        _print(sweep, bundle, choice, registered, as_json=as_json)
        if registered is None:
            raise WorkFailedError(
                f"the decision is made, but not registered: {sweep.trouble}; the same command "
                "goes on from here"
            )
    offer_recommender(registered.name)


def _print(
    sweep: Sweep,
    bundle: PredictorBundle,
    choice: Recommendation,
    registered: RegisteredPredictor | None,
    *,
    as_json: bool,
) -> None:
    """The decision, its evidence, and what to do next."""
    if as_json:
        done = None if registered is None else registered.to_dict()
        document = {"run_id": sweep.run.run_id, "registered": done}
        print_json({**document, "report": bundle.report.to_dict(), **choice.to_dict()})
        return
    click.echo()
    print_report(bundle.report)
    click.echo()
    print_recommendation(choice)
    if registered is None:
        return
    click.echo()
    click.echo(f"registered {registered.name} version {registered.version}: {registered.reason}")
    click.echo(f"ask again   {options.command_line('recommend', sweep.job)}")
    click.echo("look        mlflow ui")
