"""A device of set capacity in place of the ranks of a sweep; the rest of `profile` is the real one.

    device = FakeDevice(capacity_bytes=16 * GB, sample_bytes=GB, workspace={16: 8 * GB})
    device.install(monkeypatch)
    table = profile(job=Job(model="vgg11"), batch_sizes=[8, 16, 32])

Memory as an accelerator has it: what torch allocates, what its allocator reserves for it
(fragmentation), what other processes hold, the bucket copy of DDP, and workspace that jumps at
single batch sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from mlflow_tula.launch import RankFailedError
from mlflow_tula.launch.failures import RankFailure
from mlflow_tula.model_features import ModelFeatures
from mlflow_tula.probes import Probe
from mlflow_tula.specs import DeviceType, HardwareSpec, Workload

GB = 10**9


@dataclass
class FakeDevice:
    """What a rank of it holds, and what it was asked to run."""

    capacity_bytes: int
    static_bytes: int = GB
    sample_bytes: int = GB // 10
    workspace: dict[int, int] = field(default_factory=dict)
    fragmentation: float = 0.0
    others_bytes: int = 0
    copy_bytes: int = 0
    counts: bool = False
    devices: int = 2
    device_type: DeviceType = "cuda"
    dataset_size: int = 10_000
    asked: list[tuple[int, int]] = field(default_factory=list)
    started: int = 0

    @property
    def hardware(self) -> HardwareSpec:
        return HardwareSpec(
            device_type=self.device_type,
            device_name="fake",
            device_memory_bytes=self.capacity_bytes,
            devices_per_node=self.devices,
        )

    @property
    def workload(self) -> Workload:
        return Workload(
            model="vgg11",
            dataset="digits",
            dataset_size=self.dataset_size,
            num_parameters=self.copy_bytes // 4 or None,
        )

    def allocated(self, size: int, world_size: int = 1) -> int:
        copy = self.copy_bytes if world_size > 1 else 0
        return self.static_bytes + copy + self.sample_bytes * size + self.workspace.get(size, 0)

    def reserved(self, size: int, world_size: int = 1) -> int:
        return int(self.allocated(size, world_size) * (1 + self.fragmentation))

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Every sweep of this process is measured on this device."""
        patch.setattr("mlflow_tula.profiler.detect", lambda: self.hardware)
        patch.setattr("mlflow_tula.hardware.detect", lambda *_: self.hardware)

        def session(*_: Any, **options: Any) -> FakeSession:
            return FakeSession(self, options["world_size"], options["memory_limit_bytes"])

        patch.setattr("mlflow_tula.probing.measure.ProbeSession", session)
        patch.setattr("mlflow_tula.probing.measure.Counting", lambda *_, **__: FakeCounting(self))


@dataclass
class FakeCounting:
    """Counts as `Counting` does, where the device says that it can be counted."""

    device: FakeDevice

    def result(self) -> ModelFeatures | None:
        if not self.device.counts:
            return None
        line = (float(self.device.static_bytes), float(self.device.sample_bytes))
        return ModelFeatures(peak_lines=(line,))

    def close(self) -> None:
        """Nothing runs."""


@dataclass
class FakeSession:
    """Answers as `ProbeSession` does, in no time."""

    device: FakeDevice
    world_size: int
    memory_limit_bytes: int | None
    is_running: bool = False

    def start(self) -> Workload:
        self.device.started += not self.is_running
        self.is_running = True
        return self.device.workload

    def close(self) -> None:
        self.is_running = False

    def time_links(self, *, timeout_s: float) -> list[dict[str, float]]:
        self.start()
        sizes = [2**20 * 4**power for power in range(5)]
        return [{"message_bytes": size, "time_s": 1e-4 + size / 1e10} for size in sizes]

    def check_link(self, message_bytes: int, *, timeout_s: float) -> float:
        self.start()
        return 1e-4 + message_bytes / 1e10

    def probe(self, probe: Probe, *, timeout_s: float) -> dict[str, Any]:
        size, device = probe.local_batch_size, self.device
        device.asked.append((size, probe.world_size))
        reserved = device.reserved(size, probe.world_size)
        room = device.capacity_bytes - device.others_bytes
        if reserved > min(room, self.memory_limit_bytes or room):
            self.close()
            words = f"CUDA out of memory. Tried to allocate {reserved / 2**30:.2f} GiB"
            cause = torch.OutOfMemoryError(words)
            raise RankFailedError(RankFailure.from_exception(0, cause)) from cause
        step_s = (0.02**4 + (0.003 + 0.0005 * size) ** 4) ** 0.25
        return {
            "step_time_s": step_s * probe.accumulation_steps + 0.004 * (probe.world_size > 1),
            "num_steps": 10,
            "peak_memory_bytes": reserved,
            "allocated_memory_bytes": device.allocated(size, probe.world_size),
            "device_used_bytes": reserved + device.others_bytes,
            "optimizer_steps": 12,
            "evaluation_passes": 1,
            "gradient_passes": 1,
        }
