"""Markdown that people read on a run's page: the decision in the first line."""

from __future__ import annotations

from collections.abc import Sequence

from mlflow_tula.predictors.bundle import PredictorBundle
from mlflow_tula.recommend.recommendation import CurvePoint, Recommendation
from mlflow_tula.table import ProfileTable

_ROWS = 9


def describe_profile(
    table: ProfileTable,
    bundle: PredictorBundle | None = None,
    recommendation: Recommendation | None = None,
    *,
    registered: str = "",
    notes: Sequence[str] = (),
) -> str:
    """What was decided, on what evidence, and what to do next.

    Args:
        table: what was measured.
        bundle: what was fitted to it.
        recommendation: the decision; the first line then says that there is none when None.
        registered: the registered version, as `name version 3, champion`.
        notes: further lines, such as what the search cost.
    """
    workload, hardware = table.workload, table.hardware
    parts = [_decision(table, recommendation), ""]
    where = f"{hardware.device_name} x {hardware.devices_per_node}"
    parts += [f"Workload `{workload.slug}` on {where} (`{hardware.slug}`)", ""]
    if recommendation is not None:
        parts += [*_curve(recommendation), ""]
        parts += [f"- {reason}" for reason in recommendation.reasons]
        parts += [f"- **warning:** {warning}" for warning in recommendation.warnings]
        parts += [""]
    parts += ["**Evidence**", "", f"- {_counts(table)} (table `{table.digest}`)"]
    if bundle is not None:
        parts += [f"- {line}" for line in str(bundle.report).splitlines() if ":" in line]
    parts += [f"- {note}" for note in notes]
    if registered:
        parts += [f"- registered as {registered}"]
    parts += ["", "**Next**", "", *_next_steps(table)]
    return "\n".join(parts)


def _decision(table: ProfileTable, recommendation: Recommendation | None) -> str:
    """The first line."""
    if recommendation is None:
        return f"**No decision yet:** {_counts(table)} of `{table.workload.slug}`."
    chosen = recommendation.choice
    ranks = f"{recommendation.world_size} device{'s' if recommendation.world_size > 1 else ''}"
    pieces = f"{recommendation.local_batch_size} per device"
    if recommendation.accumulation_steps > 1:
        pieces += f" x {recommendation.accumulation_steps} passes"
    text = f"**Take global batch size {recommendation.global_batch_size:,} on {ranks}** ({pieces})"
    if chosen.epoch_time_s is not None:
        text += f": {_time(chosen.epoch_time_s)} an epoch"
        if chosen.epoch_time_s_lower is not None and chosen.epoch_time_s_upper is not None:
            low, high = _time(chosen.epoch_time_s_lower), _time(chosen.epoch_time_s_upper)
            text += f" ({recommendation.level:.0%} interval {low} to {high})"
    return f"{text}, objective `{recommendation.objective}`."


def _curve(recommendation: Recommendation) -> list[str]:
    """The candidates on the chosen devices around the choice, as a table."""
    points = [
        point
        for point in recommendation.curve
        if (point.nodes, point.devices_per_node)
        == (recommendation.nodes, recommendation.devices_per_node)
    ]
    points.sort(key=lambda point: (point.global_batch_size, point.accumulation_steps))
    at = points.index(recommendation.choice)
    first = max(0, min(at - _ROWS // 2, len(points) - _ROWS))
    shown = points[first : first + _ROWS]
    priced = any(point.cost_usd is not None for point in shown)
    header = ["batch", "step", "epoch", "memory of a device", *(["cost"] if priced else []), "fits"]
    lines = [f"| {' | '.join(header)} |", f"|{'---:|' * len(header)}"]
    for point in shown:
        cells = _cells(point, priced=priced)
        if point == recommendation.choice:
            cells = [f"**{cell}**" if cell else "" for cell in cells]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cells(point: CurvePoint, *, priced: bool) -> list[str]:
    """One row of the table."""
    cells = [f"{point.global_batch_size:,}", _time(point.step_time_s), _time(point.epoch_time_s)]
    cells += ["" if point.peak_memory_bytes is None else f"{point.peak_memory_bytes / 1e9:.2f} GB"]
    if priced:
        cells += ["" if point.cost_usd is None else f"${point.cost_usd:.3g}"]
    fits = "yes" if point.fits else "no"
    return [*cells, f"{fits}, extrapolated" if point.extrapolated else fits]


def _counts(table: ProfileTable) -> str:
    """How many trials ran, and what became of the others."""
    ran = len(table.ok)
    text = f"{ran} measured trial{'s' if ran != 1 else ''}"
    for status, words in (("oom", "out of memory"), ("failed", "failed")):
        number = sum(row.status == status for row in table.measurements)
        text += f", {number} {words}" if number else ""
    return text


def _next_steps(table: ProfileTable) -> list[str]:
    """Commands to go on with."""
    workload = table.workload
    options = f"--model {workload.model}"
    if workload.dataset != "digits":
        options += f" --dataset {workload.dataset}"
    return [
        f"- ask again: `tula recommend {options}`",
        f"- train with it: `tula train {options} --batch-size auto`",
    ]


def _time(seconds: float | None) -> str:
    """Three significant digits in the unit that fits."""
    if seconds is None:
        return ""
    for limit, factor, unit in ((1.0, 1e3, "ms"), (600.0, 1.0, "s"), (36000.0, 1 / 60, "min")):
        if seconds < limit:
            return f"{_three(seconds * factor)} {unit}"
    return f"{_three(seconds / 3600)} h"


def _three(value: float) -> str:
    """Three significant digits without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
