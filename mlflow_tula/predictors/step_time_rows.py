"""Rows of a table made ready for the step-time fit: repeated trials as one, and what is constant.

A cell is one configuration; its weight says how well its time is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mlflow_tula.predictors.compute_curve import MODEL_SD
from mlflow_tula.table import Measurement

MAX_SIZES = 64
"""More distinct sizes than that say no more about a curve, and cost a larger document."""
MOST_BACKWARD = 0.95
"""A share of compute above that is a misreading: every step has a forward pass and an update."""
LEAST_SE = 0.02
"""Relative error of one trial whose spread over steps was not recorded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """The repeated trials of one configuration, as one."""

    batch: float
    nodes: int
    devices: int
    accumulation: int
    time: float
    weight: float
    sync: float | None
    apart: float | None
    """Relative spread of its repeated trials; None without any."""
    compressed: bool = False

    @property
    def ranks(self) -> int:
        """Data-parallel processes."""
        return self.nodes * self.devices


def make_cells(rows: Sequence[Measurement]) -> list[Cell]:
    """Repeated trials as one: the median, weighted by how well it is known."""
    groups: dict[tuple[int, int, int, int, bool], list[Measurement]] = {}
    for row in rows:
        compressed = row.gradient_compression is not None
        key = (row.nodes, row.devices_per_node, row.accumulation_steps, row.local_batch_size)
        groups.setdefault((*key, compressed), []).append(row)
    made = []
    for (nodes, devices, accumulation, batch, compressed), group in sorted(groups.items()):
        times = np.array([row.step_time_s for row in group], float)
        middle = float(np.median(times))
        apart = 1.4826 * float(np.median(np.abs(times / middle - 1.0)))
        own = [_standard_error(row) for row in group]
        error = math.hypot(apart, float(np.median(own))) / math.sqrt(len(group))
        syncs = [row.sync_time_s for row in group if row.sync_time_s is not None]
        made.append(
            Cell(
                batch=float(batch),
                nodes=nodes,
                devices=devices,
                accumulation=accumulation,
                time=middle,
                weight=min((MODEL_SD**2 + LEAST_SE**2) / (MODEL_SD**2 + error**2), 1.0),
                sync=float(np.median(syncs)) if syncs else None,
                apart=apart if len(group) > 1 else None,
                compressed=compressed,
            )
        )
    return _thinned(made)


def _thinned(cells: list[Cell]) -> list[Cell]:
    """At most MAX_SIZES sizes a setup: neighbours between the ends become their geometric mean."""
    setups: dict[tuple[int, int, int, bool], list[Cell]] = {}
    for cell in cells:
        key = (cell.nodes, cell.devices, cell.accumulation, cell.compressed)
        setups.setdefault(key, []).append(cell)
    kept: list[Cell] = []
    for group in setups.values():
        if len(group) <= MAX_SIZES:
            kept += group
            continue
        kept.append(group[0])
        for part in np.array_split(np.arange(1, len(group) - 1), MAX_SIZES - 2):
            chunk = [group[index] for index in part]
            kept.append(
                replace(
                    chunk[len(chunk) // 2],
                    batch=math.exp(np.mean([math.log(cell.batch) for cell in chunk])),
                    time=math.exp(np.mean([math.log(cell.time) for cell in chunk])),
                    weight=1.0,
                )
            )
        kept.append(group[-1])
    return kept


def _standard_error(row: Measurement) -> float:
    """Relative error of one trial's median: spread over root of steps."""
    if row.step_time_std_s is None or row.step_time_s is None:
        return LEAST_SE
    return row.step_time_std_s / row.step_time_s / math.sqrt(max(row.num_steps or 1, 1))


def optimizer_time(rows: Sequence[Measurement], cells: Sequence[Cell]) -> float:
    """Seconds of a step that accumulation does not repeat: measured, or told by several k."""
    most = 0.9 * min(cell.time / cell.accumulation for cell in cells)
    known = [row.optimizer_time_s for row in rows if row.optimizer_time_s is not None]
    if known:
        return float(min(np.median(known), most))
    once = {(c.nodes, c.devices, c.batch): c.time for c in cells if c.accumulation == 1}
    found = [
        (cell.accumulation * once[key] - cell.time) / (cell.accumulation - 1)
        for cell in cells
        if cell.accumulation > 1
        and (key := (cell.nodes, cell.devices, cell.batch)) in once
        and cell.nodes * cell.devices == 1
    ]
    return float(np.clip(np.median(found), 0.0, most)) if found else 0.0


def backward_shares(rows: Sequence[Measurement]) -> dict[str, list[float]] | None:
    """The backward pass's part of a step less its synchronisation, by local batch size.

    None where no row tells it. Of accumulated passes it is the share of one pass: in the last one
    synchronisation hides.
    """
    found: dict[int, list[float]] = {}
    for row in rows:
        if row.backward_time_s is None or row.step_time_s is None:
            continue
        passes = row.step_time_s - (row.sync_time_s or 0.0)
        once = passes + (row.accumulation_steps - 1) * (row.optimizer_time_s or 0.0)
        share = row.backward_time_s / max(once, row.backward_time_s, 1e-12)
        found.setdefault(row.local_batch_size, []).append(min(share, MOST_BACKWARD))
    if not found:
        return None
    sizes = sorted(found)
    return {
        "sizes": [float(size) for size in sizes],
        "shares": [float(np.median(found[size])) for size in sizes],
    }


def data_line(rows: Sequence[Measurement]) -> dict[str, float] | None:
    """Seconds to load one local batch, as a line; None where it was not measured."""
    from scipy.optimize import nnls

    # less than a millionth of a step is no loading that could ever bound it
    known = [row for row in rows if (row.data_time_s or 0.0) > 1e-6 * (row.step_time_s or 0.0)]
    if not known:
        return None
    batch = np.array([row.local_batch_size for row in known], float)
    passes = np.array([row.accumulation_steps for row in known], float)
    times = np.array([row.data_time_s for row in known], float) / passes
    design = np.c_[np.ones_like(batch), batch] / times[:, None]
    scale = design.max(axis=0)
    found, _ = nnls(design / scale, np.ones_like(times))
    offset, slope = (float(value) for value in found / scale)
    # loading takes no longer than the steps that it was measured in
    steps = np.array([row.step_time_s for row in known], float) / passes
    share = min(1.0, float(np.min(steps / (offset + slope * batch))))
    return {"offset_s": share * offset, "slope_s": share * slope}


def base_setup(cells: Sequence[Cell]) -> tuple[int, int]:
    """(nodes, devices) whose rows give the compute curve: few ranks, but at least two sizes."""
    sizes: dict[tuple[int, int], set[float]] = {}
    for cell in cells:
        sizes.setdefault((cell.nodes, cell.devices), set()).add(cell.batch)
    enough = min(2, max(len(found) for found in sizes.values()))
    usable = [setup for setup, found in sizes.items() if len(found) >= enough]
    return min(usable, key=lambda setup: (setup[0] * setup[1], setup[0]))
