"""Figure 7: static gradient scaling, its accuracy and the density of its updates.

Claim: multiplying every gradient of a large batch by s brings accuracy back up to some s and harms
beyond it, and widens the distribution of the weights' updates.

Rule: three tests at the largest batch. Gain: some s is more than two standard errors above s = 1
(paired by seed). Harm: the largest s is as far below the best one. Width: the standard deviation of
the updates, a quarter into the training, rises with s wherever training went on. All: held; two:
held in part.
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

from mlflow_tula.comparing.facts import freeze
from mlflow_tula.comparing.grids import SWEEP_FACTORS
from mlflow_tula.errors import TrainingError

PAPER = Paper.read("7", __doc__)
LOOKS = 4


def make(settings: Settings) -> Made:
    """Accuracy over s, and the density of updates of one training each."""
    import pandas as pd

    size, reference = settings.largest, settings.reference_batch
    wanted: dict[str, tuple[str, Mapping[str, Any], int]] = {
        f"{factor:g}": ("static_scaling", {"scaling_factor": factor}, size)
        for factor in SWEEP_FACTORS
    }
    wanted = {"1": ("plain", {}, size), "reference": ("plain", {}, reference), **wanted}
    groups = trainings.groups(settings, wanted)
    factors = [1.0, *SWEEP_FACTORS]
    by_factor = {factor: groups[f"{factor:g}"] for factor in factors}
    looks, spent = _densities(settings, factors)
    widths = {factor: width(*looks[f"s = {factor:g}"]) for factor in factors
              if f"s = {factor:g}" in looks}  # fmt: skip
    table = pd.DataFrame(
        {
            "scaling_factor": factors,
            "test_accuracy": [by_factor[factor].mean for factor in factors],
            "standard_error": [by_factor[factor].error for factor in factors],
            "train_loss": [by_factor[factor].train_loss for factor in factors],
            "update_width": [widths.get(factor) for factor in factors],
        }
    )
    panels = [
        Panel(
            title=f"batch {size}, with two standard errors",
            x_label="scaling factor s",
            y_label="test accuracy, %",
            series=[
                Series(name="static scaling", x=factors,
                       y=[100 * by_factor[f].mean for f in factors],
                       spread=[200 * by_factor[f].error for f in factors])
            ],
            level=(100 * groups["reference"].mean, f"plain, batch {reference}"),
            log_x=True,
        ),
        Panel(
            title="updates of the weights, a quarter into the training",
            x_label="update of a weight",
            y_label="density",
            series=[Series(name=name, x=values, y=density, style="line", color=number)
                    for number, (name, (values, density)) in enumerate(looks.items())],
            log_y=True,
        ),
    ]  # fmt: skip
    return Made(
        panels=panels,
        table=table,
        verdict=judge({f: by_factor[f].accuracies for f in factors}, widths),
        notes=(
            trainings.data_note(settings),
            "The densities are kernel estimates over the middle 99 % of one step's updates, one "
            "seed; a training that diverged has none.",
        ),
        data_s=trainings.seconds(settings, groups.values()) + spent,
    )


def _densities(
    settings: Settings, factors: Sequence[float]
) -> tuple[dict[str, tuple[list[float], list[float]]], float]:
    """Values and density of updates by name, and the seconds they took."""
    trials = {f"batch {settings.reference_batch}": trainings.first_trial(
        settings, settings.reference_batch)}  # fmt: skip
    for factor in factors:
        given = freeze({"scaling_factor": factor})
        trials[f"s = {factor:g}"] = trainings.first_trial(
            settings, settings.largest, method="static_scaling", settings=given
        )
    found, spent = {}, 0.0
    for name, trial in trials.items():
        try:
            document = trainings.look_closely(settings, trial, snapshots=LOOKS)
        except TrainingError:
            continue
        look = document["snapshots"][0]
        found[name] = (look["update_values"], look["update_density"])
        spent += float(document["wall_s"])
    return found, spent


def width(values: Sequence[float], density: Sequence[float]) -> float:
    """Standard deviation of a density at evenly spaced values."""
    whole = sum(density)
    if not whole:
        return 0.0
    middle = sum(v * d for v, d in zip(values, density, strict=True)) / whole
    return math.sqrt(
        sum((v - middle) ** 2 * d for v, d in zip(values, density, strict=True)) / whole
    )


def judge(accuracies: Mapping[float, Sequence[float]], widths: Mapping[float, float]) -> Verdict:
    """The rule on accuracies by s (1 is plain), each a list by seed, and update widths by s."""
    means = {factor: statistics.fmean(values) for factor, values in accuracies.items()}
    plain, largest = min(means), max(means)
    best = max(means, key=lambda factor: means[factor])
    gain = best != plain and trainings.above(accuracies[best], accuracies[plain])
    harm = best != largest and trainings.above(accuracies[best], accuracies[largest])
    ordered = [widths[factor] for factor in sorted(widths)]
    wider = len(ordered) > 1 and all(a < b for a, b in pairwise(ordered))
    passed = gain + harm + wider
    return Verdict(
        held="held" if passed == 3 else "held in part" if passed == 2 else "did not hold",
        because=(
            f"s = {best:g} is best with {means[best]:.2%} against {means[plain]:.2%} unscaled "
            f"({'' if gain else 'not '}beyond two standard errors), s = {largest:g} gives "
            f"{means[largest]:.2%}, and updates "
            f"{'grow wider with s' if wider else 'do not grow wider with every s'}"
        ),
        numbers={
            "best_factor": best,
            "gain_points": 100 * (means[best] - means[plain]),
            "harm_points": 100 * (means[best] - means[largest]),
        },
    )


if __name__ == "__main__":
    from run import main

    main(PAPER.name)
