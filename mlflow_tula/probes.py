"""A probe, the answers a table holds to it, and what it costs in time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mlflow_tula.specs import Spec, check_int
from mlflow_tula.table import Measurement, ProfileTable

_STEPS = 20
"""Timed and untimed steps of a probe, where a row does not say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe(Spec):
    """One configuration to measure."""

    local_batch_size: int
    nodes: int = 1
    devices_per_node: int = 1
    accumulation_steps: int = 1

    def __post_init__(self) -> None:
        """Check every field once."""
        for name in ("local_batch_size", "nodes", "devices_per_node", "accumulation_steps"):
            check_int(name, getattr(self, name))

    @classmethod
    def of(cls, row: Measurement) -> Probe:
        """The configuration of a row."""
        return cls(
            local_batch_size=row.local_batch_size,
            nodes=row.nodes,
            devices_per_node=row.devices_per_node,
            accumulation_steps=row.accumulation_steps,
        )

    @property
    def world_size(self) -> int:
        """Data-parallel ranks."""
        return self.nodes * self.devices_per_node

    @property
    def global_batch_size(self) -> int:
        """Local batch size x accumulation steps x world size."""
        return self.local_batch_size * self.accumulation_steps * self.world_size

    @property
    def layout(self) -> tuple[int, int, int]:
        """What a curve over batch sizes holds fixed: nodes, devices per node, accumulation."""
        return self.nodes, self.devices_per_node, self.accumulation_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchCost(Spec):
    """What was spent, what measuring every candidate would have cost, seconds."""

    spent_s: float
    full_s: float

    @property
    def share(self) -> float:
        """Spent over full."""
        return self.spent_s / self.full_s if self.full_s > 0 else 1.0


def full_search_cost(candidates: Iterable[Probe], table: ProfileTable) -> SearchCost:
    """What full search would have cost: measured probes as they were, the rest as expected."""
    answers = answers_of(table)
    spent = sum(_probe_time(row) for row in table.measurements)
    rest = sum(
        expected_probe_time_s(table, probe) for probe in set(candidates) if probe not in answers
    )
    return SearchCost(spent_s=spent, full_s=spent + rest)


def expected_probe_time_s(table: ProfileTable, probe: Probe) -> float:
    """What a probe will take, from the rows so far: their overhead and steps, its step time.

    The step time is interpolated between measured sizes. Past the largest it follows the line of
    the last two; after a single one half of it is taken to grow with the batch, half as latency. A
    world size with a single row takes the shape of the one with the most. Zero before anything was
    measured.
    """
    if not table.ok:
        return 0.0
    worlds: dict[int, list[Measurement]] = {}
    for row in sorted(table.ok, key=lambda row: row.local_batch_size):
        worlds.setdefault(row.world_size, []).append(row)
    own, most = worlds.get(probe.world_size, []), max(worlds.values(), key=len)
    step = _step_time(own if len(own) > 1 else most, probe.local_batch_size)
    if len(own) == 1:
        step *= _step_time(own, own[0].local_batch_size) / _step_time(most, own[0].local_batch_size)
    rows = own or most
    overhead = [_probe_time(row) - _steps(row) * float(row.step_time_s or 0.0) for row in rows]
    steps = min(_steps(row) for row in rows[-2:])
    return max(float(np.median(overhead)), 0.0) + steps * step * probe.accumulation_steps


def _step_time(rows: Sequence[Measurement], size: float) -> float:
    """Seconds of one pass at a local batch size, from rows in ascending order of theirs."""
    sizes = [float(row.local_batch_size) for row in rows]
    times = [float(row.step_time_s or 0.0) / row.accumulation_steps for row in rows]
    step = float(np.interp(size, sizes, times))
    if size > sizes[-1]:
        smaller = [i for i, other in enumerate(sizes) if other < sizes[-1]]
        slope = times[-1] / sizes[-1] / 2.0
        if smaller:
            slope = (times[-1] - times[smaller[-1]]) / (sizes[-1] - sizes[smaller[-1]])
        step += max(slope, 0.0) * (size - sizes[-1])
    return step


def _steps(row: Measurement) -> int:
    return row.num_steps or _STEPS


def _probe_time(row: Measurement) -> float:
    if row.probe_time_s is not None:
        return row.probe_time_s
    return _steps(row) * row.step_time_s if row.step_time_s is not None else 0.0


def answers_of(table: ProfileTable) -> dict[Probe, str]:
    """Status of every configuration that has a row; one that ran once counts as running."""
    answers: dict[Probe, str] = {}
    for row in table.measurements:
        probe = Probe.of(row)
        if answers.get(probe) != "ok":
            answers[probe] = row.status
    return answers
