"""What a failed rank tells: out of memory or something else, in one line.

Every framework words "out of memory" differently, and some messages only look like it. The one
list of both lives here; profiling and training ask `is_out_of_memory` and nothing else.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mlflow_tula.specs import Spec

FailureStatus = Literal["oom", "failed"]

_OUT_OF_MEMORY = re.compile(
    r"""
      \b(?:cuda|hip|xpu|mps(?:\s+backend)?)\s+out\s+of\s+memory      # torch's caching allocators
    | \boutofmemoryerror\b
    | \b(?:cuda|hip)(?:\s+runtime|\s+driver)?\s+error(?:\s*\(2\))?\s*:\s*out\s+of\s+memory
    | \bcuda_error_out_of_memory\b | \bcudaerrormemoryallocation\b | \bhiperroroutofmemory\b
    | \bcublas_status_alloc_failed\b | \bcudnn_status_alloc_failed\b
    | \bcusolver_status_alloc_failed\b | \bcusparse_status_alloc_failed\b
    | \bcudnn_status_internal_error_device_allocation_failed\b
    | \bunable\s+to\s+find\s+a\s+valid\s+cudnn\s+algorithm            # cuDNN without workspace
    | \bfind\s+was\s+unable\s+to\s+find\s+an\s+engine
    | \bdefaultcpuallocator:.*(?:can't|can’t|not\s+enough|failed\s+to)\s+alloc
    | \bdefaultcpuallocator:\s+not\s+enough\s+memory
    | \bstd::bad_alloc\b | \bbad\s+allocation\b | \bmemoryerror\b
    | \bcannot\s+allocate\s+memory\b | \benomem\b
    | (?:\b|_)result_error_out_of_(?:(?:device|host)_memory|resources)\b  # Intel's runtimes
    | \bunable\s+to\s+allocate\s+[\d.]+\s+[kmgtp]?i?b\b                # numpy
    | \bunable\s+to\s+mmap\s+\d+\s+bytes.*cannot\s+allocate
    | \bnccl\b.*\bout\s+of\s+memory\b
    """,
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)
_LOOK_ALIKE = re.compile(
    r"too\s+many\s+open\s+files|no\s+space\s+left\s+on\s+device|illegal\s+memory\s+access"
    r"|out\s+of\s+(?:bounds|range|shared\s+memory\s+slots)",
    re.IGNORECASE,
)
_ERROR_LINE = re.compile(r"error\b|exception\b|no module named|terminate called", re.IGNORECASE)
_LAUNCHER = re.compile(r"elastic|^[EWI]\d{4} |^\[?rank\d|exitcode|traceback", re.IGNORECASE)
_MAX_REASON = 300
_GUESSES = {
    None: ", probably by the kernel because memory ran out",
    True: " by the kernel because memory ran out",
    False: ", and not for memory: the kernel killed nothing for it",
}
_VMSTAT = Path("/proc/vmstat")


def is_out_of_memory(failure: BaseException | str | None) -> bool:
    """Whether an exception (or its text) says that memory ran out, on a device or the host.

    Known are torch's allocators for CUDA, HIP, MPS and XPU, the CPU allocator, cuBLAS and cuDNN
    without workspace, `std::bad_alloc`, `MemoryError` and numpy's allocation error. An illegal
    memory access, a full disk or too many open files is none of them. The chain of causes counts.
    """
    if failure is None:
        return False
    if isinstance(failure, str):
        return bool(_OUT_OF_MEMORY.search(failure)) and not _LOOK_ALIKE.search(failure)
    seen: set[int] = set()
    link: BaseException | None = failure
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, MemoryError) or type(link).__name__ == "OutOfMemoryError":
            return True
        if is_out_of_memory(str(link)):
            return True
        link = link.__cause__ or link.__context__
    return False


def memory_kills() -> int | None:
    """Processes that this machine's kernel killed for memory since it started; None: unknown."""
    try:
        lines = _VMSTAT.read_text().splitlines()
    except OSError:
        return None
    counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
    return int(counts[0]) if counts and counts[0].isdigit() else None


def one_line(failure: BaseException | str) -> str:
    """The first line that says something, shortened; an exception carries its class's name."""
    text = failure if isinstance(failure, str) else str(failure)
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else ""
    if not isinstance(failure, str):
        first = f"{type(failure).__name__}: {first}" if first else type(failure).__name__
    return first if len(first) <= _MAX_REASON else f"{first[: _MAX_REASON - 3]}..."


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFailure(Spec):
    """Why a group of ranks ended: the first rank that failed, and its own words.

    `kind` is the exception's class name, the signal's name, `timeout` or `exit`; `rank` is None
    where no single rank can be blamed.
    """

    rank: int | None
    status: FailureStatus
    kind: str
    message: str
    exit_code: int | None = None
    time: float = 0.0
    traceback: str = ""

    @property
    def reason(self) -> str:
        """One line for a table: which rank, and why."""
        where = "" if self.rank is None else f"rank {self.rank}: "
        return f"{where}{self.message}"

    @classmethod
    def from_exception(cls, rank: int, error: BaseException, **rest: Any) -> RankFailure:
        """What a rank reports of its own exception."""
        return cls(
            rank=rank,
            status="oom" if is_out_of_memory(error) else "failed",
            kind=type(error).__name__,
            message=one_line(error),
            **rest,
        )

    @classmethod
    def from_exit(
        cls,
        rank: int | None,
        exit_code: int,
        log_tail: str = "",
        *,
        for_memory: bool | None = None,
    ) -> RankFailure:
        """What an exit code tells where a rank left no words of its own.

        SIGKILL is how the kernel frees memory. Where it counts such kills, `for_memory` says
        whether there was one; where it does not (None), SIGKILL is taken for one.
        """
        if exit_code < 0:
            try:
                name = signal.Signals(-exit_code).name
            except ValueError:
                name = f"signal {-exit_code}"
            killed = -exit_code == getattr(signal, "SIGKILL", 9)
            guess = _GUESSES[for_memory] if killed else ""
            memory = killed and for_memory is not False
            status: FailureStatus = "oom" if memory or is_out_of_memory(log_tail) else "failed"
            return cls(
                rank=rank,
                status=status,
                kind=name,
                message=f"killed by {name}{guess}",
                exit_code=exit_code,
            )
        last = _last_error(log_tail)
        words = f": {one_line(last)}" if last else ""
        return cls(
            rank=rank,
            status="oom" if is_out_of_memory(log_tail) else "failed",
            kind="exit",
            message=f"ended with exit code {exit_code}{words}",
            exit_code=exit_code,
        )


def _last_error(log_tail: str) -> str:
    """The last line of a log that reads like an error of the program, not of its launcher."""
    lines = [line.strip() for line in log_tail.splitlines() if line.strip()]
    wordy = [line for line in lines if _ERROR_LINE.search(line) and not _LAUNCHER.search(line)]
    return wordy[-1] if wordy else ""


def root_cause(failures: list[RankFailure]) -> RankFailure:
    """The failure to blame: out of memory first, then own faults before lost peers, then time.

    A rank that waits in an all-reduce fails because its peer is gone; that is never the cause.
    """
    if not failures:
        raise ValueError("root_cause needs at least one failure")
    return min(failures, key=lambda f: (f.status != "oom", _is_lost_peer(f.message), f.time))


def _is_lost_peer(message: str) -> bool:
    """Whether the words are those of a rank whose peer went away."""
    return bool(
        re.search(
            r"connection\s+(?:closed|reset|refused)|broken\s+pipe|gloo|nccl|socket|sigterm"
            r"|process\s+group|watchdog|store",
            message,
            re.IGNORECASE,
        )
    )
