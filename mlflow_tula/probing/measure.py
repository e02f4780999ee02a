"""A probe becomes a row: measured, refused before it began, or failed with its reason."""

from __future__ import annotations

import logging
import time
from typing import Any

from mlflow_tula.launch import RankFailedError, usable_threads
from mlflow_tula.probes import Probe
from mlflow_tula.probing.contention import is_contended
from mlflow_tula.probing.events import SweepRequest
from mlflow_tula.probing.guards import (
    default_memory_limit,
    expected_peak_bytes,
    expected_seconds,
    gigabytes,
)
from mlflow_tula.probing.session import ProbeSession
from mlflow_tula.specs import Workload
from mlflow_tula.table import COLUMNS, LinkMeasurement, Measurement, ProfileTable
from mlflow_tula.workloads.job import is_import_path

logger = logging.getLogger(__name__)

INPUT_BOUND_SHARE = 0.5
"""A step that waits for data longer than this share of its time is input-bound."""
LINK_BYTES = (2**20, 2**22, 2**24, 2**26)
"""All-reduce sizes of the link measurement; smaller ones tell little (docs/method.md)."""
_MAX_LINK_BYTES = 2**28
_SMALL_PROBE = 8


class Measurer:
    """The ranks of each world size, and what they measure."""

    def __init__(self, request: SweepRequest) -> None:
        """Nothing is started yet."""
        self.request = request
        self.last_error: RankFailedError | None = None
        self._sessions: dict[int, ProbeSession] = {}
        self._best_cpu_ratio: dict[int, float] = {}
        self._start_s = 0.0

    def start(self) -> Workload:
        """Start the first world size's ranks; they know the workload."""
        return self._start(self._session(self.request.world_sizes[0]))

    def close(self) -> None:
        """Stop every rank."""
        for session in self._sessions.values():
            session.close()

    def seconds(self, table: ProfileTable, probe: Probe) -> float:
        """What a probe will take, with the start of its ranks where they do not run."""
        session = self._sessions.get(probe.world_size)
        start_s = 0.0 if session is not None and session.is_running else self._start_s
        return start_s + expected_seconds(table, probe, self.request.settings)

    def refusal(self, table: ProfileTable, probe: Probe) -> str | None:
        """Why a probe must not be run: it would not fit in memory; None when it may."""
        limit = self.memory_limit(probe.world_size)

        def estimate(size: int) -> int | None:
            static = 4 * (table.workload.gradient_bytes or 0)
            small = not table.ok and size <= _SMALL_PROBE and 4 * static < limit
            # Counting runs a model without values; your own code must see real steps only.
            if small or is_import_path(self.request.job.model):
                return None
            try:
                session = self._session(probe.world_size)
                return session.estimate(size, timeout_s=self.request.probe_timeout_s)
            except RankFailedError as error:
                logger.warning("no memory estimate for batch size %d: %s", size, error)
                return None

        expected = expected_peak_bytes(table, probe, estimate)
        if expected is None or expected <= limit:
            return None
        return (
            f"predicted {gigabytes(expected)} exceeds the limit of {gigabytes(limit)} per rank: "
            f"not run"
        )

    def measure(self, table: ProfileTable, probe: Probe) -> tuple[Measurement, dict[str, Any]]:
        """One trial as a row, and what the row has no column for."""
        timeout_s = max(self.request.probe_timeout_s, 10 * self.seconds(table, probe))
        session, began = self._session(probe.world_size), time.monotonic()
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
        row = row_of(probe, **facts)
        if is_input_bound(row):
            share = facts["data_time_s"] / facts["step_time_s"]
            facts["reason"] = f"input-bound: {share:.0%} of a step waits for data"
            row = row_of(probe, **facts)
        size = probe.world_size
        ratio = row.cpu_time_ratio or 0.0
        best = self._best_cpu_ratio[size] = max(self._best_cpu_ratio.get(size, 0.0), ratio)
        details = {key: value for key, value in answer.items() if key not in COLUMNS}
        details["contended"] = is_contended(details.get("waiting_share"), ratio, best)
        return row, details

    def measure_links(self, table: ProfileTable, world_size: int) -> tuple[LinkMeasurement, ...]:
        """All-reduce times of a few message sizes; empty on failure or where the table has them."""
        if any(link.devices_per_node == world_size for link in table.links):
            return ()
        gradient = table.workload.gradient_bytes or 0
        sizes = sorted({*LINK_BYTES, min(max(gradient, LINK_BYTES[0]), _MAX_LINK_BYTES)})
        try:
            times = self._session(world_size).time_links(
                sizes, timeout_s=self.request.probe_timeout_s
            )
        except RankFailedError as error:
            logger.warning("the link between %d ranks was not measured: %s", world_size, error)
            return ()
        return tuple(
            LinkMeasurement(
                scope="intra_node",
                nodes=1,
                devices_per_node=world_size,
                message_bytes=int(link["message_bytes"]),
                time_s=link["time_s"],
            )
            for link in times
        )

    def memory_limit(self, world_size: int) -> int:
        """Bytes that one rank may hold."""
        if self.request.memory_limit_bytes is not None:
            return self.request.memory_limit_bytes
        return default_memory_limit(self.request.hardware, world_size)

    def _start(self, session: ProbeSession) -> Workload:
        """Start ranks unless they run, and note how long that takes."""
        if session.is_running:
            return session.start()
        began = time.monotonic()
        workload = session.start()
        self._start_s = time.monotonic() - began
        return workload

    def _session(self, world_size: int) -> ProbeSession:
        """The ranks of a world size; on accelerators those of other sizes free their devices."""
        request = self.request
        if request.hardware.device_type != "cpu":
            for other, session in self._sessions.items():
                if other != world_size:
                    session.close()
        if world_size not in self._sessions:
            cores = request.hardware.cpu_cores or usable_threads()
            self._sessions[world_size] = ProbeSession(
                request.job,
                world_size=world_size,
                device_type=request.hardware.device_type,
                settings=request.settings,
                threads_per_rank=request.threads_per_rank or max(1, cores // world_size),
                memory_limit_bytes=self.memory_limit(world_size),
                whole=request.whole,
            )
        return self._sessions[world_size]


def is_input_bound(row: Measurement) -> bool:
    """Whether a step waits for data most of its time: a larger batch or device will not help."""
    if row.data_time_s is None or row.step_time_s is None:
        return False
    return row.data_time_s > INPUT_BOUND_SHARE * row.step_time_s


def row_of(probe: Probe, **facts: Any) -> Measurement:
    """A row of the table for this configuration."""
    return Measurement(**probe.to_dict(), **facts)
