"""A probe becomes a row: measured, refused before it began, or failed with its reason."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from mlflow_tula.launch import RankFailedError, usable_threads
from mlflow_tula.model_features import ModelFeatures
from mlflow_tula.predictors.link import fit as fit_link
from mlflow_tula.probes import Probe
from mlflow_tula.probing.contention import is_contended
from mlflow_tula.probing.counting import Counting
from mlflow_tula.probing.events import SweepRequest
from mlflow_tula.probing.guards import (
    default_memory_limit,
    expected_peak_bytes,
    expected_seconds,
    gigabytes,
)
from mlflow_tula.probing.plan import layouts
from mlflow_tula.probing.session import ProbeSession
from mlflow_tula.specs import Workload
from mlflow_tula.table import COLUMNS, LinkMeasurement, Measurement, ProfileTable
from mlflow_tula.workloads.job import is_import_path

logger = logging.getLogger(__name__)

INPUT_BOUND_SHARE = 0.5
"""A step that waits for data longer than this share of its time is input-bound."""
CHECK_BYTES = 2**22
LINK_DRIFT = 0.25
"""A known link is measured anew where one message takes so much more or less than it says."""


class Measurer:
    """The ranks of each world size, and what they measure."""

    def __init__(self, request: SweepRequest) -> None:
        """Nothing is started yet."""
        self.request = request
        self.last_error: RankFailedError | None = None
        self._sessions: dict[tuple[int, int], ProbeSession] = {}
        self._best_cpu_ratio: dict[tuple[int, int], float] = {}
        self._start_s = 0.0
        self.link_time_s = 0.0
        self.features: ModelFeatures | None = None

    def start(self) -> Workload:
        """Start the first layout's ranks, who know the workload; count its kernels beside."""
        request = self.request
        counting = Counting(request.job, whole=request.whole)
        try:
            first = self._session(layouts(request.world_sizes, request.node_counts)[0])
            workload = self._start(first)
            self.features = counting.result()
        finally:
            counting.close()
        return workload

    def close(self) -> None:
        """Stop every rank."""
        for session in self._sessions.values():
            session.close()

    def seconds(self, table: ProfileTable, probe: Probe) -> float:
        """What a probe will take, with the start of its ranks where they do not run."""
        session = self._sessions.get(_layout(probe))
        start_s = 0.0 if session is not None and session.is_running else self._start_s
        return start_s + expected_seconds(table, probe, self.request.settings)

    def refusal(self, table: ProfileTable, probe: Probe) -> str | None:
        """Why a probe must not be run: it would not fit in memory; None when it may."""
        limit = self.memory_limit(probe.devices_per_node)

        def estimate(size: int) -> int | None:
            if self.features is None or not self.features.peak_lines:
                return None
            # what own code really takes is seen in its first probe, and told by the allocator
            if table.ok and is_import_path(self.request.job.model):
                return None
            return int(self.features.peak_bytes(np.array([size]))[0])

        expected = expected_peak_bytes(table, probe, estimate, limit)
        if expected is None or expected <= limit:
            return None
        return (
            f"predicted {gigabytes(expected)} exceeds the limit of {gigabytes(limit)} per rank: "
            f"not run"
        )

    def measure(self, table: ProfileTable, probe: Probe) -> tuple[Measurement, dict[str, Any]]:
        """One trial as a row, and what the row has no column for."""
        timeout_s = max(self.request.probe_timeout_s, 10 * self.seconds(table, probe))
        session, began = self._session(_layout(probe)), time.monotonic()
        try:
            # A start is no part of a probe's time: others share it.
            self._start(session)
            began = time.monotonic()
            answer = session.probe(probe, timeout_s=timeout_s)
        except RankFailedError as error:
            self.last_error = error
            failure = error.failure
            row = row_of(
                probe,
                status=failure.status,
                reason=failure.reason,
                probe_time_s=time.monotonic() - began,
            )
            return row, {"kind": failure.kind}
        facts = {key: value for key, value in answer.items() if key in COLUMNS}
        facts["probe_time_s"] = time.monotonic() - began
        facts["bucket_bytes"] = self.request.job.bucket_bytes if probe.world_size > 1 else None
        row = row_of(probe, **facts)
        if is_input_bound(row):
            share = facts["data_time_s"] / facts["step_time_s"]
            words = f"input-bound: {share:.0%} of a step waits for data"
            facts["reason"] = "; ".join(filter(None, (facts.get("reason"), words)))
            row = row_of(probe, **facts)
        size = _layout(probe)
        ratio = row.cpu_time_ratio or 0.0
        best = self._best_cpu_ratio[size] = max(self._best_cpu_ratio.get(size, 0.0), ratio)
        details = {key: value for key, value in answer.items() if key not in COLUMNS}
        details["contended"] = is_contended(details.get("waiting_share"), ratio, best)
        return row, details

    def measure_links(self, layout: tuple[int, int]) -> tuple[LinkMeasurement, ...]:
        """The communication probe on (nodes, devices per node); empty where it failed."""
        began = time.monotonic()
        try:
            times = self._session(layout).time_links(timeout_s=self.request.probe_timeout_s)
        except RankFailedError as error:
            logger.warning("the link of %d x %d ranks was not measured: %s", *layout, error)
            return ()
        self.link_time_s += time.monotonic() - began
        nodes, devices = layout
        return tuple(
            LinkMeasurement(
                scope="inter_node" if nodes > 1 else "intra_node",
                nodes=nodes,
                devices_per_node=devices,
                **row,
            )
            for row in times
        )

    def link_has_changed(self, layout: tuple[int, int], known: Sequence[LinkMeasurement]) -> bool:
        """Whether one all-reduce now takes clearly more or less time than is known of the link."""
        link = fit_link(known, "inter_node" if layout[0] > 1 else "intra_node")
        if link is None:
            return True
        try:
            seconds = self._session(layout).check_link(
                CHECK_BYTES, timeout_s=self.request.probe_timeout_s
            )
        except RankFailedError as error:
            logger.warning("the known link was not checked: %s", error)
            return False
        count = float(layout[0] if layout[0] > 1 else layout[1])
        expected = link.seconds(CHECK_BYTES, count)
        return not 1 / (1 + LINK_DRIFT) < seconds / expected < 1 + LINK_DRIFT

    def memory_limit(self, devices: int) -> int:
        """Bytes that one of a node's ranks may hold."""
        if self.request.memory_limit_bytes is not None:
            return self.request.memory_limit_bytes
        return default_memory_limit(self.request.hardware, devices)

    def _start(self, session: ProbeSession) -> Workload:
        """Start ranks unless they run, and note how long that takes."""
        if session.is_running:
            return session.start()
        began = time.monotonic()
        workload = session.start()
        self._start_s = time.monotonic() - began
        return workload

    def _session(self, layout: tuple[int, int]) -> ProbeSession:
        """The ranks of a layout; on accelerators those of other layouts free their devices."""
        request, (nodes, devices) = self.request, layout
        if request.hardware.device_type != "cpu":
            for other, session in self._sessions.items():
                if other != layout:
                    session.close()
        if layout not in self._sessions:
            cores = request.hardware.cpu_cores or usable_threads()
            self._sessions[layout] = ProbeSession(
                request.job,
                world_size=nodes * devices,
                device_type=request.hardware.device_type,
                settings=request.settings,
                threads_per_rank=request.threads_per_rank or max(1, cores // devices),
                memory_limit_bytes=self.memory_limit(devices),
                whole=request.whole,
                nodes=nodes,
                cluster=request.cluster,
            )
        return self._sessions[layout]


def _layout(probe: Probe) -> tuple[int, int]:
    return probe.nodes, probe.devices_per_node


def is_input_bound(row: Measurement) -> bool:
    """Whether a step waits for data most of its time: a larger batch or device will not help."""
    if row.data_time_s is None or row.step_time_s is None:
        return False
    return row.data_time_s > INPUT_BOUND_SHARE * row.step_time_s


def row_of(probe: Probe, **facts: Any) -> Measurement:
    """A row of the table for this configuration."""
    return Measurement(**probe.to_dict(), **facts)
