"""The parent's side of a training: the ranks' events, and signals that ask for an end."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from mlflow_tula.training.facts import TrainEvent

OnEvent = Callable[[TrainEvent], None]


class Told:
    """Passes events on, and remembers the newest checkpoint's step and the last event."""

    def __init__(self, on_event: OnEvent) -> None:
        """Pass on to `on_event`."""
        self.saved_step = 0
        self._on_event = on_event
        self._last = TrainEvent(kind="started", step=0, total_steps=0, epoch=0, elapsed_s=0.0)

    def __call__(self, event: TrainEvent) -> None:
        """Look at an event and pass it on."""
        self._last = event
        if event.kind == "checkpoint":
            self.saved_step = event.step
        self._on_event(event)

    def warn(self, message: str) -> None:
        """Pass on a warning of the parent's own, at the place of the last event."""
        last = self._last
        self._on_event(
            TrainEvent(
                kind="warning",
                step=last.step,
                total_steps=last.total_steps,
                epoch=last.epoch,
                elapsed_s=last.elapsed_s,
                message=message,
            )
        )


class EventReader:
    """Reads the lines that rank 0 appended since the last look."""

    def __init__(self, path: Path) -> None:
        """Begin at the file's beginning, whether it is there yet or not."""
        self._path = path
        self._place = 0
        self._rest = b""

    def pass_on(self, on_event: OnEvent) -> None:
        """Call `on_event` for every whole new line."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._place)
                content = file.read()
        except FileNotFoundError:
            return
        self._place += len(content)
        *lines, self._rest = (self._rest + content).split(b"\n")
        for line in lines:
            on_event(TrainEvent.from_dict(json.loads(line)))


@contextmanager
def signals_kept() -> Iterator[list[int]]:
    """Collect what asks this process to end, instead of dying of it; only the main thread can.

    A signal that the caller ignores (SIGHUP under nohup) stays ignored.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def remember(number: int, frame: FrameType | None) -> None:
        received.append(number)

    known = [getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP")]
    numbers = [number for number in known if number and signal.getsignal(number) != signal.SIG_IGN]
    before = [signal.signal(number, remember) for number in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
