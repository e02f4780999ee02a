"""This rank among the ranks of a training run: sums over them, its clock and its memory.

With one rank nothing is sent and no process group is needed.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Peers:
    """Collective calls: every rank makes the same ones in the same order."""

    rank: int
    world_size: int
    device: torch.device

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value added up over ranks, in double precision."""
        return self._reduce(values, "sum")

    def max(self, values: Sequence[float]) -> list[float]:
        """Each value's largest over ranks."""
        return self._reduce(values, "max")

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(gathered, value)
        return gathered

    def share_buffers(self, buffers: Iterable[Tensor]) -> None:
        """Give every rank rank 0's buffers: running statistics differ between them."""
        if self.world_size > 1:
            for buffer in buffers:
                torch.distributed.broadcast(buffer, 0)

    def _reduce(self, values: Sequence[float], kind: str) -> list[float]:
        if self.world_size == 1:
            return [float(value) for value in values]
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        operations = torch.distributed.ReduceOp
        operation = operations.SUM if kind == "sum" else operations.MAX
        torch.distributed.all_reduce(tensor, op=operation)
        return [float(value) for value in tensor.tolist()]


class StepClock:
    """Seconds between marks: events on a CUDA stream, the monotonic clock elsewhere.

    A mark on CUDA does not wait for the device; `take` does.
    """

    def __init__(self, device: torch.device) -> None:
        """The clock stands until `start`."""
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def start(self) -> None:
        """Begin here; what was not taken is forgotten."""
        self._marks = []
        self.mark()

    def mark(self) -> None:
        """A step ends here."""
        if not self._cuda:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def take(self) -> list[float]:
        """The seconds of every step since `start`, and start again."""
        marks = self._marks
        if self._cuda and marks:
            marks[-1].synchronize()
        pairs = itertools.pairwise(marks)
        if self._cuda:
            times = [begin.elapsed_time(end) / 1000 for begin, end in pairs]
        else:
            times = [end - begin for begin, end in pairs]
        self.start()
        return times


def peak_memory_bytes(device: torch.device) -> int:
    """The largest so far: reserved on CUDA, the process's resident memory elsewhere."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)
