"""Table I: test accuracy of large-batch methods.

Claim: accuracy of plain training falls with the batch size; Tula's adaptive gradient scaling keeps
it (9 points above plain training on average), above learning-rate scaling and post-local SGD, and
below LARS at some sizes.

Rule: every method is tuned on the validation split. Gap: at each batch size AGS is more than two
standard errors above plain training (paired by seed). Rivals: at each batch size its mean is at
least those of learning-rate scaling and post-local SGD. Both: held; the gap alone, or both at some
batch sizes only: held in part.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from reproduction import trainings
from reproduction.facts import Made, Panel, Paper, Series, Verdict
from reproduction.settings import Settings

from mlflow_tula.comparing.summary import MethodRow
from mlflow_tula.comparing.tables import words

PAPER = Paper.read("table1", __doc__)
METHODS = ("plain", "lars", "post_local_sgd", "linear_scaling", "ags", "auto")
NAMES = {
    "plain": "plain",
    "lars": "LARS",
    "post_local_sgd": "post-local SGD",
    "linear_scaling": "learning-rate scaling",
    "ags": "AGS (the paper's Tula)",
    "auto": "auto (this project's recipe)",
}
RIVALS = ("linear_scaling", "post_local_sgd")
SIZES = 3
TUNING_SEEDS = 2


def make(settings: Settings) -> Made:
    """Methods down, the largest batch sizes across."""
    import pandas as pd

    from mlflow_tula.compare import Plan, compare

    sizes = settings.large_batches[-SIZES:]
    plan = Plan(
        task=trainings.task(settings),
        methods=METHODS,
        batch_sizes=sizes,
        seeds=settings.seeds,
        tuning_seeds=TUNING_SEEDS,
    )
    result = compare(
        plan,
        trainings.records(settings),
        workers=settings.workers,
        on_outcome=trainings.Progress(),
    )
    cells = {(row.method, row.batch_size): row for row in result.rows}
    reference = result.rows[0]
    series = [
        Series(name=NAMES[method], x=sizes, y=[100 * cells[method, size].mean for size in sizes],
               spread=[200 * cells[method, size].error for size in sizes], color=number)
        for number, method in enumerate(METHODS)
    ]  # fmt: skip
    panel = Panel(
        title=f"{settings.learning_dataset}, with two standard errors",
        x_label="global batch size, samples",
        y_label="test accuracy, %",
        series=series,
        batch_axis=True,
        level=(100 * reference.mean, f"plain, batch {reference.batch_size}"),
    )
    table = pd.DataFrame(
        [
            {"method": NAMES[method],
             **{f"batch {size}": round(100 * cells[method, size].mean, 2) for size in sizes},
             **{f"error {size}": round(100 * cells[method, size].error, 2) for size in sizes},
             **{f"settings {size}": words(cells[method, size].settings) for size in sizes}}
            for method in METHODS
        ]
    )  # fmt: skip
    outcomes = [trainings.Group(outcomes=(*result.tuning, *result.outcomes))]
    return Made(
        panels=[panel],
        table=table,
        verdict=judge({size: _accuracies(cells, size) for size in sizes}),
        notes=(
            trainings.data_note(settings),
            f"Plain training at batch {reference.batch_size}: {reference.mean:.2%}. Settings were "
            "chosen on the validation split and measured on the test split.",
        ),
        data_s=trainings.seconds(settings, outcomes),
    )


def _accuracies(
    cells: Mapping[tuple[str, int], MethodRow], size: int
) -> dict[str, Sequence[float]]:
    return {method: cells[method, size].accuracies for method in METHODS}


def judge(table: Mapping[int, Mapping[str, Sequence[float]]]) -> Verdict:
    """The rule on accuracies by batch size and method, each a list by seed."""
    gap, rivals, gains, parts = 0, 0, [], []
    for size, found in sorted(table.items()):
        means = {method: statistics.fmean(values) for method, values in found.items()}
        gains.append(100 * (means["ags"] - means["plain"]))
        gap += trainings.above(found["ags"], found["plain"])
        rivals += all(means["ags"] >= means[rival] for rival in RIVALS)
        best = max(means, key=lambda method: means[method])
        parts.append(
            f"at batch {size} AGS has {means['ags']:.2%}, plain {means['plain']:.2%}, "
            f"the best, {best}, {means[best]:.2%}"
        )
    whole = len(table)
    held = "did not hold"
    if gap == rivals == whole:
        held = "held"
    elif gap == whole or (gap and rivals):
        held = "held in part"
    return Verdict(
        held=held,
        because=(
            f"AGS is above plain training beyond two standard errors at {gap} of {whole} batch "
            f"sizes ({statistics.fmean(gains):+.1f} points on average; the paper: +9) and not "
            f"below learning-rate scaling and post-local SGD at {rivals}; {'; '.join(parts)}"
        ),
        numbers={
            "mean_gain_points": statistics.fmean(gains),
            "sizes_above_plain": gap,
            "sizes_above_rivals": rivals,
        },
    )


if __name__ == "__main__":
    from run import main

    main(PAPER.name)
