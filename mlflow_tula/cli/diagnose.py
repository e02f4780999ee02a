"""`tula diagnose`: gradient norm, variability, noise scale, updates and curvature of a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mlflow_tula.cli import options, types
from mlflow_tula.cli.options import option
from mlflow_tula.cli.places import check_output
from mlflow_tula.cli.render import note, print_json
from mlflow_tula.cli.types import OpenText, count, real
from mlflow_tula.specs import slugify


@click.command("diagnose")
@option("--dataset", str, "digits", "digits, fashion_mnist, mnist1d, cifar10 or cifar100.")
@option("--data-dir", OpenText("none"), "none", "Folder that holds the dataset.")
@option(
    "--network",
    str,
    "auto",
    "mlp, conv, conv_stride, conv_norm, conv_pool, conv1d, a torchvision model or module:function.",
)
@option("--method", str, "plain", "Method of `tula compare` to train with.")
@option(
    "--batch-sizes",
    types.Listed(example="32,512", open_word=None),
    "32,512",
    "Batch sizes to train with, comma-separated; the smallest is the reference.",
)
@option("--learning-rate", real("0.02"), "0.01", "Learning rate at the reference batch size.")
@option("--momentum", real("0.9", strict=False), "0.9", "Momentum of SGD, 0 to below 1.")
@option("--weight-decay", real("5e-4", strict=False), "0", "Weight decay (L2), per step.")
@option("--epochs", real("10"), "10", "Epochs of each training.")
@option("--seed", count("0", minimum=0), "0", "Seed of weights and order.")
@option("--snapshots", count("6", minimum=0), "6", "Looks at updates and curvature.")
@options.output_option
@options.store_options
@options.json_option
def command(as_json: bool, **values: Any) -> None:
    """Watch the gradients of a training: norm, variability, noise scale, updates, curvature.

    \b
    tula diagnose --dataset digits --batch-sizes 32,512
    """
    from mlflow_tula.comparing.facts import Task, Trial

    sizes = values["batch_sizes"]
    task = Task(
        dataset=values["dataset"],
        network=values["network"],
        data_dir=values["data_dir"],
        reference_batch_size=min(sizes),
        learning_rate=values["learning_rate"],
        momentum=values["momentum"],
        weight_decay=values["weight_decay"],
        epochs=values["epochs"],
    )
    trials = [
        Trial(task=task, method=values["method"], batch_size=size, seed=values["seed"])
        for size in sizes
    ]
    folder = Path(values["output_dir"]) / f"diagnose.{slugify(task.dataset)}"
    check_output(folder)
    options.use_store(values, write=True)
    from mlflow_tula.diagnose import diagnose
    from mlflow_tula.tracking import start_run
    from mlflow_tula.tracking.diagnosis_log import log_diagnosis, write_diagnosis

    name = f"diagnose {task.dataset}"
    with start_run(name, command="diagnose", experiment=values["experiment"]) as run:
        run.params({key: value for key, value in values.items() if value is not None})
        found = []
        for trial in trials:
            found.append(diagnose(trial, snapshots=values["snapshots"]))
            note(f"batch {trial.batch_size}: {len(found[-1].steps)} steps")
        log_diagnosis(run, found)
        write_diagnosis(folder, found)
    if as_json:
        print_json({"run_id": run.run_id, "diagnoses": [d.to_dict() for d in found]})
        return
    for diagnosis in found:
        last = diagnosis.steps[-1]
        scale = "unknown" if last.noise_scale is None else f"{last.noise_scale:.0f} samples"
        variability = "unknown" if last.variability is None else f"{last.variability:.3f}"
        click.echo(
            f"batch {diagnosis.trial.batch_size}: accuracy {diagnosis.accuracy:.2%}; at the end "
            f"loss {last.loss:.4f}, gradient norm {last.gradient_norm:.4f}, variability "
            f"{variability}, noise scale {scale}"
            + "".join(
                f", Hessian {look.hessian_eigenvalue:.3g}" for look in diagnosis.snapshots[-1:]
            )
        )
    click.echo(f"numbers and figures in {folder}; mlflow ui shows the curves")
