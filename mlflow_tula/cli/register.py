"""`tula register`: a fitted bundle becomes a version in MLflow's registry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mlflow_tula.cli import options
from mlflow_tula.cli.fit import table_option
from mlflow_tula.cli.options import option
from mlflow_tula.cli.render import print_json
from mlflow_tula.cli.types import OpenText


@click.command("register")
@options.name_options
@table_option
@option(
    "--bundle",
    OpenText("auto"),
    "auto",
    "Fitted bundle (JSON); auto: this workload's last one in --output-dir.",
)
@options.output_option
@options.device_option
@options.store_options
@options.json_option
def command(as_json: bool, **values: Any) -> None:
    """Register a fitted bundle; it becomes champion if it is no worse than the present one."""
    from mlflow_tula.cli.flow import (
        BUNDLE_FILE,
        TABLE_FILE,
        file_of,
        read_bundle,
        read_table,
        register_bundle,
    )

    job = options.make_job(values)
    path = file_of(values, "bundle", BUNDLE_FILE, job)
    bundle = read_bundle(path)
    # The table that a bundle was fitted to lies beside it, whatever the options name.
    table = read_table(Path(values["table"] or path.with_name(TABLE_FILE)))
    options.use_store(values, write=True)
    done = register_bundle(bundle, table, values, command="register")
    if as_json:
        print_json(done.to_dict())
        return
    verb = "registered" if done.added else "found"
    click.echo(f"{verb} {done.name} version {done.version}: {done.reason}")
    click.echo(f"load it with mlflow.pyfunc.load_model({done.uri!r})")
