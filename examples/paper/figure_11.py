"""Figure 11: relative error of predicted time and memory.

Claim: training time and memory are predicted within 7.5 to 14 %.

Rule: a model agrees where the mean absolute error of both, over the configurations that the
predictor has not seen, is at most 14 %. Partial search is asked about everything that it did not
measure; full search about each configuration in turn, left out of its fit. All models with both
searches: held; at least half: held in part.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from reproduction import profiles
from reproduction.facts import Made, Panel, Paper, Series, Verdict, share_held
from reproduction.settings import Settings

from mlflow_tula.table import Measurement, ProfileTable

PAPER = Paper.read("11", __doc__)
BEST, WORST = 0.075, 0.14
"""The paper's range."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Miss:
    """One configuration that the predictor had not seen; errors as fractions, with their sign."""

    row: Measurement
    time: float
    memory: float
    growth: float | None
    """Of the memory above that of the smallest batch: a process on a CPU is mostly constant."""


def make(settings: Settings) -> Made:
    """Errors of both searches, model by model."""
    import pandas as pd

    tables = profiles.profiles(settings)
    misses = {
        (model, search): found
        for model, table in tables.items()
        for search, found in (("partial", of_partial(table)), ("full", of_full(table)))
    }
    rows = [
        {"model": model, "search": search, "ranks": miss.row.world_size,
         "local_batch_size": miss.row.local_batch_size, "time_error": miss.time,
         "memory_error": miss.memory, "memory_growth_error": miss.growth}
        for (model, search), found in misses.items()
        for miss in found
    ]  # fmt: skip
    errors = {key: (mean(m.time for m in found), mean(m.memory for m in found))
              for key, found in misses.items()}  # fmt: skip
    growth = mean(m.growth for found in misses.values() for m in found if m.growth is not None)
    panels = [
        Panel(
            title=f"{what}, {search} search",
            x_label="global batch size, samples",
            y_label="predicted / measured - 1, %",
            series=[
                Series(name=model, x=[m.row.global_batch_size for m in misses[model, search]],
                       y=[100 * getattr(m, what) for m in misses[model, search]],
                       style="points", color=number)
                for number, model in enumerate(tables)
            ],
            batch_axis=True,
            level=(0.0, "as measured"),
        )
        for what in ("time", "memory")
        for search in ("partial", "full")
    ]  # fmt: skip
    return Made(
        panels=panels,
        table=pd.DataFrame(rows),
        verdict=judge(errors),
        notes=(
            profiles.hardware_note(tables),
            "Memory is the peak that the limit applies to; of what grows with the batch alone the "
            f"mean error is {growth:.1%}.",
        ),
        data_s=profiles.seconds_of(settings),
    )


def mean(values: object) -> float:
    """Mean of absolute values; 0 of none."""
    known = [abs(value) for value in values]  # type: ignore[attr-defined]
    return statistics.fmean(known) if known else 0.0


def of_partial(table: ProfileTable) -> list[Miss]:
    """Errors of the fit to partial search, where it did not measure."""
    few = profiles.partial_search(table)
    return _misses(table, few, profiles.unmeasured(table, few))


def of_full(table: ProfileTable) -> list[Miss]:
    """Errors of the fit to all configurations but one, at that one."""
    found = []
    for row in table.ok:
        rest = tuple(
            one
            for one in table.measurements
            if (one.local_batch_size, one.world_size) != (row.local_batch_size, row.world_size)
        )
        found += _misses(table, replace(table, measurements=rest), [row])
    return found


def _misses(table: ProfileTable, known: ProfileTable, rows: list[Measurement]) -> list[Miss]:
    if not rows:
        return []
    said = profiles.predicted(profiles.fitted(known), rows)
    found = []
    for row, step, peak in zip(rows, said.step_time_s, said.peak_memory_bytes, strict=True):
        true, time = float(row.peak_memory_bytes or 0), float(row.step_time_s or 0)
        smallest = min(
            float(one.peak_memory_bytes or 0)
            for one in table.ok
            if one.world_size == row.world_size
        )
        grown = true - smallest
        found.append(
            Miss(
                row=row,
                time=float(step) / time - 1.0,
                memory=float(peak) / true - 1.0 if true else 0.0,
                growth=(float(peak) - true) / grown if grown > 0 else None,
            )
        )
    return found


def judge(errors: Mapping[tuple[str, str], tuple[float, float]]) -> Verdict:
    """The rule on (time error, memory error), means by model and search."""
    agree = [key for key, both in errors.items() if max(both) <= WORST]
    words, numbers = [], {}
    for search in dict.fromkeys(search for _, search in errors):
        times = [both[0] for key, both in errors.items() if key[1] == search]
        memories = [both[1] for key, both in errors.items() if key[1] == search]
        words.append(
            f"{search} search errs by {statistics.fmean(times):.1%} in time (worst model "
            f"{max(times):.1%}) and {statistics.fmean(memories):.1%} in memory (worst "
            f"{max(memories):.1%})"
        )
        numbers[f"time_error/{search}"] = statistics.fmean(times)
        numbers[f"worst_time_error/{search}"] = max(times)
        numbers[f"memory_error/{search}"] = statistics.fmean(memories)
        numbers[f"worst_memory_error/{search}"] = max(memories)
    return Verdict(
        held=share_held(len(agree), len(errors)),
        because=f"{' and '.join(words)}; the paper's range is {BEST:.1%} to {WORST:.0%}",
        numbers=numbers,
    )


if __name__ == "__main__":
    from run import main

    main(PAPER.name)
