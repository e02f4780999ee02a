"""`tula profile`: measure a few batch sizes of a training job."""

from __future__ import annotations

from typing import Any

import click

from mlflow_tula.cli import options
from mlflow_tula.cli.cluster import cluster_options
from mlflow_tula.cli.render import note, print_json, print_measurements
from mlflow_tula.cli.types import switch

resume_option = switch(
    "--resume", default=True, text="Go on from an interrupted sweep in --output-dir."
)


@click.command("profile")
@options.name_options
@options.data_options
@options.optimizer_options
@options.sweep_options
@options.memory_option
@resume_option
@cluster_options
@options.output_option
@options.device_option
@options.store_options
@options.system_metrics_option
@options.json_option
def command(as_json: bool, **values: Any) -> None:
    """Measure step time and memory of a few batch sizes, and log them to MLflow.

    \b
    tula profile --model resnet18
    tula profile --model mypackage.models:make --batch-sizes 8,32,128 --search full
    """
    from mlflow_tula.cli.flow import TABLE_FILE
    from mlflow_tula.cli.sweep import profile_run

    with profile_run("profile", values) as sweep:
        table = sweep.measure()
        sweep.log(table)
    path = sweep.folder / TABLE_FILE
    if as_json:
        print_json({"table": str(path), "run_id": sweep.run.run_id, **table.to_dict()})
        return
    print_measurements(table)
    note(f"written: {path}; next: {options.command_line('fit', sweep.job)}")
