"""The communication probe on the ranks: all-reduce times of five sizes and of the own gradient.

    | 1 MiB, to learn how fast | five sizes, 1 MiB to what takes a second | gradient | in bf16 |

Every time is that of several all-reduces in a row, less a first untimed one: the bytes that a
shaped link forgives at first (a token bucket) and the mapping of memory are in none of it. The
gradient is sent as DDP sends it: buckets in the order of the backward pass, the first of 1 MiB, all
on their way at once; then the same through the bf16 compression hook's casts. How often each is
repeated follows from how long it takes, so that the whole ends within seconds on any link; of a
gradient that would take longer only the first buckets are sent. Time is the largest of all ranks;
`cpu_time_s`, on a CPU, how long the cores that a rank computes on were busy meanwhile, the kernel's
part included: so much less they compute. What else keeps them busy is seen in a pause before, and
taken off.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from mlflow_tula.probing.clock import DeviceClock

FIRST_BUCKET_BYTES = 2**20
DEFAULT_BUCKET_BYTES = 25 * 2**20
"""DDP's own limits (torch.nn.parallel.DistributedDataParallel, bucket_cap_mb)."""

NUM_SIZES = 5
SMALLEST_BYTES, LARGEST_BYTES = 2**20, 2**28
MESSAGE_S, GRADIENT_S = 0.8, 2.5
"""Seconds for each size (at least one repetition), and for the gradient in each precision."""
_WINDOWS, _WINDOW_S = 5, 0.04
_PAUSE_S = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class _Timed:
    seconds: float
    cpu_s: float


def bucket_sizes(parameter_bytes: Sequence[int], cap_bytes: int | None = None) -> list[int]:
    """Bytes of DDP's buckets of a gradient.

    Args:
        parameter_bytes: of each parameter, in the order of the model.
        cap_bytes: most bytes of a bucket (it is closed by the tensor that reaches them).
    """
    found: list[int] = []
    cap, held = cap_bytes or DEFAULT_BUCKET_BYTES, 0
    for size in reversed(parameter_bytes):
        held += size
        if held >= (min(cap, FIRST_BUCKET_BYTES) if not found else cap):
            found.append(held)
            held = 0
    return [*found, held] if held else found


