"""`tula fit`: a profile table becomes a predictor bundle."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlflow_tula.cli import options
from mlflow_tula.cli.options import option
from mlflow_tula.cli.render import note, print_json, print_measurements, print_report
from mlflow_tula.cli.types import OpenText, switch
from mlflow_tula.errors import InvalidInputError

if TYPE_CHECKING:
    from mlflow_tula.specs import Workload
    from mlflow_tula.tracking.observed_runs import ObservedRuns

table_option = option(
    "--table",
    OpenText("auto"),
    "auto",
    "Profile table (JSON); auto: this workload's last one in --output-dir.",
)
convergence_option = option(
    "--convergence",
    OpenText("none"),
    "none",
    "CSV of global_batch_size, epochs_to_target and optional std, runs_total, runs_reached; "
    "noise-scale: relative epochs from the profile's gradient noise.",
)


@click.command("fit")
@options.name_options
@table_option
@option(
    "--runs",
    OpenText("none"),
    "none",
    "Fit to logged runs instead: a search filter of MLflow, or all; --model, --dataset and "
    "--dataset-size then rename what they say.",
)
@switch(
    "--cross-model",
    default=False,
    text="Fit tula.anymodel.<this hardware> anew to all that is registered here, and register it.",
)
@convergence_option
@options.output_option
@options.device_option
@options.tracking_uri_option
@option(
    "--experiment",
    OpenText("auto"),
    "auto",
    "Experiment in which --runs are searched; auto: all.",
)
@options.json_option
@click.pass_context
def command(context: click.Context, /, as_json: bool, **values: Any) -> None:
    """Fit predictors of step time, memory, convergence and cost to a profile table.

    Or to ordinary training runs, as mlflow_tula.autolog() and `tula train` log them:

    \b
    tula fit --runs "tags.\\"tula.workload\\" = 'resnet18.cifar10'"
    """
    from mlflow_tula.cli.flow import BUNDLE_FILE, TABLE_FILE, file_of, fit_table, read_table

    if values["cross_model"]:
        _fit_cross_model(as_json, values)
        return
    if values["runs"] is not None:
        _fit_runs(context, as_json, values)
        return
    job = options.make_job(values)
    path = file_of(values, "table", TABLE_FILE, job)
    bundle = fit_table(read_table(path), values["convergence"], path.parent)
    written = Path(path.parent) / BUNDLE_FILE
    if as_json:
        print_json({"bundle": str(written), "report": bundle.report.to_dict()})
        return
    print_report(bundle.report)
    note(f"written: {written}; next: {options.command_line('register', job)}")


def _fit_cross_model(as_json: bool, values: dict[str, Any]) -> None:
    """The predictor for models that never ran here, from those that did."""
    if values["table"] is not None or values["runs"] is not None:
        raise InvalidInputError("--cross-model takes what is registered: leave --table, --runs out")
    options.use_store(values, write=True)
    from mlflow_tula import registry
    from mlflow_tula.predictors.cross_model import LEAST_MODELS

    hardware = options.detect_hardware(values["device"])
    version = registry.refit(hardware, experiment=values["experiment"])
    if version is None:
        raise InvalidInputError(
            f"a cross-model predictor needs {LEAST_MODELS} models registered on {hardware.slug} "
            "with counted kernels: profile more with `tula main --model NAME`"
        )
    known, version = registry.load_cross_model(hardware)
    document = {
        "name": registry.cross_model_name(hardware),
        "version": version,
        "models": list(known.models),
        "left_out_step_time_error": known.step_time_error,
        "left_out_memory_error": known.memory_error,
        "left_out_coverage": known.coverage,
    }
    if as_json:
        print_json(document)
        return
    click.echo(f"{document['name']} version {version}, from {', '.join(known.models)}")
    for key in ("left_out_step_time_error", "left_out_memory_error", "left_out_coverage"):
        value = getattr(known, key.removeprefix("left_out_"))
        if value is not None:
            click.echo(f"{key.removeprefix('left_out_').replace('_', ' ')}: {value:.1%} (left out)")
    note("next: tula recommend --model NAME, of a model that never ran here")


def _fit_runs(context: click.Context, as_json: bool, values: dict[str, Any]) -> None:
    """A table from logged runs, kept beside its bundle, and the fit."""
    from mlflow_tula.cli.flow import BUNDLE_FILE, TABLE_FILE, fit_table
    from mlflow_tula.files import write_json

    if values["table"] is not None:
        raise InvalidInputError("--table and --runs exclude each other: give one of them")
    options.use_store(values, write=False)
    from mlflow_tula.stores import store_exists
    from mlflow_tula.tracking.observed_runs import read_observed_runs

    if not store_exists():
        raise InvalidInputError("there is no MLflow store yet: log a run, or give --tracking-uri")
    observed = read_observed_runs(
        "" if values["runs"] == "all" else values["runs"],
        experiment=values["experiment"],
        renamed=_given(context, values, ("model", "dataset", "dataset_size")),
    )
    table = observed.table
    folder = Path(values["output_dir"]) / f"{table.workload.slug}.{table.hardware.slug}"
    for text in _words(observed):
        note(text)
    bundle = fit_table(table, values["convergence"], folder)
    write_json(folder / TABLE_FILE, table.to_dict())
    written = folder / BUNDLE_FILE
    if as_json:
        print_json(
            {
                "bundle": str(written),
                "table": str(folder / TABLE_FILE),
                "workload": table.workload.slug,
                "hardware": table.hardware.slug,
                "runs_used": observed.runs_used,
                "runs_skipped": [one.to_dict() for one in observed.skipped],
                "report": bundle.report.to_dict(),
            }
        )
        return
    print_measurements(table)
    print_report(bundle.report)
    note(f"written: {written}; next: tula register --bundle {shlex.quote(str(written))}")
    note(f"then ask: {_question(table.workload, written)}")


def _given(
    context: click.Context, values: dict[str, Any], names: tuple[str, ...]
) -> dict[str, Any]:
    """Options that were given; `mlflow run` gives all of them, so there a default counts as not."""
    inside_project = bool(os.environ.get("MLFLOW_RUN_ID"))
    defaults = {one.name: one.default for one in context.command.params}
    found = {}
    for name in names:
        source = context.get_parameter_source(name)
        asked = source is not None and source.name != "DEFAULT"
        if asked and not (inside_project and values[name] == defaults[name]):
            found[name] = values[name]
    return {name: value for name, value in found.items() if value is not None}


def _words(observed: ObservedRuns) -> Iterator[str]:
    """How many runs were used, and which were not and why, the first few of each reason by name."""
    count = len(observed.table.measurements)
    yield (
        f"{observed.runs_used} runs of {observed.table.workload.slug} on "
        f"{observed.table.hardware.slug}, {count} configuration{'s' * (count > 1)}"
    )
    for reason, number in observed.skipped_reasons.items():
        named = [one for one in observed.skipped if one.reason == reason][:3]
        names = ", ".join(f"{one.name} ({one.run_id[:8]})" for one in named)
        yield f"{number} left out, {reason}: {names}{', ...' if number > len(named) else ''}"


def _question(workload: Workload, bundle: Path) -> str:
    """The command that asks for this workload: by its names where they lead to it."""
    from mlflow_tula.workloads.job import Job

    names = ("model", "dataset", "precision", "optimizer")
    given: dict[str, Any] = {name: getattr(workload, name) for name in names}
    if "no-momentum" in workload.variant:
        given["momentum"] = 0.0
    for size in (None, workload.image_size):
        try:
            job = Job(**given, image_size=size)
        except InvalidInputError:
            continue
        if job.workload_slug == workload.slug:
            return options.command_line("recommend", job)
    return f"tula recommend --bundle {shlex.quote(str(bundle))}"
