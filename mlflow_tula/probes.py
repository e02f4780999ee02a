"""A probe, the answers a table holds to it, and what it costs in time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mlflow_tula.specs import Spec, check_choice, check_int
from mlflow_tula.table import Compression, Measurement, ProfileTable

MAX_FAILURES = 3
"""So many failed probes, and none that worked: something else than the batch size is wrong."""
OUTLINE = 3
"""Sizes of the first world size before the decision says what is measured."""
_STEPS = 20
"""Timed and untimed steps of a probe, where a row does not say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe(Spec):
    """One configuration to measure."""

    local_batch_size: int
    nodes: int = 1
    devices_per_node: int = 1
    accumulation_steps: int = 1
    gradient_compression: Compression | None = None

    def __post_init__(self) -> None:
        """Check every field once."""
        for name in ("local_batch_size", "nodes", "devices_per_node", "accumulation_steps"):
            check_int(name, getattr(self, name))
        if self.gradient_compression is not None:
            check_choice("gradient compression", self.gradient_compression, Compression)

    @classmethod
    def of(cls, row: Measurement) -> Probe:
        """The configuration of a row."""
        return cls(
            local_batch_size=row.local_batch_size,
            nodes=row.nodes,
            devices_per_node=row.devices_per_node,
            accumulation_steps=row.accumulation_steps,
            gradient_compression=row.gradient_compression,
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
    def layout(self) -> tuple[int, int, int, str]:
        """What a curve over batch sizes holds fixed: nodes, devices, accumulation, compression."""
        compression = self.gradient_compression or ""
        return self.nodes, self.devices_per_node, self.accumulation_steps, compression


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
    world size with a single row takes the shape of the one with the most rows. One without any is
    taken to be as fast as that, but on a CPU, whose cores ranks share, as slow as with a batch as
    many times larger as there are more of them. What is not timed is a line in the step time. Zero
    before anything was measured.
    """
    if not table.ok:
        return 0.0
    worlds: dict[int, list[Measurement]] = {}
    for row in sorted(table.ok, key=lambda row: row.local_batch_size):
        worlds.setdefault(row.world_size, []).append(row)
    own, most = worlds.get(probe.world_size, []), max(worlds.values(), key=len)
    size = float(probe.local_batch_size)
    if not own and table.hardware.device_type == "cpu":
        size *= max(probe.devices_per_node / most[0].devices_per_node, 1.0)
    step = _step_time(own if len(own) > 1 else most, size)
    if len(own) == 1:
        step *= _step_time(own, own[0].local_batch_size) / _step_time(most, own[0].local_batch_size)
    rows = own or most
    sizes = [float(row.local_batch_size) for row in rows]
    steps = float(np.interp(size, sizes, [float(_steps(row)) for row in rows]))
    return _untimed(table.ok, step) + steps * step * probe.accumulation_steps


def _untimed(rows: Sequence[Measurement], step_s: float) -> float:
    """Seconds of a probe besides its timed steps: its start, and steps that are not timed."""
    steps = np.array([float(row.step_time_s or 0.0) for row in rows])
    rest = np.array(
        [_probe_time(row) - _steps(row) * float(row.step_time_s or 0.0) for row in rows]
    )
    off = steps - steps.mean()
    slope = float(off @ rest / (off @ off)) if off @ off > 0 else 0.0
    return max(float(rest.mean()) + max(slope, 0.0) * (step_s - float(steps.mean())), 0.0)


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


def walls_of(answers: Mapping[Probe, str]) -> list[tuple[int, int]]:
    """(world size, local batch size) that ran out of memory above all that ran.

    Neither it nor anything larger is worth a probe, on so many ranks or on more. Below the largest
    size that ran there is no wall: feasibility is a map. Nor is there one before anything ran.
    """
    largest = max(
        (p.local_batch_size for p, status in answers.items() if status == "ok"), default=0
    )
    return [
        (probe.world_size, probe.local_batch_size)
        for probe, status in answers.items()
        if status == "oom" and 0 < largest < probe.local_batch_size
    ]


def only_failures(table: ProfileTable) -> str:
    """Why going on is useless: several probes failed and none ran; empty while it is not."""
    failed = [row for row in table.measurements if row.status == "failed"]
    if table.ok or len(failed) < MAX_FAILURES:
        return ""
    return f"{len(failed)} probes failed and none ran, the last with: {failed[-1].reason}"


def step_up(
    table: ProfileTable, group: Sequence[Probe], answers: Mapping[Probe, str], most_s: float | None
) -> tuple[Probe, str] | None:
    """The smallest size that runs, then one well above it, halving after each that does not."""
    running = [i for i, probe in enumerate(group) if answers.get(probe) == "ok"]
    if not running:
        unanswered = [probe for probe in group if probe not in answers]
        tried = len(group) - len(unanswered)
        return (unanswered[0], "the smallest") if unanswered and tried < MAX_FAILURES else None
    if len(running) >= OUTLINE:
        return None
    last = running[-1]
    beyond = [i for i in range(last + 1, len(group)) if group[i] in answers]
    options = [group[i] for i in range(last + 1, min(beyond, default=len(group)))]
    if not options:
        return None
    goal = (group[last].local_batch_size * options[-1].local_batch_size) ** 0.5
    if most_s is not None:
        options = [p for p in options if expected_probe_time_s(table, p) <= most_s]
        if not options:
            return None
    nearest = min(options, key=lambda p: abs(np.log(p.local_batch_size / goal)))
    return nearest, "halfway up"


def factor_apart(one: float, other: float) -> float:
    """Factor between two sizes."""
    return max(one, other) / min(one, other)
