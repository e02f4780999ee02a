"""Methods for large batches on three real datasets: runs the comparison and writes its document.

    python benchmarks/generalization.py run --only digits --workers 2
    python benchmarks/generalization.py report              # docs/accuracy-generalization.md

`run` appends to benchmarks/results/generalization/<task>.jsonl and goes on where it was; `report`
reads these files alone. Both at once: `make accuracy-generalization`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from mlflow_tula.compare import Comparison, Plan, compare
from mlflow_tula.comparing.facts import Outcome, Task
from mlflow_tula.comparing.figures import draw_all
from mlflow_tula.comparing.tables import results_table, table_one, verdicts

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "generalization"
DOCUMENT = ROOT / "docs" / "accuracy-generalization.md"
FIGURES = ROOT / "docs" / "figures"

PLANS = {
    "digits": Plan(
        task=Task(dataset="digits", epochs=30.0, decay="linear"),
        batch_sizes=(512,),
        tune_learning_rate=True,
    ),
    "mnist1d": Plan(
        task=Task(dataset="mnist1d", epochs=60.0, decay="linear"),
        batch_sizes=(512,),
        tune_learning_rate=True,
    ),
    "fashion_mnist": Plan(
        task=Task(dataset="fashion_mnist", network="conv_pool", epochs=6.0, decay="linear"),
        batch_sizes=(512,),
        tune_learning_rate=True,
        tuning_seeds=1,
    ),
}


def run(only: str | None, workers: int | None, *, budget: str = "epochs") -> None:
    """Run what the record files lack."""
    for name, plan in plans(only, budget).items():
        done = compare(plan, records_of(name), workers=workers, on_outcome=_say)
        print(f"{name}: {len(done.tuning)} tuning runs, {len(done.outcomes)} results", flush=True)


def plans(only: str | None, budget: str = "epochs") -> dict[str, Plan]:
    """The plans by name: all, or one."""
    return {name: plan for name, plan in PLANS.items() if only in (None, name)}


def records_of(name: str) -> Path:
    """The record file of a plan."""
    return RESULTS / f"{name}.jsonl"


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
    parser.add_argument("what", choices=("run", "report"))
    parser.add_argument("--only", choices=tuple(PLANS))
    parser.add_argument("--workers", type=int)
    args = parser.parse_args()
    if args.what == "run":
        run(args.only, args.workers)


if __name__ == "__main__":
    main()
