"""`tula train`: train with the recommended batch size, or with your own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlflow_tula.cli import options
from mlflow_tula.cli.cluster import check_fits, cluster_options, joined, launched
from mlflow_tula.cli.method import (
    check_training,
    make_schedule,
    method_options,
    method_parameters,
)
from mlflow_tula.cli.options import option
from mlflow_tula.cli.places import check_output, make_place, work_may_fail
from mlflow_tula.cli.render import note, print_json, seconds
from mlflow_tula.cli.types import OpenText, Split, count, duration, real, switch

if TYPE_CHECKING:
    from mlflow_tula.launch.cluster import Cluster
    from mlflow_tula.specs import HardwareSpec
    from mlflow_tula.training.facts import BatchPlan, Schedule, TrainResult
    from mlflow_tula.workloads.job import Job


@click.command("train")
@options.name_options
@options.data_options
@options.optimizer_options
@option(
    "--batch-size",
    count("128", open_word="auto"),
    "auto",
    "Global batch size; auto: what `tula recommend` says.",
)
@option(
    "--devices",
    count("2", open_word="auto"),
    "auto",
    "Devices to train on; auto: the recommendation's, or 1 with a --batch-size of your own.",
)
@option("--accumulation-steps", count("1"), "1", "Passes per optimizer step of your --batch-size.")
@option(
    "--gradient-compression",
    click.Choice(["none", "bf16"]),
    "none",
    "How gradients are sent among ranks: as they are, or half as many bytes in bf16.",
)
@options.bucket_option
@option(
    "--uneven-batches",
    Split(),
    "off",
    "Local batch sizes rank by rank (8,24); auto: so that steps take equally long; off: even.",
)
@option(
    "--max-restarts",
    count("3", minimum=0),
    "0",
    "Restarts from the last checkpoint when ranks fail, with the same global batch.",
)
@method_options
@option("--train-epochs", count("10"), "10", "Epochs to train.")
@option(
    "--target-accuracy",
    real("0.95", open_word="none"),
    "none",
    "Stop at this test accuracy, 0 to 1.",
)
@option(
    "--time-limit",
    duration("1h", open_word="none"),
    "none",
    "Stop, with a checkpoint, after so long (s, m or h).",
)
@switch("--resume", default=True, text="Go on from the checkpoint in --output-dir.")
@options.decision_options
@options.memory_option
@option("--hardware", OpenText("auto"), "auto", "Hardware to ask for; auto: this machine.")
@option("--alias", str, "champion", "Alias of the registered version to ask.")
@option("--bundle", OpenText("none"), "none", "A bundle.json to ask instead of the registry.")
@cluster_options
@options.output_option
@options.device_option
@options.store_options
@options.system_metrics_option
@options.json_option
def command(as_json: bool, **values: Any) -> None:
    """Train with the recommended batch size, log to MLflow, checkpoint and resume.

    \b
    tula train --model resnet18 --train-epochs 10
    tula train --model resnet18 --batch-size 256 --devices 2
    tula train --model resnet18 --batch-size 512 --method ags --method-settings threshold=0.3
    """
    with joined(values) as cluster:
        values = {**values, **launched(values, cluster)}
        job = options.make_job(values)
        schedule = make_schedule(values)
        hardware = options.detect_hardware(values["device"])
        folder = options.workload_folder(values, job, hardware) / "training"
        check_output(folder)
        plan = make_plan(values, job, hardware, folder)
        check_training(job, plan, schedule, values, folder)
        options.use_store(values, write=True)
        result = run_training(job, plan, hardware, values, folder, cluster, schedule)
    if as_json:
        print_json(result.to_dict())
        return
    click.echo(
        f"test accuracy {result.test_accuracy:.1%} (best {result.best_test_accuracy:.1%}), train "
        f"loss {result.train_loss:.4g} after {result.epochs} epochs, {result.samples:,} samples, "
        f"{seconds(result.wall_time_s)}, {seconds(result.step_time_s)} a step"
    )


def make_plan(values: dict[str, Any], job: Job, hardware: HardwareSpec, folder: Path) -> BatchPlan:
    """The decision, with the split among ranks that was asked for."""
    sizes = values["uneven_batches"]
    if isinstance(sizes, tuple) and sizes and values["batch_size"] is None:
        values = {**values, "batch_size": sum(sizes) * values["accumulation_steps"]}
    if isinstance(sizes, tuple) and sizes and values["devices"] is None:
        values = {**values, "devices": len(sizes)}
    plan = choose_plan(values, job, hardware, folder)
    if sizes == "auto":
        return dataclasses.replace(plan, balance=True)
    return dataclasses.replace(plan, rank_batch_sizes=sizes) if sizes else plan


def choose_plan(
    values: dict[str, Any], job: Job, hardware: HardwareSpec, folder: Path
) -> BatchPlan:
    """The decision: that of the checkpoint to resume, your own, or the recommendation."""
    from mlflow_tula.cli.flow import find_bundle, make_recommendation
    from mlflow_tula.errors import InvalidInputError
    from mlflow_tula.train import saved_plan
    from mlflow_tula.training.facts import BatchPlan

    own, devices = values["batch_size"], values["devices"]
    if devices is not None and devices > hardware.devices_per_node:
        raise InvalidInputError(
            f"devices must be at most {hardware.devices_per_node}, what this machine has, "
            f"not {devices}"
        )
    if own is not None:
        from mlflow_tula.workloads.describe import describe

        plan = BatchPlan.of(
            own,
            nodes=values["num_nodes"],
            devices_per_node=devices or 1,
            accumulation_steps=values["accumulation_steps"],
            dataset_size=describe(job).dataset_size,
        )
        check_fits(job, plan, hardware, values["memory_limit"])
        return plan
    saved = saved_plan(folder) if values["resume"] else None
    if saved is not None:
        note(f"resuming with the decision of the checkpoint: batch {saved.global_batch_size}")
        if saved.nodes != values["num_nodes"]:
            return saved.for_world(values["num_nodes"], saved.devices_per_node)
        return saved
    if devices is not None:
        values = {**values, "devices_per_node": (devices,)}
    bundle, source = find_bundle(values)
    choice = make_recommendation(bundle, values)
    note(f"{choice.headline} ({source})")
    if choice.nodes != values["num_nodes"]:
        raise InvalidInputError(
            f"the recommendation takes {choice.nodes} nodes, and this command was started on "
            f"{values['num_nodes']}: start it on each of them (docs/distributed.md), or leave "
            "--nodes out"
        )
    return BatchPlan(
        global_batch_size=choice.global_batch_size,
        local_batch_size=choice.local_batch_size,
        accumulation_steps=choice.accumulation_steps,
        nodes=choice.nodes,
        devices_per_node=choice.devices_per_node,
        source=source,
    )


def run_training(
    job: Job,
    plan: BatchPlan,
    hardware: HardwareSpec,
    values: dict[str, Any],
    folder: Path,
    cluster: Cluster | None = None,
    schedule: Schedule | None = None,
) -> TrainResult:
    """Train inside an MLflow run; only this process writes to MLflow, never a rank."""
    from mlflow_tula.cli.progress import TrainProgress
    from mlflow_tula.tracking import log_workload, start_run
    from mlflow_tula.tracking.system_metrics import system_metrics
    from mlflow_tula.tracking.training_log import TrainingLogger
    from mlflow_tula.tracking.training_page import StepKeeper, log_training_page
    from mlflow_tula.train import Limits, Schedule, train
    from mlflow_tula.workloads.describe import describe

    workload, schedule = describe(job), schedule or Schedule()
    limits = Limits(target_accuracy=values["target_accuracy"], time_limit_s=values["time_limit"])
    name = f"train {job.workload_slug} batch {plan.global_batch_size}"
    place = make_place(folder, {**values, **plan.to_dict()})
    with (
        work_may_fail() as work,
        start_run(name, command="train", experiment=values["experiment"], place=place) as run,
    ):
        facts = {"epochs": values["train_epochs"], **method_parameters(schedule)}
        log_workload(run, workload, hardware, {**plan.to_dict(), **facts})
        with (
            system_metrics(run, wanted=values["system_metrics"]),
            TrainingLogger(run) as logger,
            TrainProgress(steps := StepKeeper(logger)) as progress,
        ):
            result = train(
                job,
                plan,
                epochs=values["train_epochs"],
                output_dir=folder,
                resume=values["resume"],
                schedule=schedule,
                limits=limits,
                max_restarts=values["max_restarts"],
                cluster=cluster,
                on_event=work.then(progress),
            )
        run.metrics(
            {
                f"final/{key}": value
                for key, value in result.to_dict().items()
                if isinstance(value, int | float)
            }
        )
        log_training_page(run, workload.slug, result, steps.steps)
    return result
