"""Methods for large batches on three real datasets: runs the comparison and writes its document.

    python benchmarks/generalization.py run --only digits --workers 2
    python benchmarks/generalization.py report              # docs/accuracy-generalization.md

`run` appends to benchmarks/results/generalization/<dataset>.jsonl and goes on where it was;
`report` reads these files alone. Both at once: `make accuracy-generalization`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

from generalization_report import DOCUMENT, write_report

from mlflow_tula.compare import Comparison, Plan, compare
from mlflow_tula.comparing.facts import Outcome, Task
from mlflow_tula.errors import InvalidInputError

RESULTS = Path(__file__).resolve().parent / "results" / "generalization"

_DIGITS = Plan(
    task=Task(dataset="digits", epochs=30.0, decay="linear"),
    batch_sizes=(512,),
    tune_learning_rate=True,
)
PLANS = {
    "digits": _DIGITS,
    "mnist1d": Plan(
        task=Task(dataset="mnist1d", epochs=60.0, decay="linear"),
        batch_sizes=(512,),
        tune_learning_rate=True,
    ),
    "fashion_mnist": Plan(
        task=Task(dataset="fashion_mnist", network="conv_pool", epochs=4.0, decay="linear"),
        batch_sizes=(512,),
        tune_learning_rate=True,
        tuning_seeds=1,
    ),
}
"""The comparison proper, one dataset each."""

_WITH_ADAM = ("plain", "sqrt_scaling", "linear_scaling", "scaling_clip", "lamb", "auto")
MORE_PLANS = {
    "digits, batch sizes": replace(
        _DIGITS,
        batch_sizes=(128, 512),
        methods=(
            "plain",
            "linear_scaling",
            "scaling_clip",
            "lars",
            "post_local_sgd",
            "ags",
            "auto",
        ),
    ),
    "fashion_mnist, mlp": Plan(
        task=Task(dataset="fashion_mnist", network="mlp", epochs=4.0, decay="linear"),
        methods=("scaling_clip", "lars", "ags", "auto"),
        batch_sizes=(512,),
        tune_learning_rate=True,
        tuning_seeds=1,
    ),
    "digits, equal time": replace(
        _DIGITS,
        budget="time",
        methods=(
            "plain",
            "scaling_clip",
            "lars",
            "ags",
            "sam",
            "batch_warmup",
            "batch_growth",
            "auto",
        ),
    ),
    "digits, adam": replace(
        _DIGITS, task=replace(_DIGITS.task, optimizer="adam"), methods=_WITH_ADAM
    ),
    "mnist1d, adam": replace(
        PLANS["mnist1d"],
        task=replace(PLANS["mnist1d"].task, optimizer="adam"),
        methods=_WITH_ADAM,
    ),
    # plain and auto, and the rivals whose mean over five seeds came nearest to auto's or above it
    "digits, 20 seeds": replace(
        _DIGITS,
        seeds=20,
        methods=("lars", "batch_growth", "scaling_autoclip", "batch_warmup", "lars_clip", "auto"),
    ),
    "mnist1d, 20 seeds": replace(
        PLANS["mnist1d"],
        seeds=20,
        methods=("batch_growth", "lars", "lars_clip", "batch_warmup", "scaling_clip", "auto"),
    ),
    "fashion_mnist, 20 seeds": replace(
        PLANS["fashion_mnist"],
        seeds=20,
        methods=("lamb", "extrapolation", "lars_clip", "lars", "linear_scaling", "auto"),
    ),
}
"""On the same record file as their dataset's."""


def run(only: str | None, workers: int | None) -> None:
    """Run what the record files lack."""
    for name, plan in {**PLANS, **MORE_PLANS}.items():
        if only in (None, name):
            done = compare(plan, records_of(plan), workers=workers, on_outcome=_say)
            print(f"{name}: {len(done.tuning)} tuning runs, {len(done.outcomes)} results")


def recorded() -> tuple[dict[str, Comparison], dict[str, tuple[str, ...]]]:
    """What the record files hold whole, and the methods of each plan that they do not."""
    found, lacking = {}, {}
    for name, plan in {**PLANS, **MORE_PLANS}.items():
        whole = tuple(m for m in plan.methods if _stored(replace(plan, methods=(m,))) is not None)
        lacking[name] = tuple(m for m in plan.methods if m not in whole)
        comparison = _stored(replace(plan, methods=whole)) if whole else None
        if comparison is not None:
            found[name] = comparison
    return found, {name: methods for name, methods in lacking.items() if methods}


def _stored(plan: Plan) -> Comparison | None:
    try:
        return compare(plan, records_of(plan), only_recorded=True)
    except InvalidInputError:
        return None


def records_of(plan: Plan) -> Path:
    """The record file of a plan's dataset."""
    return RESULTS / f"{plan.task.dataset}.jsonl"


def _say(outcome: Outcome, done: int, total: int) -> None:
    trial = outcome.trial
    if done % 10 == 0 or trial.split == "test":
        print(
            f"{time.strftime('%H:%M:%S')} {trial.task.dataset} {trial.split} {done}/{total} "
            f"{trial.method} {dict(trial.settings)} batch {trial.batch_size}: "
            f"{outcome.accuracy:.2%} {outcome.cpu_time_s:.1f} s",
            flush=True,
        )


def main() -> None:
    """Run, report, or both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("run", "report", "both"))
    parser.add_argument("--only", choices=(*PLANS, *MORE_PLANS))
    parser.add_argument("--workers", type=int)
    args = parser.parse_args()
    if args.what in ("run", "both"):
        run(args.only, args.workers)
    if args.what in ("report", "both"):
        write_report(*recorded(), main=tuple(PLANS))
        print(f"wrote {DOCUMENT}")


if __name__ == "__main__":
    main()
