"""The caller's side of a group of ranks that serves probes.

with ProbeSession(job, world_size=2, device_type="cpu", settings=ProbeSettings()) as session:
workload = session.start()
answer = session.probe(probe, timeout_s=300)       # RankFailedError: the group is gone,
answer = session.probe(smaller, timeout_s=300)     # and a new one starts here
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from mlflow_tula.errors import InvalidInputError, StoreError
from mlflow_tula.launch import RankFailedError, RankGroup, timeout_failure
from mlflow_tula.launch.cluster import Cluster
from mlflow_tula.launch.failures import RankFailure
from mlflow_tula.launch.folders import make_folder, remove_folder
from mlflow_tula.launch.ranks import FOLDER_WORD, write_json
from mlflow_tula.probes import Probe
from mlflow_tula.probing.settings import ProbeSettings
from mlflow_tula.specs import Workload
from mlflow_tula.workloads.job import Job

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
"""Importing torch, connecting the ranks and loading the dataset; a download can take long."""
PEER_TIMEOUT_S = 2.0
"""After one rank reported its failure, so long may the others take to end by themselves."""
_POLL_S = 0.01
_INPUT_ERRORS = ("InvalidInputError", "UnknownNameError", "TableError", "SchemaError")


class ProbeSession:
    """One world size's ranks, started when first needed and again after a failure."""

    def __init__(
        self,
        job: Job,
        *,
        world_size: int,
        device_type: str,
        settings: ProbeSettings,
        threads_per_rank: int,
        memory_limit_bytes: int | None = None,
        whole: bool = False,
        nodes: int = 1,
        cluster: Cluster | None = None,
    ) -> None:
        """Describe the ranks.

        Args:
            job: what they train.
            world_size: how many, as many on each node.
            device_type: `cpu` or `cuda`.
            settings: how a probe is measured.
            threads_per_rank: OpenMP threads of each.
            memory_limit_bytes: an allocation beyond it fails as out of memory on a rank.
            whole: one dataset of your own is all training data.
            nodes: machines, this one the first of them.
            cluster: how the others are reached, where there are several.
        """
        self.world_size = world_size
        self._nodes, self._cluster = nodes, cluster
        self._task = {
            "job": job.to_dict(),
            "settings": settings.to_dict(),
            "device_type": device_type,
            "memory_limit_bytes": memory_limit_bytes,
            "whole": whole,
        }
        self._threads = threads_per_rank
        self._folder: Path | None = None
        self._group: RankGroup | None = None
        self._number = 0

    def start(self) -> Workload:
        """Start the ranks unless they run, and return what they train.

        Raises:
            InvalidInputError: the job cannot be built; the ranks' own words.
            StoreError: its data cannot be read; the ranks' own words.
            RankFailedError: the ranks ended or were not ready in time.
        """
        if self._group is None:
            self._folder = make_folder("tula-probes-")
            self._number = 0
            self._group = RankGroup(
                "mlflow_tula.probing.worker",
                [FOLDER_WORD],
                num_ranks=self.world_size // self._nodes,
                threads_per_rank=self._threads,
                folder=self._folder,
                nodes=self._nodes,
                cluster=self._cluster,
                files={"task.json": json.dumps(self._task)},
            ).start()
        try:
            ready = self._await("ready.json", START_TIMEOUT_S)
        except RankFailedError as error:
            if error.failure.kind in _INPUT_ERRORS:
                raise InvalidInputError(error.failure.message) from error
            if error.failure.kind == "StoreError":
                raise StoreError(error.failure.message) from error
            raise
        return Workload.from_dict(ready["workload"])

    def probe(self, probe: Probe, *, timeout_s: float) -> dict[str, Any]:
        """Measure one configuration; on failure every rank is gone when this raises."""
        return self._ask(
            {
                "kind": "probe",
                "local_batch_size": probe.local_batch_size,
                "accumulation_steps": probe.accumulation_steps,
                "gradient_compression": probe.gradient_compression,
            },
            timeout_s,
        )

    def time_links(self, *, timeout_s: float) -> list[dict[str, Any]]:
        """The communication probe: rows of LinkMeasurement less scope and counts."""
        answer = self._ask({"kind": "links"}, timeout_s)
        return cast("list[dict[str, Any]]", answer["links"])

    def check_link(self, message_bytes: int, *, timeout_s: float) -> float:
        """Seconds of one all-reduce."""
        answer = self._ask({"kind": "links", "check_bytes": message_bytes}, timeout_s)
        return float(answer["time_s"])

    @property
    def is_running(self) -> bool:
        """Whether ranks are there to answer without a new start."""
        return self._group is not None

    def close(self) -> None:
        """End the ranks: asked first, then stopped; nothing is left."""
        group, folder = self._group, self._folder
        self._group = self._folder = None
        if group is not None:
            if folder is not None and group.poll() is None:
                write_json(folder / f"request-{self._number + 1}.json", {"kind": "stop"})
            group.close()
        if folder is not None:
            remove_folder(folder)

    def __enter__(self) -> Self:
        """Nothing is started yet."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave no process behind, whatever happened."""
        self.close()

    def _ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        self.start()
        assert self._folder is not None, "start() made it"
        self._number += 1
        write_json(self._folder / f"request-{self._number}.json", request)
        return self._await(f"answer-{self._number}.json", timeout_s)

    def _await(self, name: str, timeout_s: float) -> dict[str, Any]:
        """The JSON that rank 0 writes, or RankFailedError with nothing left running."""
        assert self._folder is not None, "only called while a group runs"
        assert self._group is not None, "only called while a group runs"
        path = self._folder / name
        deadline = time.monotonic() + timeout_s
        while not path.exists():
            if self._group.poll() is not None:
                raise self._failed(self._group.failure())
            if any(self._folder.glob("failure-rank*.json")):
                self._wait_for_peers()
                raise self._failed(self._group.failure())
            if time.monotonic() > deadline:
                raise self._failed(timeout_failure(timeout_s))
            time.sleep(_POLL_S)
        return cast("dict[str, Any]", json.loads(path.read_text()))

    def _wait_for_peers(self) -> None:
        """Give the other ranks a moment to tell their side: the cause is chosen among all."""
        assert self._group is not None, "only called while a group runs"
        deadline = time.monotonic() + PEER_TIMEOUT_S
        while self._group.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _failed(self, failure: RankFailure) -> RankFailedError:
        logger.info("probe group of %d ranks ended: %s", self.world_size, failure.reason)
        if failure.traceback:
            logger.debug("%s", failure.traceback)
        self.close()
        return RankFailedError(failure)
