"""Markdown that people read on a version's page, and what a run's page shares with it.

The decision stands in the first line, the gate's word in a paragraph of its own, which promotion
by hand and rollback rewrite.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mlflow_tula.predictors.bundle import PredictorBundle
from mlflow_tula.recommend.recommendation import CurvePoint, Recommendation
from mlflow_tula.registry.promotion import Verdict
from mlflow_tula.table import ProfileTable

_ROWS = 9
_GATE = re.compile(r"^\*\*Gate\.\*\* .*$", re.MULTILINE)


def version_description(
    bundle: PredictorBundle,
    table: ProfileTable,
    verdict: Verdict,
    recommendation: Recommendation | None = None,
) -> str:
    """What the version recommends, what the gate said of it, and how the fit was made."""
    hardware = table.hardware
    sizes = sorted({row.local_batch_size for row in table.ok})
    parts = [decision(table, recommendation), "", gate_line(verdict.reason), ""]
    where = f"{hardware.device_name} x {hardware.devices_per_node}"
    parts += [f"Predicts `{table.workload.slug}` on {where} (`{hardware.slug}`).", ""]
    if recommendation is not None:
        parts += [*curve_lines(recommendation), ""]
    parts += [f"- {line}" for line in str(bundle.report).splitlines()]
    parts += [f"- table `{table.digest}`: local batch sizes {', '.join(map(str, sizes))}"]
    return "\n".join(parts)


def gate_line(reason: str) -> str:
    """The paragraph that says whether the version is the champion, and why."""
    return f"**Gate.** {reason[:1].upper()}{reason[1:]}."


def with_gate(description: str, reason: str) -> str:
    """The description with another word of the gate; what people wrote around it stays."""
    line = gate_line(reason)
    if _GATE.search(description):
        return _GATE.sub(lambda _: line, description, count=1)
    first, separator, rest = description.partition("\n\n")
    return f"{first}\n\n{line}{separator}{rest}".strip()


def decision(table: ProfileTable, recommendation: Recommendation | None) -> str:
    """The first line: which batch size, on how many devices, and what it takes."""
    if recommendation is None:
        return f"**No decision yet:** {counts(table)} of `{table.workload.slug}`."
    chosen = recommendation.choice
    ranks = f"{recommendation.world_size} device{'s' if recommendation.world_size > 1 else ''}"
    pieces = f"{recommendation.local_batch_size} per device"
    if recommendation.accumulation_steps > 1:
        pieces += f" x {recommendation.accumulation_steps} passes"
    text = f"**Take global batch size {recommendation.global_batch_size:,} on {ranks}** ({pieces})"
    if chosen.epoch_time_s is not None:
        aimed = _to_target(recommendation) and chosen.time_to_target_s is not None
        whole = f"{time_words(chosen.time_to_target_s)} to the target, " if aimed else ""
        text += f": {whole}{time_words(chosen.epoch_time_s)} an epoch"
        if chosen.epoch_time_s_lower is not None and chosen.epoch_time_s_upper is not None:
            low, high = time_words(chosen.epoch_time_s_lower), time_words(chosen.epoch_time_s_upper)
            text += f" ({recommendation.level:.0%} interval {low} to {high})"
    return f"{text}, objective `{recommendation.objective}`."


def curve_lines(recommendation: Recommendation) -> list[str]:
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
    aimed = _to_target(recommendation)
    more = [*(["to target"] if aimed else []), *(["cost"] if priced else [])]
    header = ["batch", "step", "epoch", "memory of a device", *more, "fits"]
    lines = [table_row(header), f"|{'---:|' * len(header)}"]
    for point in shown:
        cells = _cells(point, priced=priced, aimed=aimed)
        if point == recommendation.choice:
            cells = [f"**{cell}**" if cell else "" for cell in cells]
        lines.append(table_row(cells))
    return lines


def table_row(cells: Sequence[str]) -> str:
    """A row of a Markdown table; MLflow draws its cells without any room between them."""
    return "".join(f"| {cell}&ensp;" for cell in cells) + "|"


def _to_target(recommendation: Recommendation) -> bool:
    """Whether the decision counts the epochs to a target."""
    return recommendation.objective.endswith("_to_target")


def _cells(point: CurvePoint, *, priced: bool, aimed: bool) -> list[str]:
    """One row of the table."""
    cells = [f"{point.global_batch_size:,}"]
    cells += [time_words(point.step_time_s), time_words(point.epoch_time_s)]
    cells += ["" if point.peak_memory_bytes is None else f"{point.peak_memory_bytes / 1e9:.2f} GB"]
    if aimed:
        cells += [time_words(point.time_to_target_s)]
    if priced:
        cells += ["" if point.cost_usd is None else f"${point.cost_usd:.3g}"]
    fits = "yes" if point.fits else "no"
    return [*cells, f"{fits}, extrapolated" if point.extrapolated else fits]


def counts(table: ProfileTable) -> str:
    """How many trials ran, and what became of the others."""
    ran = len(table.ok)
    text = f"{ran} measured trial{'s' if ran != 1 else ''}"
    for status, words in (("oom", "out of memory"), ("failed", "failed")):
        number = sum(row.status == status for row in table.measurements)
        text += f", {number} {words}" if number else ""
    return text


def time_words(seconds: float | None) -> str:
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
