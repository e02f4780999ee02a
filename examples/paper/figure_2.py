"""Figure 2: test accuracy against batch size.

Claim: at the same number of epochs a larger batch ends with a lower test accuracy (the
generalization gap).

Rule: held where the reference batch is more than two standard errors above the largest one (paired
by seed) and accuracy falls with the batch size throughout (Spearman's rank correlation of the
means at most -0.8); with the first alone: held in part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reproduction import trainings
from reproduction.facts import Made, Panel, Paper, Series, Verdict
from reproduction.settings import Settings

PAPER = Paper.read("2", __doc__)
FALLS = -0.8


def make(settings: Settings) -> Made:
    """Plain training at every batch size; training loss beside accuracy."""
    import pandas as pd

    sizes = (settings.reference_batch, *settings.large_batches)
    found = trainings.groups(settings, {str(size): ("plain", {}, size) for size in sizes})
    groups = [found[str(size)] for size in sizes]
    table = pd.DataFrame(
        {
            "global_batch_size": sizes,
            "test_accuracy": [group.mean for group in groups],
            "standard_error": [group.error for group in groups],
            "train_loss": [group.train_loss for group in groups],
            "steps": [group.outcomes[0].steps for group in groups],
        }
    )
    x = "global batch size, samples"
    panels = [
        Panel(
            title="test accuracy, with two standard errors",
            x_label=x,
            y_label="test accuracy, %",
            series=[
                Series(
                    name="",
                    x=sizes,
                    y=[100 * group.mean for group in groups],
                    spread=[200 * group.error for group in groups],
                )
            ],
            batch_axis=True,
        ),
        Panel(
            title="training loss at the end",
            x_label=x,
            y_label="training loss",
            series=[Series(name="", x=sizes, y=[group.train_loss for group in groups], color=1)],
            batch_axis=True,
            log_y=True,
        ),
    ]
    return Made(
        panels=panels,
        table=table,
        verdict=judge({size: found[str(size)].accuracies for size in sizes}),
        notes=(
            trainings.data_note(settings),
            "At equal epochs much of the gap is under-training: the training loss rises with it.",
        ),
        data_s=trainings.seconds(settings, groups),
    )


def judge(accuracies: Mapping[int, Sequence[float]]) -> Verdict:
    """The rule on accuracies by batch size, each a list by seed; the smallest is the reference."""
    from scipy.stats import spearmanr

    sizes = sorted(accuracies)
    means = [sum(accuracies[size]) / len(accuracies[size]) for size in sizes]
    gap = 100 * (means[0] - means[-1])
    trend = float(spearmanr(sizes, means).statistic)
    lower = trainings.above(accuracies[sizes[0]], accuracies[sizes[-1]])
    held = "did not hold" if not lower else "held" if trend <= FALLS else "held in part"
    return Verdict(
        held=held,
        because=(
            f"test accuracy goes from {means[0]:.2%} at batch {sizes[0]} to {means[-1]:.2%} at "
            f"{sizes[-1]}, {gap:.1f} points lower, with a rank correlation of {trend:.2f}"
        ),
        numbers={"gap_points": gap, "rank_correlation": trend},
    )


if __name__ == "__main__":
    from run import main

    main(PAPER.name)
