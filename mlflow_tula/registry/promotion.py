"""The first gate: may a new fit take the champion's place?

Protocol, on the rows of the *new* table, for step time and for memory:

1. Both predictors as they are. The new one has seen these rows, so this only finds one that is
   broken.
2. Each configuration left out of both tables in turn, both refitted, both asked for it: neither
   has seen it. This finds a profile of too few or too noisy probes. (Where the champion's table is
   not at hand, the champion itself is asked.)

"No worse" allows what re-measuring the same configuration differs by, so that noise alone does not
freeze an old champion.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlflow_tula.errors import TableError, TulaWarning
from mlflow_tula.fit import fit
from mlflow_tula.predictors.bundle import PredictorBundle
from mlflow_tula.specs import Spec
from mlflow_tula.table import Measurement, ProfileTable

TOLERANCE = {"step_time_s": 0.02, "peak_memory_bytes": 0.05}
"""Fractions by which an error may exceed the champion's. On public tables two measurements of one
configuration differ by 1.9 % in time at the median; memory moves in jumps."""

_MAX_FOLDS = 8
_NAMES = {"step_time_s": "step time", "peak_memory_bytes": "memory"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict(Spec):
    """Whether to promote, why in one sentence, and the step-time errors (fractions) it rests on."""

    promoted: bool
    reason: str
    step_time_error: float | None = None
    champion_step_time_error: float | None = None


def judge(
    bundle: PredictorBundle,
    table: ProfileTable,
    champion: PredictorBundle | None,
    champion_table: ProfileTable | None = None,
    *,
    champion_name: str = "the champion",
) -> Verdict:
    """Compare a new fit with the champion on the new table.

    Args:
        bundle: the new fit, made from `table`.
        table: the new measurements.
        champion: the present champion, or None.
        champion_table: what the champion was fitted to, where it is known.
        champion_name: what to call it in the reason.
    """
    if champion is None:
        return Verdict(promoted=True, reason="promoted: the first version, there was no champion")
    if bundle.memory is None and champion.memory is not None:
        text = f"it has no memory measurements, {champion_name} has"
        return Verdict(promoted=False, reason=f"not promoted: {text}")
    for quantity, name in _NAMES.items():
        mine = _mean(errors(bundle, table.ok, quantity))
        theirs = _mean(errors(champion, table.ok, quantity))
        if _is_worse(mine, theirs, quantity):
            text = (
                f"its {name} error on its own table is {mine:.1%}, {champion_name}'s {theirs:.1%}"
            )
            return Verdict(promoted=False, reason=f"not promoted: {text}")
    pairs = _left_out(table, champion_table, champion)
    own, other = pairs["step_time_s"]
    said = [
        f"{name} error {pairs[quantity][0]:.1%} against {pairs[quantity][1]:.1%}"
        for quantity, name in _NAMES.items()
        if None not in pairs[quantity]
    ]
    promoted = own is not None and not any(_is_worse(*pair, name) for name, pair in pairs.items())
    if own is None:
        reason = f"too few batch sizes to check it against {champion_name}"
    else:
        reason = f"{', '.join(said)} of {champion_name}, on sizes left out"
    return Verdict(
        promoted=promoted,
        reason=f"{'promoted' if promoted else 'not promoted'}: {reason}",
        step_time_error=own,
        champion_step_time_error=other,
    )


def _is_worse(mine: float | None, theirs: float | None, quantity: str) -> bool:
    """Whether an error exceeds the other by more than is allowed; unknown ones do not."""
    return mine is not None and theirs is not None and mine > theirs + TOLERANCE[quantity]


def errors(bundle: PredictorBundle, rows: Sequence[Measurement], quantity: str) -> list[float]:
    """Absolute percentage errors (fractions) of a bundle on measured rows; unknowns left out."""
    import pandas as pd

    measured = [row for row in rows if getattr(row, quantity)]
    if not measured:
        return []
    names = ("local_batch_size", "nodes", "devices_per_node", "accumulation_steps")
    frame = pd.DataFrame([{name: getattr(row, name) for name in names} for row in measured])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TulaWarning)
        predicted = bundle.predict(frame)[quantity]
    pairs = zip(predicted, (getattr(row, quantity) for row in measured), strict=True)
    return [abs(float(p) / float(m) - 1.0) for p, m in pairs if p == p]


def _left_out(
    table: ProfileTable, champion_table: ProfileTable | None, champion: PredictorBundle
) -> dict[str, tuple[float | None, float | None]]:
    """Mean errors of both on configurations that neither fit has seen; at most eight refits."""
    configurations = list(dict.fromkeys(_configuration(row) for row in table.ok))
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in _NAMES}
    for start in range(min(_MAX_FOLDS, len(configurations))):
        unseen = set(configurations[start::_MAX_FOLDS])
        asked = [row for row in table.ok if _configuration(row) in unseen]
        own = _refit(table, unseen)
        if champion_table is None:
            other: PredictorBundle | None = champion
        else:
            other = own if champion_table == table else _refit(champion_table, unseen)
        # Only where both can answer: otherwise the harder questions would count for one alone.
        if own is None or other is None:
            continue
        for quantity, (mine, theirs) in found.items():
            mine += errors(own, asked, quantity)
            theirs += errors(other, asked, quantity)
    return {name: (_mean(mine), _mean(theirs)) for name, (mine, theirs) in found.items()}


def _refit(table: ProfileTable, without: set[tuple[int, int, int, int]]) -> PredictorBundle | None:
    """A fit to the rows of other configurations, or None when nothing is left to fit."""
    rest = tuple(row for row in table.measurements if _configuration(row) not in without)
    smaller = ProfileTable(
        workload=table.workload, hardware=table.hardware, measurements=rest, links=table.links
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TulaWarning)
            return fit(smaller)
    except TableError:
        return None


def _configuration(row: Measurement) -> tuple[int, int, int, int]:
    """What tells two trials apart."""
    return row.local_batch_size, row.nodes, row.devices_per_node, row.accumulation_steps


def _mean(values: Iterable[float]) -> float | None:
    """The mean, or None of nothing."""
    listed = list(values)
    return sum(listed) / len(listed) if listed else None
