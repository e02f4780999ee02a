"""A rank that serves probes until it is told to stop, or fails.

Started by `ProbeSession` through torch.distributed.run. Building the process (importing torch,
connecting the ranks, loading the dataset) costs seconds, a probe only its steps; so one group of
ranks serves many. Requests and answers are JSON files in the session's folder:

    task.json           the job and the settings          (written before the start)
    ready.json          the workload, when all is set up  (rank 0)
    request-<n>.json    {"kind": "probe" | "links" | "stop", ...}
    answer-<n>.json     (rank 0)

A rank that fails leaves its reason and exits; the others are stopped by the agent, and the session
starts a fresh group when it needs one: nothing of a failed probe lives on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from mlflow_tula.launch.ranks import run_rank, write_json

_POLL_S = 0.02
_PATIENCE = timedelta(days=1)  # the session has the time limits, not the collectives


def main() -> None:
    """Set up, say so, and answer."""
    folder = Path(sys.argv[1])
    server = _Server(folder, json.loads((folder / "task.json").read_text()))
    server.set_up()
    number = 0
    while True:
        number += 1
        request = server.next_request(number)
        if request["kind"] == "stop":
            return
        answer = server.answer(request)
        if server.rank == 0:
            write_json(folder / f"answer-{number}.json", answer)


class _Server:
    """One rank's state between probes: the dataset, and nothing of a model."""

    def __init__(self, folder: Path, task: Mapping[str, Any]) -> None:
        import torch
        import torch.distributed as dist

        from mlflow_tula.probing.memory import limit_memory, meter_for
        from mlflow_tula.probing.settings import ProbeSettings
        from mlflow_tula.workloads.job import Job

        self.folder = folder
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.job = Job.from_dict(task["job"])
        self.whole = bool(task["whole"])
        self.settings = ProbeSettings.from_dict(task["settings"])
        self.device = torch.device(task["device_type"])
        if self.device.type == "cuda":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
            dist.init_process_group("cpu:gloo,cuda:nccl", timeout=_PATIENCE, device_id=self.device)
        else:
            dist.init_process_group("gloo", timeout=_PATIENCE)
        self.meter = meter_for(self.device)
        self.limit_bytes: int | None = task["memory_limit_bytes"]
        self._limit = limit_memory

    def set_up(self) -> None:
        """Load the data, describe the workload, tell the session."""
        from mlflow_tula.probing.own import load_datasets
        from mlflow_tula.workloads.describe import describe

        self.datasets = load_datasets(self.job, whole=self.whole)
        if self.rank == 0:
            workload = describe(self.job, self.datasets).to_dict()
        if self.limit_bytes is not None:
            self._limit(self.limit_bytes, self.device)
        if self.rank == 0:
            write_json(self.folder / "ready.json", {"workload": workload})

    def next_request(self, number: int) -> dict[str, Any]:
        """Rank 0 waits for the session's file, the others for rank 0."""
        import torch.distributed as dist

        path = self.folder / f"request-{number}.json"
        box: list[dict[str, Any]] = [{}]
        if self.rank == 0:
            while not path.exists():
                time.sleep(_POLL_S)
            box = [json.loads(path.read_text())]
        if self.world_size > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do what a request asks."""
        if request["kind"] == "links":
            return self.links(request)
        return self.probe(
            int(request["local_batch_size"]),
            int(request["accumulation_steps"]),
            request.get("gradient_compression"),
        )

    def probe(
        self, local_batch_size: int, accumulation_steps: int, compression: str | None
    ) -> dict[str, Any]:
        """Measure one configuration."""
        from mlflow_tula.probing.clock import clock_for
        from mlflow_tula.probing.probe import run_probe
        from mlflow_tula.probing.steps import TrainingSteps

        def make_steps() -> TrainingSteps:
            return TrainingSteps(
                self.job.replace(gradient_compression=compression),
                self.datasets.train,
                self.datasets.num_classes,
                self.datasets.image_size,
                local_batch_size=local_batch_size,
                accumulation_steps=accumulation_steps,
                rank=self.rank,
                world_size=self.world_size,
                device=self.device,
                clock=clock_for(self.device),
            )

        return run_probe(
            make_steps,
            self.meter,
            self.settings,
            local_batch_size=local_batch_size,
            world_size=self.world_size,
        )

    def links(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The communication probe, or one message of it that checks a link that is known."""
        from mlflow_tula.probing.clock import clock_for
        from mlflow_tula.probing.links import LinkProbe, bucket_sizes
        from mlflow_tula.workloads.models import build_model

        began = time.perf_counter()
        probe = LinkProbe(self.device, clock_for(self.device))
        if request.get("check_bytes"):
            return {"time_s": probe.check(int(request["check_bytes"]))}
        model = build_model(
            self.job,
            self.datasets.num_classes,
            image_size=self.datasets.image_size,
            device="meta",
        )
        sizes = [p.numel() * p.element_size() for p in model.parameters() if p.requires_grad]
        buckets = bucket_sizes(sizes, self.job.bucket_bytes)
        return {"links": probe.run(buckets), "seconds": time.perf_counter() - began}


if __name__ == "__main__":
    run_rank(main)
