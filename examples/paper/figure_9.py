"""Figure 9: training time against batch size on the largest cluster, measured and predicted.

Claim: training time has a knee, and predictions from full and from partial search find it and the
fastest batch size.

Rule: a model agrees where, by the measured times, the batch that partial search calls fastest is at
most 5 % slower than the fastest one, and the one it calls the knee is the measured knee or a
neighbour of it. The knee is the smallest batch within 10 % of the best time. All models: held; at
least half: held in part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from reproduction import profiles
from reproduction.facts import CHOICE, Made, Panel, Paper, Series, Verdict, share_held
from reproduction.settings import Settings

from mlflow_tula.knee import diminishing_returns
from mlflow_tula.table import ProfileTable

if TYPE_CHECKING:
    from mlflow_tula.predictors.bundle import PredictorBundle

PAPER = Paper.read("9", __doc__)
SLOWER = 0.05
MINUTE = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One model: measured times by size, and what partial search says of them (indices)."""

    times: tuple[float, ...]
    fastest: int
    knee: int

    @property
    def regret(self) -> float:
        """How much slower the batch called fastest is than the fastest."""
        return self.times[self.fastest] / min(self.times) - 1.0

    @property
    def true_knee(self) -> int:
        """By the measured times."""
        return diminishing_returns(np.arange(1, len(self.times) + 1), self.times)

    @property
    def agrees(self) -> bool:
        """The rule."""
        return self.regret <= SLOWER and abs(self.knee - self.true_knee) <= 1


def make(settings: Settings) -> Made:
    """Points of full search on the most ranks, both fits, knee and minimum of the partial one."""
    import pandas as pd

    tables = profiles.profiles(settings)
    rows, panels, choices, probes = [], [], {}, []
    for model, table in tables.items():
        world = profiles.worlds(table)[-1]
        few = profiles.partial_search(table)
        probes.append(f"{model} {len(few.measurements)} of {len(table.measurements)}")
        found = profiles.curve(table, world)
        sizes = [row.global_batch_size for row in found]
        factor = settings.epochs / MINUTE
        times = [factor * profiles.epoch_seconds(table, row) for row in found]
        said = {
            name: [
                factor * profiles.epoch_seconds(table, row, step)
                for row, step in zip(
                    found, profiles.predicted(bundle, found).step_time_s, strict=True
                )
            ]
            for name, bundle in (
                ("full", profiles.fitted(table)), ("partial", profiles.fitted(few))
            )
        }  # fmt: skip
        choice = Choice(
            times=tuple(times),
            fastest=int(np.argmin(said["partial"])),
            knee=diminishing_returns(sizes, said["partial"]),
        )
        choices[model] = choice
        panels.append(_panel(model, table, few, settings.epochs, choice, said["partial"]))
        rows += [
            {"model": model, "ranks": world, "global_batch_size": size, "measured_min": time,
             "full_search_min": full, "partial_search_min": part,
             "knee": at == choice.knee, "fastest": at == choice.fastest}
            for at, (size, time, full, part) in enumerate(
                zip(sizes, times, said["full"], said["partial"], strict=True)
            )
        ]  # fmt: skip
    return Made(
        panels=panels,
        table=pd.DataFrame(rows),
        verdict=judge(choices),
        notes=(
            profiles.hardware_note(tables),
            f"Training time is {settings.epochs:g} epochs of measured steps. Partial search is "
            f"replayed within full search's measurements; it took {', '.join(probes)} probes.",
        ),
        data_s=profiles.seconds_of(settings),
    )


def _panel(
    model: str, table: ProfileTable, few: ProfileTable, epochs: float, choice: Choice,
    said: list[float],
) -> Panel:  # fmt: skip
    """Measured points, two dashed lines, a diamond at the knee and a star at the minimum."""
    found = profiles.curve(table, profiles.worlds(table)[-1])
    sizes = [row.global_batch_size for row in found]
    lines = [
        Series(name=name, x=x, y=y, style="dashed", color=number)
        for number, (name, (x, y)) in enumerate(
            (
                ("full search", smooth(table, profiles.fitted(table), epochs)),
                ("partial search", smooth(table, profiles.fitted(few), epochs)),
            ),
            start=1,
        )
    ]
    at_knee, at_best = (([sizes[at]], [said[at]]) for at in (choice.knee, choice.fastest))
    return Panel(
        title=f"{model} on {found[0].world_size} ranks",
        x_label="global batch size, samples",
        y_label="training time, min",
        series=[
            Series(name="measured", x=sizes, y=choice.times, style="points"),
            *lines,
            Series(name="knee", x=at_knee[0], y=at_knee[1], style="diamond", color=CHOICE),
            Series(name="minimum", x=at_best[0], y=at_best[1], style="star", color=CHOICE),
        ],
        batch_axis=True,
        from_zero=True,
    )


def smooth(
    table: ProfileTable, bundle: PredictorBundle, epochs: float
) -> tuple[list[float], list[float]]:
    """Global batch sizes and predicted minutes between the smallest and the largest measured."""
    import dataclasses

    found = profiles.curve(table, profiles.worlds(table)[-1])
    ends = [row.local_batch_size for row in (found[0], found[-1])]
    sizes = sorted({int(size) for size in np.geomspace(*ends, 48).round()})
    rows = [dataclasses.replace(found[0], local_batch_size=size) for size in sizes]
    steps = profiles.predicted(bundle, rows).step_time_s
    times = [
        epochs * profiles.epoch_seconds(table, row, step) / MINUTE
        for row, step in zip(rows, steps, strict=True)
    ]
    return [float(row.global_batch_size) for row in rows], times


def judge(choices: Mapping[str, Choice]) -> Verdict:
    """The rule, model by model."""
    agree = [model for model, choice in choices.items() if choice.agrees]
    worst = max(choices, key=lambda model: choices[model].regret)
    regrets = [choice.regret for choice in choices.values()]
    exact = sum(choice.knee == choice.true_knee for choice in choices.values())
    return Verdict(
        held=share_held(len(agree), len(choices)),
        because=(
            f"for {len(agree)} of {len(choices)} models partial search names the knee (exactly for "
            f"{exact}) and the fastest batch; its fastest is on average "
            f"{sum(regrets) / len(regrets):.1%} and at worst {max(regrets):.1%} ({worst}) slower "
            "than the truly fastest"
        ),
        numbers={
            "models_that_agree": len(agree),
            "exact_knees": exact,
            "mean_regret": sum(regrets) / len(regrets),
            "worst_regret": max(regrets),
        },
    )


if __name__ == "__main__":
    from run import main

    main(PAPER.name)
