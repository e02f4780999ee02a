"""Figure 6: gradient variability with accuracy.

Claim: gradients change most from step to step while accuracy still rises, and settle when it does.

Rule: training is cut where accuracy was measured. At each batch size Spearman's rank correlation of
the mean gradient variability in a piece and the points of accuracy gained per epoch in it is at
least 0.5. All batch sizes: held; at least half: held in part.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from reproduction import trainings
from reproduction.facts import Made, Panel, Paper, Series, Verdict, share_held
from reproduction.settings import Settings

PAPER = Paper.read("6", __doc__)
FOLLOWS = 0.5
LOOKS = 16
"""As figure 5's, so that both rest on the same training."""

Piece = tuple[float, float, float, float]
"""End in epochs, accuracy at the end, points gained per epoch, mean variability."""


def make(settings: Settings) -> Made:
    """Variability of a closely watched training, accuracy along the very same one."""
    import pandas as pd

    from mlflow_tula.compare import run_trials

    pieces, series, seconds = {}, {}, 0.0
    for size in (settings.reference_batch, settings.largest):
        trial = trainings.first_trial(settings, size)
        trial = replace(trial, task=replace(trial.task, decay="none"))
        document = trainings.look_closely(settings, trial, snapshots=LOOKS)
        (outcome,) = run_trials([trial], trainings.records(settings), workers=1)
        seconds += float(document["wall_s"]) + outcome.wall_time_s
        pieces[size] = cut(document["steps"], [(e, a) for e, _, a in outcome.curve])
        series[size] = [(s["epoch"], s["variability"]) for s in document["steps"]
                        if s["variability"]]  # fmt: skip
    panels = []
    for number, (size, found) in enumerate(pieces.items()):
        panels.append(
            Panel(title=f"batch {size}: variability", x_label="epoch",
                  y_label="gradient variability D", log_y=True,
                  series=[Series(name="", x=[e for e, _ in series[size]],
                                 y=[v for _, v in series[size]], style="line", color=number)])
        )  # fmt: skip
        panels.append(
            Panel(title=f"batch {size}: test accuracy", x_label="epoch",
                  y_label="test accuracy, %",
                  series=[Series(name="", x=[p[0] for p in found],
                                 y=[100 * p[1] for p in found], color=number)])
        )  # fmt: skip
    table = pd.DataFrame(
        [
            {"global_batch_size": size, "until_epoch": end, "test_accuracy": accuracy,
             "points_per_epoch": gain, "mean_variability": variability}
            for size, found in pieces.items()
            for end, accuracy, gain, variability in found
        ]
    )  # fmt: skip
    return Made(
        panels=panels,
        table=table,
        verdict=judge(
            {size: ([p[3] for p in found], [p[2] for p in found]) for size, found in pieces.items()}
        ),
        notes=(
            trainings.data_note(settings),
            "One seed, without decay of the learning rate. Variability is the smoothed relative "
            "change of the gradient norm, the paper's gate as reconstructed here.",
        ),
        data_s=seconds,
    )


def cut(steps: Sequence[Mapping[str, Any]], curve: Sequence[tuple[float, float]]) -> list[Piece]:
    """Pieces between measurements of accuracy, from (epoch, accuracy) along the training."""
    found = []
    for (begin, before), (end, after) in pairwise([(0.0, 0.0), *curve]):
        inside = [s["variability"] for s in steps if begin < s["epoch"] <= end and s["variability"]]
        if inside and end > begin:
            gain = 100 * (after - before) / (end - begin)
            found.append((end, after, gain, statistics.fmean(inside)))
    return found


def judge(found: Mapping[int, tuple[Sequence[float], Sequence[float]]]) -> Verdict:
    """The rule on (mean variability, points gained per epoch) by piece."""
    from scipy.stats import spearmanr

    values = {size: float(spearmanr(*pair).statistic) for size, pair in found.items()}
    agree = sum(value >= FOLLOWS for value in values.values())
    words = ", ".join(f"{value:.2f} at batch {size}" for size, value in values.items())
    return Verdict(
        held=share_held(agree, len(values)),
        because=f"the rank correlation of variability and accuracy gained per epoch is {words}",
        numbers={f"rank_correlation/batch_{size}": value for size, value in values.items()},
    )


if __name__ == "__main__":
    from run import main

    main(PAPER.name)
