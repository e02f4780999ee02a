"""`--method` and its settings: how `tula train` keeps the accuracy of a large batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mlflow_tula.cli.options import option
from mlflow_tula.cli.types import Assignments

if TYPE_CHECKING:
    from pathlib import Path

    from mlflow_tula.training.facts import BatchPlan, Schedule
    from mlflow_tula.workloads.job import Job

DEFAULT = "auto"


def method_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add both options."""
    for add in (
        option(
            "--method-settings",
            Assignments(),
            "none",
            "Settings of the method, comma-separated: max_norm=0.5,warmup_epochs=2; none: its own.",
        ),
        option(
            "--method",
            str,
            DEFAULT,
            "How a large batch is trained: auto (what works), plain, linear_scaling, sqrt_clip, "
            "scaling_clip, lars, lamb, ags, sam or another of docs/accuracy-generalization.md.",
        ),
    ):
        command = add(command)
    return command


def make_schedule(values: dict[str, Any]) -> Schedule:
    """The schedule with the method that was asked for; refuses names and settings there are not."""
    from mlflow_tula.training.facts import Schedule

    schedule = Schedule(method=values["method"], method_settings=values["method_settings"])
    if schedule.method_settings:
        from mlflow_tula.training.method import check_method

        check_method(schedule)
    return schedule


def check_training(
    job: Job, plan: BatchPlan, schedule: Schedule, values: dict[str, Any], folder: Path
) -> None:
    """Refuse a method that this job or plan cannot have, before a run is begun."""
    from mlflow_tula.training.facts import Limits, TrainRequest

    TrainRequest(
        job=job,
        plan=plan,
        epochs=values["train_epochs"],
        output_dir=str(folder),
        schedule=schedule,
        limits=Limits(),
        device_type="cpu",
    )


def method_parameters(schedule: Schedule) -> dict[str, Any]:
    """What a run logs of it."""
    settings = schedule.method_settings.items()
    return {
        "method": schedule.method,
        "method_settings": ",".join(f"{name}={value}" for name, value in settings) or "none",
    }
