"""What a sweep tells while it runs, and what it was asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from mlflow_tula.launch.cluster import Cluster
from mlflow_tula.probes import Probe
from mlflow_tula.probing.settings import ProbeSettings
from mlflow_tula.specs import HardwareSpec
from mlflow_tula.table import LinkMeasurement, Measurement
from mlflow_tula.workloads.job import Job

EventKind = Literal[
    "starting",
    "started",
    "probe_started",
    "probe_finished",
    "probe_repeated",
    "probe_refused",
    "links_measured",
    "finished",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileEvent:
    """What a sweep is doing, for progress bars and logs.

    `num_done` and `num_expected` count probes (the latter is a guess with partial search);
    `expected_remaining_s` is None until something was measured. `details` holds what a row does
    not: warm-up steps and all others that were run (of both trials, where one was repeated), what
    stopped the trial, share of time spent waiting for a core, graphs that torch.compile made.
    """

    kind: EventKind
    probe: Probe | None = None
    measurement: Measurement | None = None
    reason: str = ""
    num_done: int = 0
    num_expected: int = 0
    elapsed_s: float = 0.0
    expected_probe_s: float | None = None
    expected_remaining_s: float | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRequest:
    """Everything a sweep was asked for, checked.

    `time_budget_s` None is no bound; with `auto_budget` the sweep chooses one after its first
    probe.
    """

    job: Job
    whole: bool
    hardware: HardwareSpec
    world_sizes: tuple[int, ...]
    settings: ProbeSettings
    search: Literal["partial", "full"]
    time_budget_s: float | None
    auto_budget: bool
    memory_limit_bytes: int | None
    threads_per_rank: int | None
    walk_down: bool
    probe_timeout_s: float
    node_counts: tuple[int, ...] = (1,)
    cluster: Cluster | None = None
    known_links: tuple[LinkMeasurement, ...] = ()

    @property
    def link_layout(self) -> tuple[int, int] | None:
        """Nodes and devices of the communication probe across nodes, where there are several."""
        if self.cluster is None or self.cluster.place.nodes == 1:
            return None
        return self.cluster.place.nodes, max(self.world_sizes)
