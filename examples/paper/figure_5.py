"""Figure 5: early gradient norm, and the largest Hessian eigenvalue with it.

Claim: gradients are largest early in training, and the largest eigenvalue of the Hessian moves with
the gradient norm, so that the cheap norm stands for the costly curvature.

Rule: two tests at each batch size. Early: the mean norm in the first tenth of the steps is above
that of the rest. Curvature: Spearman's rank correlation of the eigenvalue and the mean norm of the
steps since the look before is at least 0.5, over all looks. All tests: held; at least half: held
in part.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reproduction import trainings
from reproduction.facts import Made, Panel, Paper, Series, Verdict, share_held
from reproduction.settings import Settings

PAPER = Paper.read("5", __doc__)
FOLLOWS = 0.5
LOOKS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Looks:
    """One training: norms of all steps, and at each look the mean norm and the eigenvalue."""

    norms: tuple[float, ...]
    epochs: tuple[float, ...]
    look_epochs: tuple[float, ...]
    look_norms: tuple[float, ...]
    eigenvalues: tuple[float, ...]


def make(settings: Settings) -> Made:
    """One training at the reference batch and one at the largest, looked at closely."""
    import pandas as pd

    found, seconds = {}, 0.0
    for size in (settings.reference_batch, settings.largest):
        trial = trainings.first_trial(settings, size)
        trial = replace(trial, task=replace(trial.task, decay="none"))
        document = trainings.look_closely(settings, trial, snapshots=LOOKS)
        seconds += float(document["wall_s"])
        found[size] = looks_of(document)
    early = [
        Series(name=f"batch {size}", x=[e for e in one.epochs if e <= settings.epochs / 5],
               y=one.norms[: sum(e <= settings.epochs / 5 for e in one.epochs)],
               style="line", color=number)
        for number, (size, one) in enumerate(found.items())
    ]  # fmt: skip
    over = [
        Series(name=f"{name}, batch {size}", x=one.look_epochs, y=values, style=style, color=number)
        for number, (size, one) in enumerate(found.items())
        for name, values, style in (
            ("eigenvalue", one.eigenvalues, "both"),
            ("gradient norm", one.look_norms, "dashed"),
        )
    ]
    against = [
        Series(name=f"batch {size}", x=one.look_norms, y=one.eigenvalues, style="points",
               color=number)
        for number, (size, one) in enumerate(found.items())
    ]  # fmt: skip
    panels = [
        Panel(title="gradient norm, first fifth of training", x_label="epoch",
              y_label="gradient norm", series=early, log_y=True),
        Panel(title="over the training", x_label="epoch", y_label="eigenvalue, norm", series=over,
              log_y=True),
        Panel(title="one against the other", x_label="mean gradient norm since the last look",
              y_label="largest Hessian eigenvalue", series=against, log_x=True, log_y=True),
    ]  # fmt: skip
    table = pd.DataFrame(
        [
            {"global_batch_size": size, "epoch": epoch, "gradient_norm": norm, "eigenvalue": value}
            for size, one in found.items()
            for epoch, norm, value in zip(
                one.look_epochs, one.look_norms, one.eigenvalues, strict=True
            )
        ]
    )
    return Made(
        panels=panels,
        table=table,
        verdict=judge({size: (one.norms, one.look_norms, one.eigenvalues)
                       for size, one in found.items()}),
        notes=(
            trainings.data_note(settings),
            "One seed, without decay of the learning rate; the Hessian is that of the loss on 512 "
            "fixed training samples.",
        ),
        data_s=seconds,
    )  # fmt: skip


def looks_of(document: Mapping[str, Any]) -> Looks:
    """What a diagnosis says, with the mean norm of the steps before each look."""
    norms = tuple(float(step["gradient_norm"]) for step in document["steps"])
    epochs = tuple(float(step["epoch"]) for step in document["steps"])
    at = [int(look["step"]) for look in document["snapshots"]]
    means = [
        statistics.fmean(norms[first:last]) for first, last in zip([0, *at[:-1]], at, strict=True)
    ]
    return Looks(
        norms=norms,
        epochs=epochs,
        look_epochs=tuple(epochs[step - 1] for step in at),
        look_norms=tuple(means),
        eigenvalues=tuple(float(look["hessian_eigenvalue"]) for look in document["snapshots"]),
    )


def judge(
    found: Mapping[int, tuple[Sequence[float], Sequence[float], Sequence[float]]],
) -> Verdict:
    """The rule on (norms of all steps, mean norm at each look, eigenvalue at each look)."""
    from scipy.stats import spearmanr

    ratios, correlations = {}, {}
    for size, (norms, means, eigenvalues) in found.items():
        tenth = max(1, len(norms) // 10)
        ratios[size] = statistics.fmean(norms[:tenth]) / statistics.fmean(norms[tenth:])
        correlations[size] = float(spearmanr(means, eigenvalues).statistic)
    passed = sum(ratio > 1.0 for ratio in ratios.values())
    passed += sum(value >= FOLLOWS for value in correlations.values())
    words = ", ".join(
        f"at batch {size} the early norm is {ratios[size]:.1f} times the later one and the rank "
        f"correlation with the eigenvalue {correlations[size]:.2f}"
        for size in found
    )
    return Verdict(
        held=share_held(passed, 2 * len(found)),
        because=words,
        numbers={
            **{f"early_over_late/batch_{size}": value for size, value in ratios.items()},
            **{f"rank_correlation/batch_{size}": value for size, value in correlations.items()},
        },
    )


if __name__ == "__main__":
    from run import main

    main(PAPER.name)
