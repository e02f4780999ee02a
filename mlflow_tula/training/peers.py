"""This rank among the ranks of a training run: sums over them, its clock and its memory.

With one rank nothing is sent and no process group is needed.
"""

from __future__ import annotations

import itertools
import socket
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

    def hosts(self) -> list[str]:
        """Every rank's machine."""
        return [str(name) for name in self.gather(socket.gethostname())]

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

    A mark on CUDA does not wait for the device; `take` does. `add_wait` notes what of the step
    that runs was spent waiting for other ranks.
    """

    def __init__(self, device: torch.device) -> None:
        """The clock stands until `start`."""
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []
        self._waits: list[tuple[int, Any, Any]] = []
        self.waits_s: list[float] = []

    def start(self) -> None:
        """Begin here; what was not taken is forgotten."""
        self._marks, self._waits = [], []
        self.mark()

    def mark(self) -> None:
        """A step ends here."""
        self._marks.append(self.now())

    def now(self) -> Any:
        """A mark of this moment, for `add_wait`."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def add_wait(self, begin: Any, end: Any) -> None:
        """From `begin` to `end` this rank waited for others; in the step that runs now."""
        self._waits.append((len(self._marks) - 1, begin, end))

    def take(self) -> list[float]:
        """The seconds of every step since `start`, and start again.

        `waits_s` then holds what each of them waited for other ranks.
        """
        marks = self._marks
        if self._cuda and marks:
            marks[-1].synchronize()
        times = [self._seconds(begin, end) for begin, end in itertools.pairwise(marks)]
        self.waits_s = [0.0] * len(times)
        for step, begin, end in self._waits:
            self.waits_s[step] += self._seconds(begin, end)
        self.start()
        return times

    def _seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1000 if self._cuda else float(end - begin)


def peak_memory_bytes(device: torch.device) -> int:
    """The largest so far: reserved on CUDA, the process's resident memory elsewhere."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)
