"""What a fit says about itself: the form, why it was chosen, and what it could not identify."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mlflow_tula.predictors import step_time_formulas as formulas
from mlflow_tula.predictors.step_time_rows import Cell
from mlflow_tula.table import Measurement

FEW_SIZES, FEW_NODE_COUNTS = 3, 3
FALLING, OUTLYING = 0.1, 0.25
"""Scatter that is said, and a distance from the curve (of the logarithm) that is."""

UNTOLD = 0.05
"""Variance of contention's exponent that is said."""


def describe(params: Mapping[str, Any], cells: Sequence[Cell], rows: Sequence[Measurement]) -> str:
    """The form in sentences: compute, synchronisation, accumulation, data."""
    said = [_compute(params)]
    said += [_tier(params[name], name) for name in ("intra_node", "inter_node")]
    said.append(_contention(params))
    if any(cell.accumulation > 1 for cell in cells):
        said.append("accumulated passes repeat compute, not synchronisation or the optimizer")
    share = data_share(rows)
    if params["data"] is not None and share is not None:
        bound = "input-bound" if share > 0.5 else "not input-bound"
        said.append(f"loading data takes {100 * share:.0f} % of a step ({bound})")
    return "; ".join(text for text in said if text)


def _contention(params: Mapping[str, Any]) -> str:
    """How compute slows where the devices of a node share."""
    slope, floor = (
        100.0 * (2.0 ** params["contention"][name] - 1.0) for name in ("slope", "floor")
    )
    if slope < 0.5:
        return ""
    text = f"compute slows by {slope:.0f} % per doubling of a node's devices"
    if floor < slope - 0.5:
        text += f", its floor by {floor:.0f} %"
    return text


def data_share(rows: Sequence[Measurement]) -> float | None:
    """Median share of a step that loading its data takes; None where it was not measured."""
    shares = [
        row.data_time_s / row.step_time_s for row in rows if row.data_time_s and row.step_time_s
    ]
    return float(np.median(shares)) if shares else None


def _compute(params: Mapping[str, Any]) -> str:
    """The compute curve: how many forms, where the floor lies, what a sample costs."""
    curve = params["compute"]
    if len(curve["sizes"]) == 1:
        return "compute: one batch size, so that floor and slope cannot be told apart"
    weights = np.asarray(curve["weights"], float)
    powers = np.asarray(curve["powers"], float)
    line = float(weights[powers == 1.0].sum())
    offset = np.asarray(curve["offsets_s"], float)
    floor = np.asarray(curve["floors_s"], float)
    level = float(weights @ (offset + floor))
    kind = (
        "the sizes lie on a line"
        if line > 0.9
        else "the sizes bend from a floor to a line"
        if line < 0.1
        else "line or bent line, the sizes cannot tell"
    )
    text = (
        f"compute: {len(weights)} pooled floor-and-line forms through {len(curve['sizes'])} sizes "
        f"({kind}), floor {1e3 * level:.3g} ms"
    )
    if params["base"]["sync_subtracted"]:
        text += ", from steps less their synchronisation (no step on one device was measured)"
    return text


def _tier(tier: Mapping[str, Any], name: str) -> str:
    """One tier of synchronisation: where its levels and its growth come from."""
    where = "within a node" if name == "intra_node" else "across nodes"
    law = "the measured link's latency and bandwidth" if tier["links"] else "a pool of growth laws"
    if not tier["measured"]:
        if tier["links"]:
            return f"synchronisation {where}: {law}, no step measured there"
        return ""
    count = len(tier["log2_ranks"])
    powers = np.asarray(tier["powers"], float)
    power = float(np.asarray(tier["weights"], float) @ powers)
    hidden = "hardly hidden" if power < 1.5 else "partly hidden" if power < 3 else "well hidden"
    if count == 1 and not tier["links"]:
        law = "one level, which is held nearly constant beyond because growth needs two"
    else:
        law = f"{count} measured level{'s' if count > 1 else ''}, then {law}"
    return f"synchronisation {where}: {hidden} by compute (power {power:.1f}); {law}"


def warn(params: Mapping[str, Any], cells: Sequence[Cell]) -> list[str]:
    """What the rows could not identify, in sentences that name the way out."""
    said = []
    sizes = len(params["compute"]["sizes"])
    if sizes < FEW_SIZES:
        said.append(
            f"step time rests on {sizes} batch size{'s' if sizes > 1 else ''}: measure at least "
            f"{FEW_SIZES} to tell the floor from the slope"
        )
    if params["spread"]["noise_sd"] > FALLING:
        said.append(
            "step times scatter or fall as the batch grows: the intervals are wide; measure again "
            "on a quiet machine"
        )
    else:
        said += _outliers(params, cells)
    known = params["contention"]
    shared = {cell.batch for cell in cells if cell.devices != known["devices"]}
    if len(shared) == 1 and known["covariance"][0] > UNTOLD:
        said.append(
            "one batch size on several ranks of a node does not tell how they slow each other: "
            "answers for other sizes there are wide; measure a second, four times as large or small"
        )
    node_counts = len({cell.nodes for cell in cells})
    if 1 < node_counts < FEW_NODE_COUNTS and not params["inter_node"]["links"]:
        said.append(
            f"{node_counts} node counts do not show how synchronisation grows: answers for more "
            "nodes are wide; measure a third, or the link"
        )
    if params["base"]["nodes"] * params["base"]["devices_per_node"] > 1:
        said.append("nothing was measured on one device: answers for fewer ranks are guesses")
    return said


def _outliers(params: Mapping[str, Any], cells: Sequence[Cell]) -> list[str]:
    """The sizes that no form through the others explains, each with the way out."""
    base = params["base"]
    if base["sync_subtracted"]:
        return []
    here = [
        cell
        for cell in cells
        if (cell.nodes, cell.devices, cell.accumulation)
        == (base["nodes"], base["devices_per_node"], 1)
    ]
    if not here:
        return []
    curve, _ = formulas.compute_time(params["compute"], np.array([cell.batch for cell in here]))
    return [
        f"local batch size {cell.batch:g} took {cell.time:.3g} s where the others say "
        f"{expected:.3g} s: it was set aside; measure it again"
        for cell, expected in zip(here, curve.tolist(), strict=True)
        if abs(np.log(cell.time / expected)) > OUTLYING
    ]