class LinkProbe:
    """All-reduces among all ranks; each rank makes the same calls in the same order."""

    def __init__(self, device: torch.device, clock: DeviceClock) -> None:
        """Take this rank's device and clock."""
        self._device, self._clock = device, clock
        self._others = 0.0

    def run(self, gradient: Sequence[int]) -> list[dict[str, Any]]:
        """Rows of LinkMeasurement, less its scope and counts.

        Args:
            gradient: bytes of the gradient's buckets; empty: no gradient is sent.
        """
        if self._device.type == "cpu":
            self._others = self._share_of_others()
        rate = SMALLEST_BYTES / self.time([self._message(SMALLEST_BYTES)], 3 * _WINDOW_S).seconds
        rows = []
        for size in message_sizes(rate):
            timed = self.time([self._message(size)], MESSAGE_S, guess_s=size / rate)
            rate = max(rate, size / timed.seconds)
            rows.append(self._row(size, timed))
        if not gradient:
            return rows
        sent = _cut(gradient, rate * GRADIENT_S)
        buckets, guess_s = [self._message(size) for size in sent], sum(sent) / rate
        whole = self.time(buckets, GRADIENT_S, guess_s=guess_s)
        rows.append(self._row(sum(sent), whole, num_buckets=len(sent)))
        half = self.time(buckets, GRADIENT_S, guess_s=guess_s / 2, compressed=True)
        rows.append(self._row(sum(sent), half, num_buckets=len(sent), compression="bf16"))
        return rows

    def check(self, size: int) -> float:
        """Seconds of one message, to see whether a known link is still what it was."""
        return self.time([self._message(size)], MESSAGE_S).seconds

    def time(
        self,
        messages: Sequence[Tensor],
        budget_s: float,
        *,
        guess_s: float | None = None,
        compressed: bool = False,
    ) -> _Timed:
        """Median over windows of the seconds that all-reducing all messages takes once."""
        if guess_s is None or guess_s < budget_s / 2:
            guess_s = self._window(messages, 1, compressed).seconds
        repeats = max(1, round(_WINDOW_S / max(guess_s, 1e-6)))
        windows = min(max(int(budget_s / max(repeats * guess_s, 1e-6)), 1), _WINDOWS)
        found = [self._window(messages, repeats, compressed) for _ in range(windows)]
        return _Timed(
            seconds=statistics.median(one.seconds for one in found),
            cpu_s=statistics.mean(one.cpu_s for one in found),
        )

    def _window(self, messages: Sequence[Tensor], repeats: int, compressed: bool) -> _Timed:
        """One timed window; the largest time of any rank, on every rank."""
        self._clock.synchronize()
        dist.barrier()
        cpu, start = busy_seconds(), self._clock.mark()
        for _ in range(repeats):
            if compressed:
                _reduce_compressed(messages)
            else:
                works = [dist.all_reduce(message, async_op=True) for message in messages]
                for work in works:
                    work.wait()
        end = self._clock.mark()
        self._clock.synchronize()
        seconds, busy = self._clock.seconds(start, end), busy_seconds() - cpu
        spent = [seconds, without_others(busy, seconds, self._others)]
        largest = torch.tensor(spent, dtype=torch.float64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return _Timed(seconds=float(largest[0]) / repeats, cpu_s=float(largest[1]) / repeats)

    def _share_of_others(self) -> float:
        """The part of a pause, in which no rank does anything, that the cores are busy."""
        dist.barrier()
        cpu, began = busy_seconds(), time.perf_counter()
        time.sleep(_PAUSE_S)
        share = (busy_seconds() - cpu) / (time.perf_counter() - began)
        dist.barrier()
        return min(max(share, 0.0), 1.0)

    def _row(self, size: int, timed: _Timed, **more: Any) -> dict[str, Any]:
        row = {"message_bytes": size, "time_s": timed.seconds, **more}
        # a GPU computes on without the host's cores
        return row | ({"cpu_time_s": max(timed.cpu_s, 0.0)} if self._device.type == "cpu" else {})

    def _message(self, size: int) -> Tensor:
        return torch.zeros(max(size // 4, 1), device=self._device)


def without_others(busy_s: float, wall_s: float, others: float) -> float:
    """Of the seconds that cores were busy, those of the all-reduce.

    Args:
        busy_s: seconds that they were busy.
        wall_s: seconds that passed meanwhile.
        others: the share of time that they are busy anyway.
    """
    return min(max(busy_s - others * wall_s, 0.0), wall_s)


def message_sizes(bytes_per_s: float) -> list[int]:
    """Five sizes a constant factor apart, the largest one of about MESSAGE_S."""
    most = min(max(bytes_per_s * MESSAGE_S, 4 * SMALLEST_BYTES), LARGEST_BYTES)
    factor = (most / SMALLEST_BYTES) ** (1 / (NUM_SIZES - 1))
    return [4 * round(SMALLEST_BYTES * factor**power / 4) for power in range(NUM_SIZES)]


def _reduce_compressed(messages: Sequence[Tensor]) -> None:
    """What `bf16_compress_hook` does to each bucket."""
    world = dist.get_world_size()
    halves = [message.to(torch.bfloat16).div_(world) for message in messages]
    works = [dist.all_reduce(half, async_op=True) for half in halves]
    for work, message, half in zip(works, messages, halves, strict=True):
        work.wait()
        message.copy_(half)


def _cut(gradient: Sequence[int], most: float) -> list[int]:
    """The first buckets, up to about so many bytes."""
    sent: list[int] = []
    for size in gradient:
        room = int(most) - sum(sent)
        if room < SMALLEST_BYTES and sent:
            break
        sent.append(4 * (max(min(size, room), min(size, SMALLEST_BYTES)) // 4))
    return [size for size in sent if size]


def busy_seconds() -> float:
    """For how long the cores that this process may run on were busy since the system started.

    The mean over them, whatever kept them busy: the network's part of an all-reduce is the
    kernel's, and in no process's time.
    """
    cores = psutil.Process().cpu_affinity() if hasattr(psutil.Process, "cpu_affinity") else None
    times = psutil.cpu_times(percpu=True)
    own = [times[core] for core in cores if core < len(times)] if cores else times
    idle = [one.idle + getattr(one, "iowait", 0.0) for one in own]
    # guest time is a part of user time
    guest = [getattr(one, "guest", 0.0) + getattr(one, "guest_nice", 0.0) for one in own]
    whole = [sum(one) for one in own]
    return sum(w - i - g for w, i, g in zip(whole, idle, guest, strict=True)) / len(own)
