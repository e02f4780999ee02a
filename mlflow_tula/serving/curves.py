"""What a page draws: the decision, its curves with bands, measured points, knee, limit and front.

Plain JSON types in SI units. A line is one cluster; along it only the batch changes. Where no
candidate meets the limits there is no decision but a sentence, and the curves stay.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mlflow_tula.errors import InvalidInputError, TulaWarning
from mlflow_tula.recommend import CurvePoint, Recommendation, recommend
from mlflow_tula.serving.champions import Champion
from mlflow_tula.serving.questions import Question
from mlflow_tula.serving.recommender import Decision
from mlflow_tula.specs import ClusterSpec
from mlflow_tula.table import ProfileTable

_DENSE = 33
_LINES = 8
_BEYOND = 4
_POINT = (
    "global_batch_size",
    "local_batch_size",
    "accumulation_steps",
    "step_time_s",
    "time_s",
    "time_s_lower",
    "time_s_upper",
    "peak_memory_bytes",
    "fits",
    "fits_reason",
    "extrapolated",
    "measured",
    "meets_limits",
    "on_pareto",
)
Cluster = tuple[int, int]


def view(champion: Champion, table: ProfileTable, question: Question) -> dict[str, Any]:
    """Everything that the page of a predictor shows for a question.

    Raises:
        InvalidInputError: a question that cannot be asked at all.
    """
    decision, error = None, ""
    try:
        choice = question.decide(champion.bundle)
        decision = Decision(champion=champion, question=question, recommendation=choice)
    except InvalidInputError as refused:
        error = str(refused)
        # Without the limits there is a curve to see by how much they are missed.
        choice = replace(question, deadline_s=None, budget_usd=None).decide(champion.bundle)
    chosen = (choice.nodes, choice.devices_per_node)
    shown = _shown(choice, chosen)
    return {
        "name": champion.name,
        "version": champion.version,
        "workload": champion.bundle.workload.slug,
        "hardware": champion.bundle.hardware.to_dict() | {"slug": champion.bundle.hardware.slug},
        "basis": choice.basis,
        "level": choice.level,
        "limit_bytes": question.memory_limit_bytes or champion.bundle.hardware.device_memory_bytes,
        "deadline_s": question.deadline_s,
        "budget_usd": question.budget_usd,
        "decision": None if decision is None else decision.row(),
        "error": error,
        "knee": _knee(champion, question, chosen),
        "lines": [_line(champion, question, choice, one) for one in shown],
        "points": [_point(question, choice, point) for point in choice.curve],
        "measured": _measured(table, question, shown),
    }


def _shown(choice: Recommendation, chosen: Cluster) -> list[Cluster]:
    """The clusters that get a line: the chosen one and its neighbours, the fewest devices first."""
    clusters = dict.fromkeys((point.nodes, point.devices_per_node) for point in choice.curve)
    ordered = sorted(clusters, key=lambda one: (one[0] * one[1], one))
    at = ordered.index(chosen)
    first = max(0, min(at - _LINES // 2, len(ordered) - _LINES))
    return ordered[first : first + _LINES]


def _knee(champion: Champion, question: Question, cluster: Cluster) -> int | None:
    """Where a larger batch stops paying on the chosen cluster, limits aside."""
    try:
        found = recommend(
            champion.bundle,
            cluster=ClusterSpec(nodes=cluster[0], devices_per_node=cluster[1]),
            memory_limit_bytes=question.memory_limit_bytes,
            dataset_size=question.dataset_size,
            knee_rule=question.knee_rule,
        )
    except InvalidInputError:
        return None
    return found.global_batch_size


def _line(
    champion: Champion, question: Question, choice: Recommendation, cluster: Cluster
) -> dict[str, Any]:
    """A smooth line with its band, along the batch sizes of one cluster."""
    import pandas as pd

    here = [p for p in choice.curve if (p.nodes, p.devices_per_node) == cluster]
    accumulation = here[0].accumulation_steps
    sizes = _spread([point.local_batch_size for point in here])
    frame = pd.DataFrame({"local_batch_size": sizes}).assign(
        nodes=cluster[0], devices_per_node=cluster[1], accumulation_steps=accumulation
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TulaWarning)
        out = champion.bundle.predict(
            frame,
            level=choice.level,
            memory_limit_bytes=question.memory_limit_bytes,
            dataset_size=question.dataset_size,
        )
    size = question.dataset_size or champion.bundle.workload.dataset_size
    factor = size / out["global_batch_size"] * (question.epochs or 1.0)
    prefix, scale = "step_time_s", factor
    if question.objective.endswith("_to_target"):
        prefix = "time_to_target_s"
        scale = size / out["global_batch_size"] * out["step_time_s"] / out["epoch_time_s"]
    world = cluster[0] * cluster[1]
    return {
        "nodes": cluster[0],
        "devices_per_node": cluster[1],
        "label": _label(world, cluster[0]),
        "chosen": cluster == (choice.nodes, choice.devices_per_node),
        "batch": out["global_batch_size"].tolist(),
        "local": out["local_batch_size"].tolist(),
        "extrapolated": out["extrapolated"].tolist(),
        **{
            f"time{end}": _numbers(out[f"{prefix}{end}"] * scale)
            for end in ("", "_lower", "_upper")
        },
        **{
            f"memory{end}": _numbers(out[f"peak_memory_bytes{end}"])
            for end in ("", "_lower", "_upper")
        },
    }


def _label(world: int, nodes: int) -> str:
    """A cluster in words."""
    text = f"{world} device{'s' if world > 1 else ''}"
    return f"{text} on {nodes} nodes" if nodes > 1 else text


def _spread(sizes: Sequence[int]) -> list[int]:
    """Whole numbers close enough for a smooth line, the candidates among them."""
    between = np.geomspace(min(sizes), max(sizes), _DENSE).round().astype(int).tolist()
    return sorted({*between, *sizes})


def _numbers(values: Iterable[float]) -> list[float | None]:
    """Floats for JSON, which has no NaN."""
    return [float(value) if math.isfinite(value) else None for value in values]


def _point(question: Question, choice: Recommendation, point: CurvePoint) -> dict[str, Any]:
    """A candidate as the page shows it."""
    cost = point.cost_to_target_usd if question.objective.endswith("to_target") else point.cost_usd
    device_hours = None if point.time_s is None else point.time_s * point.world_size / 3600
    return {
        **{name: getattr(point, name) for name in _POINT},
        "nodes": point.nodes,
        "devices_per_node": point.devices_per_node,
        "world_size": point.world_size,
        "cost_usd": cost,
        "device_hours": device_hours,
        "choice": point is choice.choice,
    }


def _measured(
    table: ProfileTable, question: Question, shown: Sequence[Cluster]
) -> list[dict[str, Any]]:
    """The rows of the profile on the clusters that are shown; time as the curves count it."""
    size = question.dataset_size or table.workload.dataset_size
    to_target = question.objective.endswith("_to_target")
    rows = []
    for row in table.measurements:
        if (row.nodes, row.devices_per_node) not in shown:
            continue
        seconds = None
        if row.step_time_s is not None and not to_target:
            seconds = row.step_time_s * size / row.global_batch_size * (question.epochs or 1.0)
        rows.append(
            {
                "nodes": row.nodes,
                "devices_per_node": row.devices_per_node,
                "accumulation_steps": row.accumulation_steps,
                "global_batch_size": row.global_batch_size,
                "local_batch_size": row.local_batch_size,
                "step_time_s": row.step_time_s,
                "time_s": seconds,
                "peak_memory_bytes": row.peak_memory_bytes,
                "status": row.status,
            }
        )
    return rows


def controls(champion: Champion, table: ProfileTable) -> dict[str, Any]:
    """What the page lets a person set, and within which bounds.

    The longest and the shortest deadline that say anything come from the predictions themselves.
    """
    hardware = champion.bundle.hardware
    devices = sorted({row.devices_per_node for row in table.measurements} | {1})
    possible = sorted(
        {2**k for k in range(14) if 2**k <= hardware.devices_per_node}
        | {hardware.devices_per_node, *devices}
    )
    measured_nodes = max((row.nodes for row in table.measurements), default=1)
    return {
        "objectives": _objectives(champion),
        "devices": possible,
        "devices_default": [one for one in devices if one <= hardware.devices_per_node] or [1],
        "nodes": [2**k for k in range(11) if 2**k <= max(16, 4 * measured_nodes)],
        "nodes_default": measured_nodes,
        "device_memory_bytes": hardware.device_memory_bytes,
    }


def _objectives(champion: Champion) -> Mapping[str, str]:
    """The objectives that this predictor can answer, in words."""
    known = {
        "knee": "Knee of the curve",
        "min_time": "Fastest",
        "min_cost": "Cheapest",
    }
    if champion.bundle.convergence is not None:
        known |= {
            "min_time_to_target": "Soonest at target",
            "min_cost_to_target": "Cheapest to target",
        }
    return known
