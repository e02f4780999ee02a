"""Bytes of one probe: three numbers, none of which replaces another.

| | CUDA | CPU |
|---|---|---|
| allocated | most bytes of live tensors, `max_memory_allocated` | the same, counted at torch's CPU
allocator in one recorded step and one evaluation pass |
| peak | most bytes reserved, `max_memory_reserved`: fragmentation counts, limits apply to it |
what the process holds without a model, plus the larger of allocated bytes and growth of the
resident set during the probe (VmHWM over what is left after it) |
| device used | total less free of the device, other processes included | resident peak as the
kernel counts it, VmHWM |

Loader workers' own pages (USS) are added to the peak on a CPU. There the growth is 1.05 to 2
times the allocated bytes (oneDNN's workspaces, malloc's slack), so the resident set is the honest
bound. Memory that malloc keeps from a larger probe before is given back first (`malloc_trim`) and
the kernel's peak is reset (`/proc/self/clear_refs`), so that a small batch after a large one
reads as it would alone; where the kernel allows no reset, peak is what the process holds plus
allocated bytes, and device used is left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from torch import nn

from mlflow_tula.workloads.parallel import is_sharded, local_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReading:
    """Bytes on this rank; see the module for what each means."""

    peak_bytes: int
    allocated_bytes: int
    device_used_bytes: int | None


class MemoryMeter(Protocol):
    """Reads a probe's memory: `start`, `record` around single passes, `stop`, `reading`."""

    def start(self) -> None:
        """Before anything of the probe exists."""

    def record(self, held: Callable[[], int]) -> contextlib.AbstractContextManager[None]:
        """Around a pass whose allocations are counted; `held` tells the bytes that outlive it."""

    def stop(self) -> None:
        """After the last step, while the model still exists."""

    def reading(self) -> MemoryReading:
        """After the model and everything else of the probe was dropped."""


class CudaMeter:
    """The caching allocator's own counts."""

    def __init__(self, device: torch.device) -> None:
        """Read `device`."""
        self._device = device
        self._reading = MemoryReading(peak_bytes=0, allocated_bytes=0, device_used_bytes=0)

    def start(self) -> None:
        """Give cached blocks back and reset the peaks."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    @contextlib.contextmanager
    def record(self, held: Callable[[], int]) -> Iterator[None]:
        """Nothing to do: the allocator counts all the time."""
        yield

    def stop(self) -> None:
        """Read the peaks."""
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        self._reading = MemoryReading(
            peak_bytes=torch.cuda.max_memory_reserved(self._device),
            allocated_bytes=torch.cuda.max_memory_allocated(self._device),
            device_used_bytes=total - free,
        )

    def reading(self) -> MemoryReading:
        """Give cached blocks back and answer."""
        gc.collect()
        torch.cuda.empty_cache()
        return self._reading


class CpuMeter:
    """Torch's CPU allocator in recorded passes, and the kernel's resident peak."""

    def __init__(self) -> None:
        """Start with nothing known of this process."""
        self._allocated = 0
        self._resident_peak: int | None = None
        self._can_reset = False
        self._loaders = 0
        self._without_model: int | None = None

    def start(self) -> None:
        """Give malloc's free pages back and reset the kernel's peak."""
        release_free_memory()
        self._allocated = 0
        self._resident_peak = None
        self._can_reset = reset_resident_peak()

    @contextlib.contextmanager
    def record(self, held: Callable[[], int]) -> Iterator[None]:
        """Count every allocation of a pass; the largest pass is kept.

        The recorder misses that blocks from before its start are freed (DDP makes its buckets
        anew in the second step). So it is anchored at the end: what is held then, less the net
        change that was seen, is what was there at the start.
        """
        recorder = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )
        with recorder:
            yield
        peak, change = _peak_and_change(recorder)
        self._allocated = max(self._allocated, held() - change + peak)

    def stop(self) -> None:
        """Read the kernel's peak, and what loader workers hold."""
        self._resident_peak = resident_peak_bytes() if self._can_reset else None
        self._loaders = _own_pages_of_children()

    def reading(self) -> MemoryReading:
        """Compare with what is left of the process without the probe."""
        release_free_memory()
        left = psutil.Process().memory_info().rss
        if self._without_model is None:
            self._without_model = left
        growth = 0 if self._resident_peak is None else max(self._resident_peak - left, 0)
        return MemoryReading(
            peak_bytes=self._without_model + max(self._allocated, growth) + self._loaders,
            allocated_bytes=self._allocated,
            device_used_bytes=self._resident_peak,
        )


def meter_for(device: torch.device) -> MemoryMeter:
    """The meter that fits a device; other accelerators than CUDA are read on the host's side."""
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, *, world_size: int) -> int:
    """Bytes that live through a step: parameters, buffers, gradients, optimizer state, buckets.

    DDP keeps a copy of all gradients in its buckets when there is more than one rank; of what FSDP
    shards a rank holds its part.
    """
    parameters = list(model.parameters())
    total = sum(local_bytes(p) for p in parameters) + sum(b.nbytes for b in model.buffers())
    total += sum(local_bytes(p.grad) for p in parameters if p.grad is not None)
    if world_size > 1 and not is_sharded(model):
        total += sum(p.nbytes for p in parameters if p.requires_grad)
    return total + sum(
        local_bytes(value)
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def _peak_and_change(recorder: Any) -> tuple[int, int]:
    """Most bytes above the start of a recording, and bytes at its end above the start."""
    events = [
        (event.start_ns(), event.nbytes())
        for event in recorder.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    now = peak = 0
    for _, change in sorted(events, key=lambda event: event[0]):
        now += change
        peak = max(peak, now)
    return peak, now


def limit_memory(limit_bytes: int, device: torch.device) -> None:
    """Make an allocation beyond the limit fail as out of memory, in this process.

    CUDA: the caching allocator's own bound on reserved bytes. CPU: RLIMIT_DATA, raised by what is
    mapped but not resident now, so that the machine is never driven into its last page.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(limit_bytes / total, 1.0), device)
        return
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        memory = psutil.Process().memory_info()
        mapped = getattr(memory, "data", memory.rss)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (mapped + max(limit_bytes - memory.rss, 0), hard))


def _own_pages_of_children() -> int:
    """Bytes that only this process's children hold: loader workers with their prefetched data."""
    total = 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            total += child.memory_full_info().uss
    return total


def release_free_memory() -> None:
    """Collect garbage and give malloc's free pages back to the kernel (glibc only)."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def reset_resident_peak() -> bool:
    """Start the kernel's count of the resident peak anew; False where that is not possible."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return resident_peak_bytes() is not None


def resident_peak_bytes() -> int | None:
    """VmHWM: the largest resident set since the last reset; None where there is no /proc."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
