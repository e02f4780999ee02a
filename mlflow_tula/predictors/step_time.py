"""Step time: measurements become the parameters of `step_time_formulas.step_time`.

The form is the one that the rows can identify: the compute curve from the fewest ranks measured,
then the levels of synchronisation on more, or the microbenchmark's, or an honest guess.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mlflow_tula.errors import SchemaError, TableError
from mlflow_tula.predictors import (
    communication,
    compute_curve,
    contention,
    link,
    step_time_words,
    sync_level,
)
from mlflow_tula.predictors import step_time_formulas as formulas
from mlflow_tula.predictors.formulas import student_quantile
from mlflow_tula.predictors.step_time_rows import (
    Cell,
    backward_shares,
    base_setup,
    data_line,
    make_cells,
    optimizer_time,
)
from mlflow_tula.table import Measurement, ProfileTable

Array = NDArray[np.float64]

NOISE_SD = 0.025
BRIDGE_SD = 0.045
BEYOND_SD = 0.07
CONTENTION_SD = 0.05
FEWER_SD = 0.5
DEGREES = 6.0
"""Errors of log step time on public tables (docs/method.md): of a repetition, per root of a
doubling between probes, per doubling beyond them, per doubling of a node's devices from a measured
count, per halving of the ranks below the measured; and the degrees of
freedom of Student's t that their tails ask for."""
SCALE_ROWS = 6.0
LEAST_SCALE, MOST_SCALE = 0.85, 4.0
"""Left-out rows scale the interval; the public tables count as this many of them."""
MAX_LEFT_OUT = 20
TIERS: tuple[tuple[sync_level.Counts, str], ...] = (
    ("devices", "intra_node"),
    ("nodes", "inter_node"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimePredictor:
    """Seconds per optimizer step.

        step(b, n, d, k) = max(k data(b), (k - 1) micro(b, d) + overlap(compute(b, d), sync(n, d)))

    `params` are what `step_time_formulas` reads, `form` says which form the rows identified and
    why. `leave_one_out_mape` and `leave_one_out_coverage` are fractions, None below three
    configurations. Valid between the probes and up to 4x beyond; the interval widens with each
    doubling outside.
    """

    params: dict[str, Any]
    form: str = ""
    leave_one_out_mape: float | None = None
    leave_one_out_coverage: float | None = None
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            **self.params,
            "form": self.form,
            "leave_one_out_mape": self.leave_one_out_mape,
            "leave_one_out_coverage": self.leave_one_out_coverage,
            "warnings": list(self.warnings),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; a trial prediction finds what is missing or no number."""
        if not isinstance(data, Mapping):
            raise SchemaError(f"step_time must be a JSON object, not {type(data).__name__}")
        own = ("form", "leave_one_out_mape", "leave_one_out_coverage", "warnings")
        params = {key: data[key] for key in data if key not in own}
        one = np.ones(1)
        try:
            answer = formulas.step_time(params, 32 * one, one, one, one)
            sound = all(math.isfinite(part[0]) and part[0] > 0 for part in answer)
            formulas.is_extrapolated(params, one, one, one)
            formulas.step_time(params, 32 * one, 64 * one, 64 * one, one)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise SchemaError(f"step_time is damaged: {type(error).__name__}: {error}") from error
        if not sound:
            raise SchemaError("step_time is damaged: it predicts no positive time")
        return cls(
            params=params,
            form=str(data.get("form", "")),
            leave_one_out_mape=data.get("leave_one_out_mape"),
            leave_one_out_coverage=data.get("leave_one_out_coverage"),
            warnings=tuple(str(text) for text in data.get("warnings", ())),
        )


def fit(table: ProfileTable) -> StepTimePredictor:
    """Fit the rows that gave a step time, and the links where they were measured.

    Raises:
        TableError: there is no such row.
    """
    rows = table.ok
    if not rows:
        raise TableError("no row of status ok: nothing to fit; measure a smaller batch size")
    if table.workload.strategy == "fsdp":
        rows = tuple(_one_pass(row) for row in rows)
    cells = make_cells(rows)
    links = {scope: link.fit(table.links, scope) for scope in ("intra_node", "inter_node")}
    fixed = {
        # the bytes of an all-reduce that costs as much as the step's communication
        "gradient_bytes": communication.all_reduces(table)
        * float(table.workload.gradient_bytes or 0.0),
        "links": {name: None if one is None else one.to_dict() for name, one in links.items()},
        "optimizer_s": optimizer_time(rows, cells),
        "data": data_line(rows),
        "backward": backward_shares(rows),
        "messages": communication.messages(table),
        "pair_factor": communication.pair_factor(table),
        "sync_every_pass": table.workload.strategy == "fsdp",
        # only ranks of one node on a CPU compute with the same cores
        "shared_cores": table.hardware.device_type == "cpu",
    }
    params = _fit_cells(cells, fixed)
    errors, scores = _left_out(cells, fixed)
    params["spread"]["scale"] = _scale(scores)
    half = student_quantile(0.95, DEGREES)
    scale = params["spread"]["scale"]
    return StepTimePredictor(
        params=params,
        form=step_time_words.describe(params, cells, rows),
        leave_one_out_mape=float(np.mean(np.abs(np.expm1(errors)))) if len(errors) else None,
        leave_one_out_coverage=(
            float(np.mean(np.abs(scores) <= half * scale)) if len(scores) else None
        ),
        warnings=tuple(step_time_words.warn(params, cells)),
    )


def _one_pass(row: Measurement) -> Measurement:
    """A step of FSDP with one pass instead of several: each of them communicates alike."""
    if row.accumulation_steps == 1 or row.step_time_s is None:
        return row
    once = min(row.optimizer_time_s or 0.0, 0.9 * row.step_time_s)
    seconds = once + (row.step_time_s - once) / row.accumulation_steps
    return replace(row, accumulation_steps=1, step_time_s=seconds, sync_time_s=None)


def _fit_cells(cells: Sequence[Cell], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters, with the interval not yet scaled."""
    nodes, devices = base_setup(cells)
    ranks = nodes * devices
    # rows on fewer ranks than the base are too few to be a curve of their own
    base = [c for c in cells if (c.nodes, c.devices) == (nodes, devices) or c.ranks < ranks]
    rest = [c for c in cells if c not in base]
    busy = devices
    known_sync = ranks > 1 and all(c.sync is not None for c in base if c.ranks > 1)
    if known_sync:
        rest = [c for c in cells if c.ranks > 1]
        base = [
            replace(c, time=max(c.time - (c.sync or 0.0), 0.1 * c.time)) if c.ranks > 1 else c
            for c in base
        ]
        nodes, devices = 1, 1
    points = _points(base, float(fixed["optimizer_s"]))
    curve = compute_curve.fit_curve(points)
    params: dict[str, Any] = {
        "base": {"nodes": nodes, "devices_per_node": devices, "sync_subtracted": known_sync},
        "compute": curve,
        "contention": contention.summary(None, busy),
        "knots": sorted({float(cell.batch) for cell in cells}),
        "range": _range(cells),
        "spread": {
            "noise_sd": _noise(points, curve, cells),
            "bridge_sd": BRIDGE_SD,
            "beyond_sd": BEYOND_SD,
            "contention_sd": CONTENTION_SD,
            "fewer_sd": FEWER_SD,
            "scale": 1.0,
            "degrees": DEGREES,
        },
        **{name: fixed[name] for name in ("optimizer_s", "data", "gradient_bytes", "backward")},
        "sync_every_pass": fixed["sync_every_pass"],
    }
    usual, least = _usual_compute(params), 0.0
    params["contention"] = _contention(rest, params, fixed)
    for counts, name in TIERS:
        here = [c for c in rest if (c.nodes > nodes) == (counts == "nodes")]
        tier = _empty_tier(counts, params, fixed)
        if here:
            tier = sync_level.fit_tier(tier, _sync_rows(here, params, tier))
            most = np.array([float(max(cell.devices for cell in here))])
            least = float(np.median(formulas.sync_time(tier, np.full(1, float(nodes)), most)))
        else:
            tier = sync_level.guess_tier(tier, usual, least)
        params[name] = tier
    return params


def _contention(
    rest: Sequence[Cell], params: Mapping[str, Any], fixed: Mapping[str, Any]
) -> dict[str, Any]:
    """How compute slows with a node's busy devices: recorded parts tell, else the levels do."""
    shared, devices = bool(fixed["shared_cores"]), int(params["contention"]["devices"])
    other = [cell for cell in rest if cell.devices != devices]
    if any(cell.sync is not None for cell in other):
        found = contention.from_parts(shared, _busy_rows(other, params))
        return contention.summary(found, devices)
    base = params["base"]
    within = [cell for cell in other if cell.nodes <= base["nodes"]]
    if not within:
        return contention.summary(contention.prior(True) if shared else None, devices)
    before, parts, rows = contention.prior(shared), _busy_rows(within, params), []
    passes = np.array([cell.accumulation for cell in within], float)
    plain = _sync_rows(within, params, _empty_tier("devices", params, fixed))
    for slope, floor in zip(before.slopes, before.floors, strict=True):
        slower = np.exp(floor * parts.log_ratio)
        there = parts.floor * slower + parts.slope * np.exp(slope * parts.log_ratio)
        extra = (passes - 1.0) * np.maximum(there - params["optimizer_s"] * slower, 0.0)
        rows.append(replace(plain, alone=there, extra=extra))
    tier = _empty_tier("devices", params, fixed)
    scores = sync_level.score_rows(tier, rows, _usual_compute(params) if shared else None)
    return contention.summary(replace(before, scores=before.scores + scores), devices)


def _busy_rows(cells: Sequence[Cell], params: Mapping[str, Any]) -> contention.BusyRows:
    """Recorded compute of trials on other device counts, as one pass each, beside the curve's."""
    batch, devices, passes, times, weights = (
        np.array([getattr(cell, name) for cell in cells], float)
        for name in ("batch", "devices", "accumulation", "time", "weight")
    )
    sync = np.array([math.nan if cell.sync is None else cell.sync for cell in cells])
    alone, _ = formulas.compute_time(params["compute"], batch)
    floor, slope = formulas.compute_parts(params["compute"], alone)
    busy = np.maximum(times - sync, 0.1 * times)
    return contention.BusyRows(
        floor=floor,
        slope=slope,
        log_ratio=formulas.log_sharing(params, devices),
        busy=(busy + (passes - 1.0) * params["optimizer_s"]) / passes,
        weights=weights,
    )


def _noise(points: compute_curve.Points, curve: Mapping[str, Any], cells: Sequence[Cell]) -> float:
    """Relative spread of one more trial: of repeated ones, and of what no rising curve can meet."""
    rest = np.log(points.times / formulas.compute_time(curve, points.sizes)[0])
    repeats = [cell.apart for cell in cells if cell.apart is not None]
    seen = max(NOISE_SD, float(np.median(repeats)) if repeats else 0.0)
    return math.hypot(seen, 1.4826 * float(np.median(np.abs(rest))))


def _points(base: Sequence[Cell], optimizer_s: float) -> compute_curve.Points:
    """The compute curve's points: one a local batch size, as a step without accumulation."""
    times: dict[float, list[tuple[float, float]]] = {}
    for cell in base:
        k = cell.accumulation
        times.setdefault(cell.batch, []).append(
            ((cell.time + (k - 1) * optimizer_s) / k, cell.weight)
        )
    sizes = sorted(times)
    return compute_curve.Points(
        sizes=np.array(sizes, float),
        times=np.array([np.median([time for time, _ in times[size]]) for size in sizes]),
        weights=np.array([np.mean([weight for _, weight in times[size]]) for size in sizes]),
    )


def _usual_compute(params: Mapping[str, Any]) -> float:
    """Seconds of compute at the middle size."""
    middle = np.array([np.median(params["compute"]["sizes"])])
    return float(formulas.compute_time(params["compute"], middle)[0][0])


def _empty_tier(
    counts: sync_level.Counts, params: Mapping[str, Any], fixed: Mapping[str, Any]
) -> dict[str, Any]:
    """A tier with the microbenchmark's law, where that and the gradients' bytes are known."""
    base, links = params["base"], fixed["links"]
    tier = sync_level.empty_tier(
        counts,
        base["nodes"],
        base["devices_per_node"],
        shared_cores=fixed["shared_cores"],
        hiding_known=fixed["backward"] is not None,
    )
    tier["messages"] = fixed["messages"]
    if fixed["pair_factor"] != 1.0:
        tier["pair_factor"] = fixed["pair_factor"]
    own = "inter_node" if counts == "nodes" else "intra_node"
    if links[own] is None or not fixed["gradient_bytes"]:
        return tier
    used = links if own == "inter_node" else {"intra_node": links[own]}
    return {**tier, "links": used, "gradient_bytes": fixed["gradient_bytes"]}


def _sync_rows(
    cells: Sequence[Cell], params: Mapping[str, Any], tier: Mapping[str, Any]
) -> sync_level.SyncRows:
    """Rows of a tier with their compute, as slow as it is there."""
    batch, nodes, devices, passes, times, weights = (
        np.array([getattr(cell, name) for cell in cells], float)
        for name in ("batch", "nodes", "devices", "accumulation", "time", "weight")
    )
    alone, micro, _ = formulas.contended(params, batch, devices)
    return sync_level.SyncRows(
        batch=batch,
        nodes=nodes,
        devices=devices,
        times=times,
        weights=weights,
        alone=alone,
        extra=(passes - 1.0) * micro,
        hidden=formulas.backward_share(params, batch),
        compressed=np.array([cell.compressed for cell in cells], bool),
        busy=formulas.busy_time(tier, nodes, devices),
    )


def _range(cells: Sequence[Cell]) -> dict[str, Any]:
    """What was measured; beyond it an answer is marked as extrapolated.

    `setups` lists nodes, devices per node, smallest and largest local batch size.
    """
    setups: dict[tuple[int, int], list[int]] = {}
    for cell in cells:
        setups.setdefault((cell.nodes, cell.devices), []).append(round(cell.batch))
    return {
        "setups": [[*key, min(sizes), max(sizes)] for key, sizes in sorted(setups.items())],
        "smallest_local_batch_size": round(min(cell.batch for cell in cells)),
        "largest_local_batch_size": round(max(cell.batch for cell in cells)),
        "device_counts": sorted({cell.devices for cell in cells}),
        "most_nodes": max(cell.nodes for cell in cells),
        "most_devices_per_node": max(cell.devices for cell in cells),
        "smallest_world_size": min(cell.ranks for cell in cells),
        "largest_world_size": max(cell.ranks for cell in cells),
    }


def _left_out(cells: Sequence[Cell], fixed: Mapping[str, Any]) -> tuple[Array, Array]:
    """Log errors of left-out configurations, and those errors over their foretold deviation."""
    if len(cells) < 3:
        return np.zeros(0), np.zeros(0)
    errors, scores = [], []
    chosen = np.unique(np.linspace(0, len(cells) - 1, MAX_LEFT_OUT).round().astype(int))
    for index in chosen:
        cell = cells[index]
        params = _fit_cells([*cells[:index], *cells[index + 1 :]], fixed)
        setup = [
            np.array([value], float)
            for value in (cell.batch, cell.nodes, cell.devices, cell.accumulation)
        ]
        sent = "bf16" if cell.compressed else None
        answer = formulas.step_time(params, *setup, level=0.9, gradient_compression=sent)
        value, lower, upper = (part[0] for part in answer)
        errors.append(math.log(value / cell.time))
        side = value / lower if errors[-1] > 0 else upper / value
        scores.append(errors[-1] / (math.log(side) / student_quantile(0.95, DEGREES)))
    return np.array(errors), np.array(scores)


def _scale(scores: Array) -> float:
    """How much wider (or narrower) this table's intervals are than the public tables'."""
    # a few wild rows tell of themselves, not of all: they count as three deviations
    squares = float(np.sum(np.minimum(scores**2, 9.0)))
    scale = math.sqrt((SCALE_ROWS + squares) / (SCALE_ROWS + len(scores)))
    return min(max(scale, LEAST_SCALE), MOST_SCALE)
