"""The gate: may a new fit take the champion's place?

1. Both predictors as they are, on the rows of the new table. The new one has seen them, so this
   only finds one that is broken.
2. Each configuration left out of both tables in turn, both refitted, both asked for it: neither
   has seen it. This finds a profile of too few or too noisy probes. The rows are those of both
   tables where the two agree on what they share; where they do not, the machine or the code has
   changed, and only the new rows tell what is true now. (Where the champion's table is not at
   hand, the champion itself is asked.)

Compared are the errors of step time and memory, the coverage of the intervals and the regret of
the choice (evaluation.py). "No worse" allows what re-measuring the same configuration differs by,
so that noise alone does not freeze an old champion.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Self

from mlflow_tula.errors import TableError, TulaWarning
from mlflow_tula.fit import fit
from mlflow_tula.predictors.bundle import PredictorBundle
from mlflow_tula.registry.evaluation import (
    Evaluation,
    ask,
    evaluate,
    evaluate_bundle,
    measured_frame,
)
from mlflow_tula.specs import Spec
from mlflow_tula.table import Measurement, ProfileTable

if TYPE_CHECKING:
    from mlflow.models import MetricThreshold

TOLERANCE = {"mape": 0.02, "memory_mape": 0.05, "regret": 0.05}
"""Fractions by which a number may exceed the champion's. On public tables two measurements of one
configuration differ by 1.9 % in time at the median, which moves a choice between two sizes by twice
as much; memory moves in jumps."""

COVERAGE_PROMISED = 0.85
"""Intervals of 90 % that hold at least so many rows are not worse, whatever the champion's hold."""

AGREE = 0.10
"""Largest median difference (fraction) of the step times that two tables share."""

