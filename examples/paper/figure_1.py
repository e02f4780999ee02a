"""Figure 1: epoch time against batch size, four models, two cluster sizes.

Claim: training time falls with the batch size at first and then levels off, whatever the model and
the cluster; on more devices as on few (abstract: diminishing returns, a knee).

Rule: a curve agrees where its best epoch is at least 1.1 times shorter than that of the smallest
batch, and the first half of the doublings saves more seconds than the second half. All curves:
held; at least half: held in part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reproduction import profiles
from reproduction.facts import Made, Panel, Paper, Series, Verdict, share_held
from reproduction.settings import Settings

PAPER = Paper.read("1", __doc__)
FASTER = 1.1


def make(settings: Settings) -> Made:
    """Measured epochs of full search, a panel a cluster size."""
    import pandas as pd

    tables = profiles.profiles(settings)
    rows, panels, curves = [], [], {}
    counts = sorted({world for table in tables.values() for world in profiles.worlds(table)})
    for world in counts:
        series = []
        for number, (model, table) in enumerate(tables.items()):
            found = profiles.curve(table, world)
            if len(found) < 3:
                continue
            sizes = [row.global_batch_size for row in found]
            times = [profiles.epoch_seconds(table, row) for row in found]
            curves[f"{model} on {world}"] = times
            series.append(Series(name=model, x=sizes, y=times, color=number))
            rows += [
                {"model": model, "ranks": world, "global_batch_size": size, "epoch_time_s": time}
                for size, time in zip(sizes, times, strict=True)
            ]
        panels.append(
            Panel(
                title=f"{world} rank{'s' if world > 1 else ''}",
                x_label="global batch size, samples",
                y_label="epoch time, s",
                series=series,
                batch_axis=True,
                log_y=True,
            )
        )
    return Made(
        panels=panels,
        table=pd.DataFrame(rows),
        verdict=judge(curves),
        notes=(
            profiles.hardware_note(tables),
            "Ranks of a CPU share its cores, so that more of them are not faster as more devices "
            "are.",
        ),
        data_s=profiles.seconds_of(settings),
    )


def judge(curves: Mapping[str, Sequence[float]]) -> Verdict:
    """The rule on epoch times by ascending batch size, one list a curve."""
    gains, agree = [], 0
    for times in curves.values():
        middle = times[(len(times) - 1) // 2]
        gains.append(times[0] / min(times))
        agree += gains[-1] >= FASTER and times[0] - middle > middle - times[-1]
    return Verdict(
        held=share_held(agree, len(curves)),
        because=(
            f"{agree} of {len(curves)} curves fall and then level off; the best epoch is "
            f"{min(gains):.1f} to {max(gains):.1f} times shorter than that of the smallest batch"
        ),
        numbers={
            "curves": len(curves),
            "curves_that_agree": agree,
            "least_speedup": min(gains),
            "largest_speedup": max(gains),
        },
    )


if __name__ == "__main__":
    from run import main

    main(PAPER.name)
