"""A rank that serves probes until it is told to stop, or fails.

Started by `ProbeSession` through torch.distributed.run. Building the process (importing torch,
connecting the ranks, loading the dataset) costs seconds, a probe only its steps; so one group of
ranks serves many. Requests and answers are JSON files in the session's folder:

    task.json           the job and the settings          (written before the start)
    ready.json          the workload, when all is set up  (rank 0)
    request-<n>.json    {"kind": "probe" | "links" | "estimate" | "stop", ...}
    answer-<n>.json     (rank 0)

A rank that fails leaves its reason and exits; the others are stopped by the agent, and the session
starts a fresh group when it needs one: nothing of a failed probe lives on.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from mlflow_tula.launch.ranks import run_rank, write_json

_POLL_S = 0.02
_PATIENCE = timedelta(days=1)  # the session has the time limits, not the collectives
_LINK_REPEATS = 5


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
            return {"links": self.time_links([int(size) for size in request["message_bytes"]])}
        if request["kind"] == "estimate":
            return {"bytes": self.estimate(int(request["local_batch_size"]))}
        return self.probe(int(request["local_batch_size"]), int(request["accumulation_steps"]))

    def probe(self, local_batch_size: int, accumulation_steps: int) -> dict[str, Any]:
        """Measure one configuration."""
        from mlflow_tula.probing.clock import clock_for
        from mlflow_tula.probing.probe import run_probe
        from mlflow_tula.probing.steps import TrainingSteps

        def make_steps() -> TrainingSteps:
            return TrainingSteps(
                self.job,
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

    def estimate(self, local_batch_size: int) -> int | None:
        """Bytes of a step without running it (rank 0; the others have nothing to do)."""
        from mlflow_tula.workloads.estimate import estimate_step_memory

        if self.rank:
            return None
        return estimate_step_memory(self.job, local_batch_size, datasets=self.datasets)

    def time_links(self, message_bytes: list[int]) -> list[dict[str, float]]:
        """Median time of an all-reduce of each size, after one untimed one, maximum over ranks."""
        import torch
        import torch.distributed as dist

        from mlflow_tula.probing.clock import clock_for

        clock, found = clock_for(self.device), []
        for size in message_bytes:
            message = torch.zeros(size // 4, device=self.device)
            times = []
            for _ in range(_LINK_REPEATS + 1):
                clock.synchronize()
                dist.barrier()
                start = clock.mark()
                dist.all_reduce(message)
                end = clock.mark()
                clock.synchronize()
                times.append(clock.seconds(start, end))
            slowest = torch.tensor([statistics.median(times[1:])], dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            found.append({"message_bytes": 4 * (size // 4), "time_s": float(slowest[0])})
        return found


if __name__ == "__main__":
    run_rank(main)
