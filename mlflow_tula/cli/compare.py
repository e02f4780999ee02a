"""`tula compare`: which large-batch method keeps the accuracy, on real data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlflow_tula.cli import options, types
from mlflow_tula.cli.options import option
from mlflow_tula.cli.places import check_output
from mlflow_tula.cli.render import note, print_json
from mlflow_tula.cli.types import OpenText, count, real, switch
from mlflow_tula.specs import slugify

if TYPE_CHECKING:
    from mlflow_tula.compare import Plan
    from mlflow_tula.comparing.facts import Outcome

RECORDS = "trainings.jsonl"


@click.command("compare")
@option("--dataset", str, "digits", "digits, fashion_mnist, mnist1d, cifar10 or cifar100.")
@option("--data-dir", OpenText("none"), "none", "Folder that holds the dataset.")
@option(
    "--network",
    str,
    "auto",
    "mlp, conv, conv_stride, conv_norm, conv_pool, conv1d, a torchvision model or module:function.",
)
@option("--methods", OpenText("all"), "all", "Methods, comma-separated; all: the whole catalogue.")
@option(
    "--batch-sizes",
    types.Listed(example="128,512", open_word=None),
    "512",
    "Large batch sizes, comma-separated.",
)
@option("--reference-batch-size", count("32"), "32", "The batch size whose learning rate is known.")
@option(
    "--learning-rate",
    real("0.02", open_word="auto"),
    "auto",
    "Learning rate at the reference batch size; auto: chosen on the validation split.",
)
@option(
    "--optimizer",
    click.Choice(["sgd", "adam"]),
    "sgd",
    "The optimizer that the methods wrap.",
)
@option("--momentum", real("0.9", strict=False), "0.9", "Momentum of SGD, 0 to below 1.")
@option("--weight-decay", real("5e-4", strict=False), "0", "Weight decay (L2), per step.")
@option("--epochs", real("30"), "30", "Epochs of each training.")
@option("--seeds", count("5"), "5", "Trainings of each method, with seeds 0, 1, ...")
@switch("--tune", default=True, text="Choose each method's settings on the validation split first.")
@option("--tuning-seeds", count("2"), "2", "Trainings of each candidate setting.")
@option(
    "--budget",
    click.Choice(["epochs", "time"]),
    "epochs",
    "Equal epochs, or the process time of plain training at that batch size.",
)
@option(
    "--workers",
    count("2", open_word="auto"),
    "auto",
    "Trainings side by side, one thread each; auto: the cores.",
)
@switch("--resume", default=True, text="Go on from the trainings in --output-dir.")
@options.output_option
@options.store_options
@options.json_option
def command(as_json: bool, **values: Any) -> None:
    """Compare methods for large batches by test accuracy, over seeds, on real data.

    \b
    tula compare --dataset digits --methods plain,scaling_clip,ags,auto
    tula compare --dataset digits --budget time --tune false
    """
    from mlflow_tula import compare as comparing
    from mlflow_tula.comparing.tables import results_table, row_numbers, table_one, verdicts

    plan = make_plan(values)
    folder = Path(values["output_dir"]) / f"compare.{slugify(plan.task.dataset)}"
    check_output(folder)
    options.use_store(values, write=True)
    from mlflow_tula.tracking import start_run
    from mlflow_tula.tracking.comparison_log import (
        OutcomeLogger,
        log_comparison,
        title,
        write_documents,
    )

    records = folder / RECORDS
    if not values["resume"]:
        records.unlink(missing_ok=True)
    name = f"compare {plan.task.dataset}"
    with start_run(name, command="compare", experiment=values["experiment"]) as run:
        run.params({key: value for key, value in values.items() if value is not None})
        logger = OutcomeLogger(run)

        def hear(outcome: Outcome, done: int, total: int) -> None:
            logger(outcome, done, total)
            _say(outcome, done, total)

        result = comparing.compare(plan, records, workers=values["workers"], on_outcome=hear)
        log_comparison(run, result)
        write_documents(folder, result)
    if as_json:
        print_json({"run_id": run.run_id, "rows": [row_numbers(row) for row in result.rows]})
        return
    click.echo(f"{title(result.plan)}\n\n{results_table(result.rows)}\n")
    if len(plan.batch_sizes) > 1:
        click.echo(f"{table_one(result.rows)}\n")
    for line in verdicts(result.rows):
        click.echo(line)
    click.echo(f"trainings {records}, tables and figures beside it; mlflow ui shows every run")


def make_plan(values: dict[str, Any]) -> Plan:
    """The plan that the options describe."""
    from mlflow_tula.compare import Plan
    from mlflow_tula.comparing.facts import Task
    from mlflow_tula.comparing.grids import DEFAULT_METHODS

    rate = values["learning_rate"]
    task = Task(
        dataset=values["dataset"],
        network=values["network"],
        data_dir=values["data_dir"],
        reference_batch_size=values["reference_batch_size"],
        learning_rate=0.01 if rate is None else rate,
        momentum=values["momentum"],
        weight_decay=values["weight_decay"],
        epochs=values["epochs"],
        optimizer=values["optimizer"],
    )
    names = values["methods"]
    methods = DEFAULT_METHODS if names is None else tuple(n.strip() for n in names.split(","))
    return Plan(
        task=task,
        methods=methods,
        batch_sizes=values["batch_sizes"],
        seeds=values["seeds"],
        tune=values["tune"],
        tuning_seeds=values["tuning_seeds"],
        tune_learning_rate=rate is None,
        budget=values["budget"],
    )


def _say(outcome: Outcome, done: int, total: int) -> None:
    from mlflow_tula.comparing.tables import words

    trial = outcome.trial
    loss = "diverged" if outcome.train_loss is None else f"train loss {outcome.train_loss:.4f}"
    note(
        f"{trial.split} {done}/{total}  {trial.method} batch {trial.batch_size} seed {trial.seed} "
        f"({words(trial.settings)}): {outcome.accuracy:.2%}, {loss}, {outcome.cpu_time_s:.1f} s"
    )
