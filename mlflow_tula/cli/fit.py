"""`tula fit`: a profile table becomes a predictor bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mlflow_tula.cli import options
from mlflow_tula.cli.options import option
from mlflow_tula.cli.render import note, print_json, print_report
from mlflow_tula.cli.types import OpenText

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
    "CSV of global_batch_size, epochs_to_target and optional std, runs_total, runs_reached.",
)


@click.command("fit")
@options.name_options
@table_option
@convergence_option
@options.output_option
@options.device_option
@options.json_option
def command(as_json: bool, **values: Any) -> None:
    """Fit predictors of step time, memory, convergence and cost to a profile table."""
    from mlflow_tula.cli.flow import BUNDLE_FILE, TABLE_FILE, file_of, fit_table, read_table

    job = options.make_job(values)
    path = file_of(values, "table", TABLE_FILE, job)
    bundle = fit_table(read_table(path), values["convergence"], path.parent)
    written = Path(path.parent) / BUNDLE_FILE
    if as_json:
        print_json({"bundle": str(written), "report": bundle.report.to_dict()})
        return
    print_report(bundle.report)
    note(f"written: {written}; next: {options.command_line('register', job)}")
