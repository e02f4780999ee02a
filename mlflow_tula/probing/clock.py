"""Clocks that see a device's work to its end.

An accelerator runs behind the host: reading the host's clock after a call times the call, not the
work (10 to 50 times too fast). A `DeviceClock` gives marks; the time between two marks includes
all work queued between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class DeviceClock(Protocol):
    """Marks in a device's stream of work, and the seconds between two of them."""

    def mark(self) -> Any:
        """A point after everything queued so far."""

    def synchronize(self) -> None:
        """Wait until the device has done everything queued so far."""

    def seconds(self, start: Any, end: Any) -> float:
        """Time between two marks; call after `synchronize`."""


class HostClock:
    """The monotonic clock, for devices that finish before a call returns (CPU)."""

    def mark(self) -> float:
        """Now."""
        return time.perf_counter()

    def synchronize(self) -> None:
        """Nothing is pending."""

    def seconds(self, start: float, end: float) -> float:
        """The difference."""
        return end - start


class SynchronizedClock:
    """The monotonic clock read after `wait`: right for any asynchronous device, at some overhead.

    Args:
        wait: returns when the device has done everything queued (`torch.mps.synchronize`).
        now: the clock; a fake device brings its own.
    """

    def __init__(
        self, wait: Callable[[], None], now: Callable[[], float] = time.perf_counter
    ) -> None:
        """Keep both."""
        self._wait = wait
        self._now = now

    def mark(self) -> float:
        """The time when everything queued so far is done."""
        self._wait()
        return self._now()

    def synchronize(self) -> None:
        """Wait for the device."""
        self._wait()

    def seconds(self, start: float, end: float) -> float:
        """The difference."""
        return end - start


class CudaClock:
    """CUDA events on the current stream: marks cost no waiting inside a step."""

    def __init__(self, device: torch.device) -> None:
        """Time the work of `device`."""
        self._device = device

    def mark(self) -> Any:
        """An event behind everything queued so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)

    def seconds(self, start: Any, end: Any) -> float:
        """Milliseconds between two events, as seconds."""
        return float(start.elapsed_time(end)) / 1e3


def clock_for(device: torch.device) -> DeviceClock:
    """The clock that fits a device."""
    if device.type == "cpu":
        return HostClock()
    if device.type == "cuda":
        return CudaClock(device)
    module = getattr(torch, device.type)
    return SynchronizedClock(module.synchronize)
