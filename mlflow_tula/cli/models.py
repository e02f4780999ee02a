"""`tula models`: which models and datasets can be named."""

from __future__ import annotations

import click

from mlflow_tula.cli.options import json_option
from mlflow_tula.cli.render import print_json, print_lines


@click.command("models")
@json_option
def command(as_json: bool) -> None:
    """List the models and datasets that can be named."""
    from mlflow_tula.workloads.datasets import list_datasets
    from mlflow_tula.workloads.models import list_models

    models, datasets = list_models(), list_datasets()
    if as_json:
        print_json({"models": models, "datasets": datasets})
        return
    print_lines("models (--model), or package.module:function", models)
    print_lines("datasets (--dataset), or package.module:function", datasets)
