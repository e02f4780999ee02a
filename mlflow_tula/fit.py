"""Fit: a table (and convergence data) becomes a PredictorBundle with a FitReport."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlflow_tula.errors import (
    InvalidInputError,
    SlowRankWarning,
    TableError,
    TooFewProbesWarning,
)
from mlflow_tula.predictors import memory as memory_predictor
from mlflow_tula.predictors import step_time as step_time_predictor
from mlflow_tula.predictors.bundle import FitReport, PredictorBundle, Probed
from mlflow_tula.predictors.convergence import ConvergencePredictor
from mlflow_tula.table import SLOW_RATIO, Measurement, ProfileTable

if TYPE_CHECKING:
    import pandas as pd


def fit(
    table: ProfileTable, convergence: pd.DataFrame | ConvergencePredictor | None = None
) -> PredictorBundle:
    """Fit every predictor that the data allows.

    Args:
        table: measured trials; rows of status oom count for feasibility, failed ones are dropped.
        convergence: a frame of `global_batch_size`, `epochs_to_target` and optional `std`,
            `runs_total`, `runs_reached`; or a fitted ConvergencePredictor; or None.

    Raises:
        TableError: no row gave a step time.
    """
    if not isinstance(table, ProfileTable):
        raise InvalidInputError(
            f"fit needs a ProfileTable, not {type(table).__name__}: make one with "
            "ProfileTable.from_frame(frame, workload=..., hardware=...)"
        )
    rows = table.ok
    if not rows:
        raise TableError(_nothing_ran(table))
    oom = tuple(row for row in table.measurements if row.status == "oom")
    step_time = step_time_predictor.fit(table)
    memory = memory_predictor.fit(table)
    if convergence is not None and not isinstance(convergence, ConvergencePredictor):
        convergence = ConvergencePredictor.fit(convergence)
    found = [*step_time.warnings, *memory.warnings]
    if convergence is not None:
        found += convergence.warnings
    for text in step_time.warnings:
        warnings.warn(text, TooFewProbesWarning, stacklevel=2)
    slow = _slow_ranks(rows)
    found += slow
    for text in slow:
        warnings.warn(text, SlowRankWarning, stacklevel=2)
    report = FitReport(
        step_time_form=step_time.form,
        memory_form=memory.form,
        convergence_form="" if convergence is None else convergence.summary,
        step_time_mape=step_time.leave_one_out_mape,
        memory_mape=memory.leave_one_out_mape,
        convergence_mape=None if convergence is None else convergence.leave_one_out_mape,
        coverage=step_time.leave_one_out_coverage,
        rows_used=len(rows),
        rows_oom=len(oom),
        rows_failed=len(table.measurements) - len(rows) - len(oom),
        warnings=tuple(dict.fromkeys(found)),
    )
    return PredictorBundle(
        workload=table.workload,
        hardware=table.hardware,
        step_time=step_time,
        memory=memory,
        convergence=convergence,
        probed=Probed(
            ok=tuple(sorted({(row.local_batch_size, row.world_size) for row in rows})),
            oom=tuple(sorted({(row.local_batch_size, row.world_size) for row in oom})),
        ),
        report=report,
        table_digest=table.digest,
    )


def _slow_ranks(rows: Sequence[Measurement]) -> list[str]:
    """A line for each layout in which one rank was slow in most rows; step times are its own.

    In two at least: what else a machine does can last as long as a probe.
    """
    layouts: dict[tuple[int, int], list[Measurement]] = {}
    for row in rows:
        if row.slowest_rank_ratio is not None:
            layouts.setdefault((row.nodes, row.devices_per_node), []).append(row)
    found = []
    for (nodes, devices), group in layouts.items():
        ratio = statistics.median(row.slowest_rank_ratio or 0.0 for row in group)
        slow = [row for row in group if (row.slowest_rank_ratio or 0.0) >= SLOW_RATIO]
        names = {row.slowest_rank for row in slow}
        if 2 * len(slow) > len(group) and len(slow) > 1 and len(names) == 1:
            found.append(
                f"rank {names.pop()} of {nodes * devices} takes {ratio:.1f} times the median of "
                "the others: predictions follow the slowest rank"
            )
    return found


def _nothing_ran(table: ProfileTable) -> str:
    """The message when no row gave a step time: what was tried, and the last reason."""
    if not table.measurements:
        return "the table has no rows: measure at least one batch size"
    sizes = sorted({row.local_batch_size for row in table.measurements})
    last = table.measurements[-1]
    return (
        f"no row of status ok: local batch sizes {', '.join(map(str, sizes[:8]))} all ended with "
        f"{last.status}{f' ({last.reason})' if last.reason else ''}; measure a smaller size"
    )
