"""`tula import`: anybody's measurements become a registered predictor."""

from __future__ import annotations

from typing import Any

import click

from mlflow_tula.cli import options
from mlflow_tula.cli.fit import convergence_option
from mlflow_tula.cli.options import option
from mlflow_tula.cli.render import print_json, print_report
from mlflow_tula.cli.types import OpenText, count, num_bytes


@click.command("import")
@click.argument("table_csv")
@option("--model", str, "vgg11", "Name of the model that was measured.")
@option("--dataset", str, "imported", "Name of the dataset.")
@option("--dataset-size", count("50000"), "50000", "Training samples of one epoch.")
@option("--hardware", OpenText("auto"), "auto", "Device name; auto: this machine.")
@option("--device-type", click.Choice(["cpu", "cuda", "mps", "xpu"]), "cuda", "Kind of device.")
@option("--device-memory", num_bytes("16GiB"), "16GiB", "Memory of one device.")
@option("--max-devices-per-node", count("8"), "8", "Devices a node has.")
@option("--num-parameters", count("25000000", open_word="none"), "none", "Model parameters.")
@click.option(
    "--precision",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    default="fp32",
    show_default=True,
    help="Precision of the measured training.",
)
@option("--optimizer", str, "sgd", "Optimizer of the measured training.")
@convergence_option
@options.store_options
@options.json_option
def command(table_csv: str, as_json: bool, **values: Any) -> None:
    """Register predictors fitted to a CSV of measurements, from any machine.

    Columns: local_batch_size and step_time_s (seconds per optimizer update); optional nodes,
    devices_per_node, accumulation_steps, sync_time_s, data_time_s, peak_memory_bytes,
    step_time_std_s, num_steps, status (ok, oom or failed).

    \b
    tula import table.csv --model resnet50 --dataset imagenet --dataset-size 1281167 \\
        --hardware "Tesla T4" --device-memory 16GiB --max-devices-per-node 4
    """
    from mlflow_tula.cli.flow import convergence_of, register_bundle
    from mlflow_tula.fit import fit
    from mlflow_tula.specs import HardwareSpec, Workload
    from mlflow_tula.table import ProfileTable

    hardware = (
        options.detect_hardware("auto")
        if values["hardware"] is None
        else HardwareSpec(
            device_type=values["device_type"],
            device_name=values["hardware"],
            device_memory_bytes=values["device_memory"],
            devices_per_node=values["max_devices_per_node"],
        )
    )
    names = ("model", "dataset", "dataset_size", "precision", "optimizer", "num_parameters")
    workload = Workload(**{name: values[name] for name in names})
    table = ProfileTable.from_csv(table_csv, workload=workload, hardware=hardware)
    bundle = fit(table, convergence=convergence_of(values["convergence"], table))
    options.use_store(values, write=True)
    done = register_bundle(bundle, table, values, command="import")
    if as_json:
        print_json({**done.to_dict(), "report": bundle.report.to_dict()})
        return
    print_report(bundle.report)
    verb = "registered" if done.added else "found"
    click.echo(f"{verb} {done.name} version {done.version}: {done.reason}")
    click.echo(
        f"ask it with tula recommend --model {workload.model} --dataset {workload.dataset} "
        f"--hardware {hardware.slug}"
    )
