"""Send while the caller goes on: requests wait for the network, figures for the processor."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self


class Background:
    """Makes calls in a thread, one after the other in the order given; a context manager.

    At its end it waits for all of them and raises the error of the first that failed; those after
    it were made all the same. What interrupts the block drops the calls that have not begun.
    """

    def __init__(self) -> None:
        """The thread starts with the first call."""
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tula-send")
        self._calls: list[Future[Any]] = []

    def do(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        """Make this call soon."""
        self._calls.append(self._pool.submit(call, *arguments, **named))

    def __enter__(self) -> Self:
        """Nothing to open."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for every call; an error of the block itself goes first."""
        self._pool.shutdown(wait=True, cancel_futures=error is not None)
        if error is None:
            for call in self._calls:
                call.result()
