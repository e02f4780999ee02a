"""Held-out step times on this machine: profile by partial search, then measure what it skipped.

    python benchmarks/held_out.py --model vgg11 --model mobilenet_v3_small [--markdown FILE]

Protocol: one partial search per model; three batch sizes inside the probed range that it did not
probe, spread geometrically, are then measured in `--repeats` rounds (each round measures all
three, in changing order, in fresh processes); the truth is the median of the rounds. Prints the
relative error of each, the spread of the rounds, and exits 1 where an error exceeds `--limit`.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import pandas as pd

import mlflow_tula as tula
from mlflow_tula.profiler import profile
from mlflow_tula.workloads.job import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """One batch size that the search did not probe: seconds, and fractions of the truth."""

    model: str
    local_batch_size: int
    measured_s: float
    spread: float
    predicted_s: float
    lower_s: float
    upper_s: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_s / self.measured_s - 1


def skipped_sizes(probed: list[int], wanted: int = 3) -> list[int]:
    """Batch sizes strictly inside the probed range, as far from the probes as they come."""
    chosen: list[int] = []
    for _ in range(wanted):
        taken = sorted({*probed, *chosen})
        gaps = [(b / a, round(np.sqrt(a * b))) for a, b in itertools.pairwise(taken)]
        chosen.append(int(max(gap for gap in gaps if gap[1] not in taken)[1]))
    return sorted(chosen)


def run(job: Job, repeats: int, time_budget_s: float) -> list[HeldOut]:
    """Profile, predict, measure what was skipped."""
    table = profile(job=job, search="partial", world_sizes=(1,), time_budget_s=time_budget_s)
    bundle = tula.fit(table)
    probed = [row.local_batch_size for row in table.ok]
    sizes = skipped_sizes(probed)
    rounds = []
    for number in range(repeats):
        order = sizes if number % 2 == 0 else sizes[::-1]
        again = profile(
            job=job, batch_sizes=order, world_sizes=(1,), search="full", time_budget_s=None
        )
        rounds.append({row.local_batch_size: row.step_time_s for row in again.ok})
    out = bundle.predict(pd.DataFrame({"local_batch_size": sizes})).set_index("local_batch_size")
    return [
        HeldOut(
            model=job.model,
            local_batch_size=size,
            measured_s=float(np.median([one[size] for one in rounds])),
            spread=float(
                np.ptp([one[size] for one in rounds]) / np.median([one[size] for one in rounds])
            ),
            predicted_s=float(out.step_time_s[size]),
            lower_s=float(out.step_time_s_lower[size]),
            upper_s=float(out.step_time_s_upper[size]),
        )
        for size in sizes
    ]


def markdown(rows: list[HeldOut]) -> str:
    """The table for a page."""
    head = (
        "| model | batch | measured | spread | predicted | error | 90 % interval |\n|" + "---|" * 7
    )
    lines = [
        f"| {row.model} | {row.local_batch_size} | {row.measured_s * 1e3:.0f} ms | "
        f"{row.spread:.1%} | {row.predicted_s * 1e3:.0f} ms | {row.error:+.1%} | "
        f"{row.lower_s * 1e3:.0f} - {row.upper_s * 1e3:.0f} ms |"
        for row in rows
    ]
    return "\n".join([head, *lines]) + "\n"


@click.command()
@click.option("--model", "models", multiple=True, default=("vgg11", "mobilenet_v3_small"))
@click.option("--dataset", default="digits", show_default=True)
@click.option("--repeats", default=3, show_default=True, help="Rounds of measurements.")
@click.option("--time-budget", default=90.0, show_default=True, help="Seconds for the search.")
@click.option("--limit", default=0.10, show_default=True, help="Largest error allowed.")
@click.option("--markdown", "page", type=click.Path(path_type=Path), help="Write the table here.")
def main(
    models: tuple[str, ...],
    dataset: str,
    repeats: int,
    time_budget: float,
    limit: float,
    page: Path | None,
) -> None:
    """Print the table and exit 1 where the limit is exceeded."""
    jobs = [Job(model=model, dataset=dataset) for model in models]
    rows = [one for job in jobs for one in run(job, repeats, time_budget)]
    print(markdown(rows), end="")
    if page is not None:
        page.write_text(markdown(rows))
    worst = max(abs(row.error) for row in rows)
    print(f"worst {worst:.1%}, limit {limit:.0%}")
    sys.exit(1 if worst > limit else 0)


if __name__ == "__main__":
    main()
