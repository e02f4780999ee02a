"""The rows that convergence is fitted from: read from a frame, checked, and merged by size."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mlflow_tula.documents import shown, shown_names
from mlflow_tula.errors import InvalidInputError, TableError
from mlflow_tula.specs import check_int, check_real
from mlflow_tula.table import MAX_ROWS, is_missing

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("global_batch_size", "epochs_to_target", "std", "runs_total", "runs_reached")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvergenceRow:
    """Epochs to the target at one global batch size: mean and spread over the runs that reached.

    `epochs_to_target` is None where no run did; `std` is None where it is not known.
    """

    global_batch_size: int
    epochs_to_target: float | None
    std: float | None
    runs_total: int
    runs_reached: int


def read_rows(frame: pd.DataFrame) -> list[ConvergenceRow]:
    """Check a frame, row by row.

    Raises:
        TableError: a bad column or value, by name and row.
    """
    if not hasattr(frame, "columns"):
        raise TableError(f"convergence needs a pandas DataFrame, not {type(frame).__name__}")
    names = [str(name) for name in frame.columns]
    for needed in COLUMNS[:2]:
        if needed not in names:
            near = difflib.get_close_matches(needed, names, n=1, cutoff=0.6)
            hint = f"rename {near[0]!r}?" if near else f"the frame has {shown_names(names)}"
            raise TableError(f"column {needed!r} is missing from the convergence frame: {hint}")
    doubled = [name for name in COLUMNS if names.count(name) > 1]
    if doubled:
        raise TableError(f"column {doubled[0]!r} stands twice; keep one of them")
    for name in names:
        near = difflib.get_close_matches(name, COLUMNS, n=1, cutoff=0.8)
        if near and name not in COLUMNS:
            raise TableError(f"column {shown(name)} is unknown: did you mean {near[0]!r}?")
    if not 0 < len(frame) <= MAX_ROWS:
        raise TableError(f"the convergence frame has {len(frame)} rows; give 1 to {MAX_ROWS}")
    columns = [name for name in COLUMNS if name in names]
    rows = []
    for number, record in enumerate(frame[columns].to_dict("records"), start=1):
        present = {str(k): v for k, v in record.items() if not is_missing(v)}
        try:
            rows.append(_read_row(present))
        except InvalidInputError as error:
            raise TableError(f"row {number}: {error}") from error
    return rows


def _read_row(cells: dict[str, Any]) -> ConvergenceRow:
    """One checked row; `cells` holds only what is present."""
    size = check_int("global_batch_size", cells.get("global_batch_size"))
    reached_cell, total_cell = cells.get("runs_reached"), cells.get("runs_total")
    reached = None if reached_cell is None else check_int("runs_reached", reached_cell, minimum=0)
    total = max(reached or 1, 1) if total_cell is None else check_int("runs_total", total_cell)
    epochs = cells.get("epochs_to_target")
    if epochs is not None:
        epochs = check_real("epochs_to_target", epochs, strict=True)
    if reached is None:
        reached = 0 if epochs is None else total
    if reached > total:
        raise InvalidInputError(f"runs_reached {reached} is more than runs_total {total}")
    if reached and epochs is None:
        raise InvalidInputError(
            f"epochs_to_target is missing, but runs_reached is {reached}: give the epochs, or 0 "
            "for a size that never reached the target"
        )
    std = cells.get("std")
    return ConvergenceRow(
        global_batch_size=size,
        epochs_to_target=epochs if reached else None,
        std=None if std is None else check_real("std", std),
        runs_total=total,
        runs_reached=reached,
    )


def merge(rows: Sequence[ConvergenceRow], max_sizes: int) -> list[ConvergenceRow]:
    """The rows that reached the target, one a size, in order of size.

    More sizes than `max_sizes` are merged with their neighbours, at the geometric mean size.
    """
    groups: dict[int, list[ConvergenceRow]] = {}
    for row in rows:
        if row.epochs_to_target is not None:
            groups.setdefault(row.global_batch_size, []).append(row)
    ordered = [_merge_one(groups[size]) for size in sorted(groups)]
    if len(ordered) <= max_sizes:
        return ordered
    parts = np.array_split(np.arange(len(ordered)), max_sizes)
    return [_merge_one([ordered[index] for index in part]) for part in parts]


def _merge_one(rows: list[ConvergenceRow]) -> ConvergenceRow:
    """Several rows as one: means weighted by runs, spread within and between them."""
    if len(rows) == 1:
        return rows[0]
    runs = np.array([row.runs_reached for row in rows], float)
    epochs = np.array([row.epochs_to_target for row in rows], float)
    mean = float(np.average(epochs, weights=runs))
    within = sum((row.runs_reached - 1) * row.std**2 for row in rows if row.std is not None)
    between = float(np.sum(runs * (epochs - mean) ** 2))
    sizes = [math.log(row.global_batch_size) for row in rows]
    return ConvergenceRow(
        global_batch_size=max(1, round(math.exp(float(np.average(sizes, weights=runs))))),
        epochs_to_target=mean,
        std=math.sqrt((within + between) / max(float(runs.sum()) - 1, 1)),
        runs_total=sum(row.runs_total for row in rows),
        runs_reached=int(runs.sum()),
    )
