"""Whether other processes took this one's cores during a trial."""

from __future__ import annotations

from pathlib import Path

CONTENDED_SHARE = 0.15
"""Share of runnable time spent waiting for a core above which a trial is repeated."""


def run_queue_wait_s() -> float | None:
    """Seconds that all threads of this process were runnable but had no core; None if unknown.

    The second field of /proc/self/task/*/schedstat, nanoseconds (Linux with scheduler statistics).
    """
    total = 0
    try:
        for task in Path("/proc/self/task").iterdir():
            total += int((task / "schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return total / 1e9


def is_contended(waiting_share: float | None, cpu_ratio: float, best_cpu_ratio: float) -> bool:
    """Whether a trial should be repeated.

    Args:
        waiting_share: run-queue wait over wait plus CPU time, where the kernel tells.
        cpu_ratio: process time over wall time and thread.
        best_cpu_ratio: the highest such ratio of this world size so far; used where the kernel
            tells nothing.
    """
    if waiting_share is not None:
        return waiting_share > CONTENDED_SHARE
    return cpu_ratio < 0.7 * best_cpu_ratio
