"""What people and scripts read: rich text on a terminal, plain text in a pipe, JSON on request."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from mlflow_tula.predictors.bundle import FitReport
    from mlflow_tula.recommend import Recommendation
    from mlflow_tula.table import ProfileTable


def print_json(document: Any) -> None:
    """One JSON document on stdout, keys in the order given."""
    click.echo(json.dumps(document, indent=2, allow_nan=False))


def print_lines(title: str, lines: Iterable[str]) -> None:
    """A titled block, wrapped to the terminal's width."""
    import textwrap

    click.echo(f"{title}:")
    click.echo(textwrap.fill(", ".join(lines), 96, initial_indent="  ", subsequent_indent="  "))


def note(text: str) -> None:
    """A line for people, on stderr, so that `--json` stays one document."""
    click.echo(text, err=True)


def print_measurements(table: ProfileTable) -> None:
    """The measured rows as a table, in the order in which they were probed."""
    from rich.console import Console
    from rich.table import Table

    grid = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("batch", "ranks", "step", "data", "compute", "sync", "optimizer", "memory", ""):
        grid.add_column(name, justify="left" if name == "" else "right")
    for row in table.measurements:
        grid.add_row(
            str(row.local_batch_size),
            str(row.world_size),
            seconds(row.step_time_s),
            seconds(row.data_time_s),
            seconds(row.compute_time_s),
            seconds(row.sync_time_s),
            seconds(row.optimizer_time_s),
            num_bytes(row.peak_memory_bytes),
            "" if row.status == "ok" else f"{row.status}: {row.reason}",
        )
    Console(width=None if sys.stdout.isatty() else 110, highlight=False).print(grid)


def print_report(report: FitReport) -> None:
    """Forms, errors and warnings of a fit."""
    click.echo(str(report))


def print_recommendation(choice: Recommendation) -> None:
    """The choice, the curve around it, the reasons and the warnings."""
    click.echo(str(choice))


def seconds(value: float | None) -> str:
    """Three significant digits with a readable unit; empty for None."""
    if value is None:
        return ""
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    return f"{value / 60:.3g} min"


def num_bytes(value: float | None) -> str:
    """MiB or GiB; empty for None."""
    if value is None:
        return ""
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"