_MAX_FOLDS = 8
_NAMES = {
    "mape": "step time error",
    "memory_mape": "memory error",
    "coverage": "coverage",
    "regret": "regret",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict(Spec):
    """Whether to promote, why in one sentence, and what that rests on.

    `held_out` and `champion_held_out` are the two evaluations on configurations that were left out
    of both fits, `rows_digest` names their rows: the digest of the table, or of both tables.
    """

    promoted: bool
    reason: str
    held_out: Evaluation | None = None
    champion_held_out: Evaluation | None = None
    rows_digest: str = ""

    @property
    def step_time_error(self) -> float | None:
        """Mean absolute error of the step times left out, a fraction."""
        return None if self.held_out is None else self.held_out.mape

    @property
    def champion_step_time_error(self) -> float | None:
        """The champion's, on the same rows."""
        return None if self.champion_held_out is None else self.champion_held_out.mape

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`."""
        values = dict(data)
        for name in ("held_out", "champion_held_out"):
            if values.get(name) is not None:
                values[name] = Evaluation.from_dict(values[name])
        return super(Verdict, cls).from_dict(values)


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
        reason = "promoted: the first version, there was no champion"
        alone = _left_out(table, None, None)
        held_out = None if alone is None else alone[0]
        return Verdict(
            promoted=True, reason=reason, held_out=held_out, rows_digest=_digest(table, None)
        )
    if bundle.memory is None and champion.memory is not None:
        text = f"it has no memory measurements, {champion_name} has"
        return Verdict(promoted=False, reason=f"not promoted: {text}")
    own, theirs = (evaluate_bundle(one, table.ok) for one in (bundle, champion))
    for name in ("mape", "memory_mape"):
        if _is_worse(own, theirs, name):
            text = f"its {_against(own, theirs, name)} of {champion_name}, on its own table"
            return Verdict(promoted=False, reason=f"not promoted: {text}")
    left_out = _left_out(table, champion_table, champion)
    if left_out is None:
        text = f"too few batch sizes to check it against {champion_name}"
        return Verdict(promoted=False, reason=f"not promoted: {text}")
    verdict = _compared(*left_out, champion_name)
    return replace(verdict, rows_digest=_digest(table, champion_table))


def _compared(own: Evaluation, theirs: Evaluation, champion_name: str) -> Verdict:
    """The verdict on two evaluations of the same rows."""
    said = [
        _against(own, theirs, name)
        for name in _NAMES
        if None not in (getattr(own, name), getattr(theirs, name))
    ]
    worse = [words for name, words in _NAMES.items() if _is_worse(own, theirs, name)]
    text = f"{', '.join(said)} of {champion_name}, on sizes left out"
    if worse:
        text = f"worse in {' and '.join(worse)}: {text}"
    return Verdict(
        promoted=not worse,
        reason=f"{'not promoted' if worse else 'promoted'}: {text}",
        held_out=own,
        champion_held_out=theirs,
    )


def _against(own: Evaluation, theirs: Evaluation, name: str) -> str:
    """One number of both, in words."""
    return f"{_NAMES[name]} {getattr(own, name):.1%} against {getattr(theirs, name):.1%}"


def limits(champion: Evaluation) -> dict[str, tuple[float, bool]]:
    """What a new version must reach to be no worse: metric -> (limit, whether more is better).

    Coverage may be what was promised, or the champion's less one row of a few: one row more or
    less says nothing. What is not known of the champion has no limit.
    """
    found = {
        name: (getattr(champion, name) + allowed, False)
        for name, allowed in TOLERANCE.items()
        if getattr(champion, name) is not None
    }
    if champion.coverage is not None and champion.rows:
        least = min(COVERAGE_PROMISED, champion.coverage - 1.5 / champion.rows)
        found["coverage"] = (least, True)
    return found


def validation_thresholds(champion: Evaluation) -> dict[str, MetricThreshold]:
    """The same limits for `mlflow.validate_evaluation_results`.

    Example:
        result = mlflow.models.evaluate(uri, frame, model_type="tula", evaluators="tula")
        mlflow.validate_evaluation_results(validation_thresholds(champion), result)
    """
    from mlflow.models import MetricThreshold

    return {
        name: MetricThreshold(threshold=limit, greater_is_better=more)
        for name, (limit, more) in limits(champion).items()
    }


def _is_worse(own: Evaluation, theirs: Evaluation, name: str) -> bool:
    """Whether a number is worse than the champion's beyond its limit; unknown ones are not."""
    mine, known = getattr(own, name), limits(theirs).get(name)
    if mine is None or known is None:
        return False
    limit, more_is_better = known
    return bool(mine < limit if more_is_better else mine > limit)


def _left_out(
    table: ProfileTable, champion_table: ProfileTable | None, champion: PredictorBundle | None
) -> tuple[Evaluation, Evaluation] | None:
    """Both on configurations that neither fit has seen; None where there is nothing to compare.

    Without a champion the new fit is compared with itself.
    """
    import pandas as pd

    if len({_configuration(row) for row in table.ok}) < 2:
        return None
    rows = list(table.ok)
    if champion_table is not None and agree(table, champion_table):
        rows += [row for row in champion_table.ok if row not in set(rows)]
    configurations = list(dict.fromkeys(_configuration(row) for row in rows))
    asked, mine, theirs = [], [], []
    for start in range(min(_MAX_FOLDS, len(configurations))):
        unseen = set(configurations[start::_MAX_FOLDS])
        own = _refit(table, unseen)
        if champion_table is None:
            other = own if champion is None else champion
        else:
            other = own if champion_table == table else _refit(champion_table, unseen)
        # Only where both can answer: otherwise the harder questions would count for one alone.
        if own is None or other is None:
            continue
        frame = measured_frame(row for row in rows if _configuration(row) in unseen)
        asked.append(frame)
        mine.append(ask(own, frame))
        theirs.append(ask(other, frame))
    if not asked:
        return None
    measured, first, second = (pd.concat(one, ignore_index=True) for one in (asked, mine, theirs))
    return evaluate(first, measured), evaluate(second, measured)


def _digest(table: ProfileTable, champion_table: ProfileTable | None) -> str:
    """Names the rows of `_left_out`."""
    if champion_table is None or champion_table == table or not agree(table, champion_table):
        return table.digest
    return hashlib.sha256(f"{table.digest}+{champion_table.digest}".encode()).hexdigest()[:16]


def agree(table: ProfileTable, other: ProfileTable) -> bool:
    """Whether two tables measured the same thing: what they share differs by no more than AGREE."""
    mine, theirs = _step_times(table.ok), _step_times(other.ok)
    ratios = [mine[one] / theirs[one] for one in mine.keys() & theirs.keys()]
    return bool(ratios) and 1 / (1 + AGREE) <= median(ratios) <= 1 + AGREE


def _step_times(rows: Sequence[Measurement]) -> dict[tuple[int, int, int, int], float]:
    """The median step time of each configuration."""
    found: dict[tuple[int, int, int, int], list[float]] = {}
    for row in rows:
        if row.step_time_s is not None:
            found.setdefault(_configuration(row), []).append(row.step_time_s)
    return {configuration: median(times) for configuration, times in found.items()}


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
