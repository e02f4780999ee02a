"""A comparison as Markdown and as plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlflow_tula.comparing.summary import MethodRow, Settings, not_worse


def results_table(rows: Sequence[MethodRow], *, batch_size: int | None = None) -> str:
    """One line a method: accuracy, gap recovered, training loss, accuracy at equal loss, time."""
    reference = rows[0]
    lines = [
        "| method | batch | test accuracy % | gap recovered % | train loss "
        "| accuracy at equal loss % | CPU s | settings |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    shown = [row for row in rows[1:] if batch_size in (None, row.batch_size)]
    shown.sort(key=lambda row: (row.batch_size, row.mean))
    for row in (reference, *shown):
        lines.append(
            f"| {row.method} | {row.batch_size} | {100 * row.mean:.2f} ± {100 * row.std:.2f} | "
            f"{_recovered(row)} | {_number(row.train_loss, '.4f')}{_diverged(row)} | "
            f"{_percent(row.at_equal_loss)} | {row.cpu_time_s:.1f} | {words(row.settings)} |"
        )
    return "\n".join(lines)


def table_one(rows: Sequence[MethodRow]) -> str:
    """The layout of the paper's Table I: methods down, batch sizes across."""
    reference = rows[0]
    sizes = sorted({row.batch_size for row in rows[1:]})
    methods = list(dict.fromkeys(row.method for row in rows[1:]))
    cells = {(row.method, row.batch_size): f"{100 * row.mean:.2f}" for row in rows[1:]}
    head = [f"| method | {' | '.join(map(str, sizes))} |", f"|---|{'--:|' * len(sizes)}"]
    body = [
        f"| {method} | {' | '.join(cells.get((method, size), '') for size in sizes)} |"
        for method in methods
    ]
    last = f"\nBatch {reference.batch_size}, plain: {100 * reference.mean:.2f} %."
    return "\n".join([*head, *body, last])


def verdicts(rows: Sequence[MethodRow], method: str = "auto") -> list[str]:
    """Per batch size: what the method recovers, and which rivals it does not match."""
    said = []
    for row in rows[1:]:
        if row.method != method:
            continue
        rivals = [r for r in rows[1:] if r.batch_size == row.batch_size and r.method != method]
        ahead = [rival for rival in rivals if not not_worse(row, rival)]
        text = f"batch {row.batch_size}: {method} recovers {_recovered(row)} % of the gap"
        if ahead:
            better = ", ".join(f"{r.method} (+{100 * (r.mean - row.mean):.2f})" for r in ahead)
            text += f"; behind by more than one standard error: {better}"
        elif rivals:
            text += "; within one standard error of every rival or above it"
        said.append(text)
    return said


def row_numbers(row: MethodRow) -> dict[str, Any]:
    """A row as flat JSON."""
    return {
        "method": row.method,
        "batch_size": row.batch_size,
        "settings": dict(row.settings),
        "accuracy": row.mean,
        "accuracy_std": row.std,
        "accuracy_error": row.error,
        "accuracies": list(row.accuracies),
        "gap_recovered": row.recovered,
        "gap_recovered_error": row.recovered_error,
        "train_loss": row.train_loss,
        "accuracy_at_equal_loss": row.at_equal_loss,
        "cpu_time_s": row.cpu_time_s,
        "steps": row.steps,
        "diverged": row.diverged,
        "scaled_share": row.scaled_share,
    }


def words(settings: Settings) -> str:
    """Settings in a few words."""
    return ", ".join(f"{name} {_value(value)}" for name, value in settings) or "-"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return "(" + " ".join(map(_value, value)) + ")"
    return str(value)


def _recovered(row: MethodRow) -> str:
    if row.recovered is None:
        return ""
    return f"{100 * row.recovered:.0f} ± {100 * (row.recovered_error or 0.0):.0f}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f}"


def _diverged(row: MethodRow) -> str:
    return f" ({row.diverged} diverged)" if row.diverged else ""
