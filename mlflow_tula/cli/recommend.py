"""`tula recommend`: ask the registry which batch size to take on this hardware."""

from __future__ import annotations

from typing import Any

import click

from mlflow_tula.cli import options
from mlflow_tula.cli.options import option
from mlflow_tula.cli.render import note, print_json, print_recommendation
from mlflow_tula.cli.types import OpenText, count


@click.command("recommend")
@options.name_options
@options.decision_options
@option(
    "--accumulation-steps",
    count("4", open_word="auto"),
    "auto",
    "Passes per optimizer step; auto: 1, more only where a batch does not fit otherwise.",
)
@options.memory_option
@option(
    "--hardware",
    OpenText("auto"),
    "auto",
    "Hardware slug or fingerprint of `tula registry`; auto: this machine.",
)
@option("--alias", str, "champion", "Alias of the registered version to ask.")
@option(
    "--bundle",
    OpenText("none"),
    "none",
    "A bundle.json to ask instead of the registry.",
)
@options.device_option
@options.store_options
@options.json_option
def command(as_json: bool, **values: Any) -> None:
    """Say which batch size to take, how long it runs and what it costs.

    \b
    tula recommend --model vgg11
    tula recommend --model vgg11 --objective min_cost --price-per-gb-hour 0.15 --epochs 90
    tula recommend --model vgg11 --deadline 6h --epochs 90 --nodes 1,2,4
    """
    from mlflow_tula.cli.flow import find_bundle, make_recommendation

    bundle, source = find_bundle(values)
    choice = make_recommendation(bundle, values)
    if as_json:
        print_json({"source": source, **choice.to_dict()})
        return
    note(f"asked {source}")
    print_recommendation(choice)
