"""Figure 8: adaptive gradient scaling over the threshold of its gate.

Claim: a larger threshold scales more often; at a threshold in between, where only calm steps are
scaled, accuracy is above both plain training and scaling always.

Rule: three tests at the largest batch, s being the square root of its ratio to the reference.
Often: the share of scaled steps never falls as the threshold rises. Plain: the best threshold is
more than two standard errors above plain training (paired by seed). Static: it is as far above
scaling always. All: held; two: held in part.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from reproduction import trainings
from reproduction.facts import Made, Panel, Paper, Series, Verdict
from reproduction.settings import Settings

from mlflow_tula.comparing.grids import SWEEP_THRESHOLDS

PAPER = Paper.read("8", __doc__)
THRESHOLDS = (0.05, *SWEEP_THRESHOLDS, 2.0)
STRONGER = 2.0
"""A second line is drawn at so many times that s, to show what the gate does to a too large one."""


def make(settings: Settings) -> Made:
    """Accuracy and the share of scaled steps over the threshold."""
    import pandas as pd

    size = settings.largest
    usual = math.sqrt(size / settings.reference_batch)
    factors = (usual, STRONGER * usual)
    wanted: dict[str, tuple[str, Mapping[str, Any], int]] = {
        f"{factor:g}@{threshold:g}": (
            "ags", {"scaling_factor": factor, "threshold": threshold}, size
        )
        for factor in factors
        for threshold in THRESHOLDS
    }  # fmt: skip
    wanted |= {
        f"{factor:g}@always": ("static_scaling", {"scaling_factor": factor}, size)
        for factor in factors
    }
    groups = trainings.groups(settings, {"plain": ("plain", {}, size), **wanted})
    rows = []
    for factor in factors:
        for threshold in (*THRESHOLDS, None):
            name = "always" if threshold is None else f"{threshold:g}"
            group = groups[f"{factor:g}@{name}"]
            rows.append(
                {
                    "scaling_factor": factor,
                    "threshold": name,
                    "test_accuracy": group.mean,
                    "standard_error": group.error,
                    "scaled_share": 1.0 if threshold is None else group.scaled_share,
                }
            )
    frame = pd.DataFrame(rows)
    accuracy, share = [], []
    for number, factor in enumerate(factors):
        mine = [groups[f"{factor:g}@{threshold:g}"] for threshold in THRESHOLDS]
        always = groups[f"{factor:g}@always"]
        label = f"s = {factor:g}"
        accuracy.append(
            Series(name=label, x=THRESHOLDS, y=[100 * g.mean for g in mine], color=number,
                   spread=[200 * g.error for g in mine])
        )  # fmt: skip
        accuracy.append(
            Series(name=f"{label}, always scaled", x=[min(THRESHOLDS), max(THRESHOLDS)],
                   y=[100 * always.mean] * 2, style="dashed", color=number)
        )  # fmt: skip
        share.append(
            Series(name=label, x=THRESHOLDS, y=[100 * g.scaled_share for g in mine], color=number)
        )
    panels = [
        Panel(title=f"batch {size}, with two standard errors", x_label="threshold",
              y_label="test accuracy, %", series=accuracy, log_x=True,
              level=(100 * groups["plain"].mean, "plain")),
        Panel(title="how often it scales", x_label="threshold", y_label="scaled steps, %",
              series=share, log_x=True, from_zero=True),
    ]  # fmt: skip
    mine = {t: groups[f"{usual:g}@{t:g}"] for t in THRESHOLDS}
    return Made(
        panels=panels,
        table=frame,
        verdict=judge(
            {t: group.accuracies for t, group in mine.items()},
            {t: group.scaled_share for t, group in mine.items()},
            plain=groups["plain"].accuracies,
            static=groups[f"{usual:g}@always"].accuracies,
        ),
        notes=(
            trainings.data_note(settings),
            "The gate's statistic is a reconstruction from the paper's captions (docs/method.md).",
        ),
        data_s=trainings.seconds(settings, groups.values()),
    )


def judge(
    accuracies: Mapping[float, Sequence[float]],
    shares: Mapping[float, float],
    *,
    plain: Sequence[float],
    static: Sequence[float],
) -> Verdict:
    """The rule on accuracies by threshold, each a list by seed, and shares of scaled steps."""
    means = {threshold: statistics.fmean(values) for threshold, values in accuracies.items()}
    best = max(means, key=lambda threshold: means[threshold])
    ordered = [shares[threshold] for threshold in sorted(shares)]
    often = all(a <= b for a, b in pairwise(ordered))
    over_plain = trainings.above(accuracies[best], plain)
    over_static = trainings.above(accuracies[best], static)
    passed = often + over_plain + over_static
    beyond = {True: "beyond two standard errors", False: "within two standard errors or below"}
    return Verdict(
        held="held" if passed == 3 else "held in part" if passed == 2 else "did not hold",
        because=(
            f"scaled steps go from {ordered[0]:.0%} to {ordered[-1]:.0%}; the best threshold, "
            f"{best:g}, gives {means[best]:.2%} against {statistics.fmean(plain):.2%} plain "
            f"({beyond[over_plain]}) and {statistics.fmean(static):.2%} always scaled "
            f"({beyond[over_static]})"
        ),
        numbers={
            "best_threshold": best,
            "over_plain_points": 100 * (means[best] - statistics.fmean(plain)),
            "over_static_points": 100 * (means[best] - statistics.fmean(static)),
            "least_scaled_share": ordered[0],
            "most_scaled_share": ordered[-1],
        },
    )


if __name__ == "__main__":
    from run import main

    main(PAPER.name)
