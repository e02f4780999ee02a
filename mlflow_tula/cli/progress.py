"""Progress on stderr: what is being measured, how far it is, how long it still takes.

On a terminal a rich bar; elsewhere (a log file, `mlflow run`) one line a finished probe or epoch.
Both pass every event on, to whoever logs it.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import click

from mlflow_tula.cli.render import num_bytes, seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.progress import Progress


class _Bar:
    """A rich bar on a terminal, nothing elsewhere; a context manager."""

    def __init__(self, then: Callable[[Any], None]) -> None:
        """Pass every event on to `then`."""
        self.then = then
        self._bar: Progress | None = None
        self._task: Any = None

    def __enter__(self) -> Self:
        """Begin to draw."""
        if sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.SpinnerColumn(),
                progress.TextColumn("{task.description}"),
                progress.BarColumn(bar_width=24),
                progress.TextColumn("{task.fields[left]}"),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task("starting", total=None, left="")
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave a clean line."""
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        else:
            click.echo(text, err=True)

    def show(self, text: str, done: float, total: float | None, left: float | None) -> None:
        """Where the work is; nothing without a terminal."""
        if self._bar is not None:
            rest = f"about {_time_left(left)}" if left is not None and left >= 1 else ""
            self._bar.update(self._task, description=text, completed=done, total=total, left=rest)


class TrainProgress(_Bar):
    """Takes the events of `train`."""

    def __call__(self, event: Any) -> None:
        """Draw, say what is worth a line, and pass on."""
        self.then(event)
        self.show(f"epoch {event.epoch}", event.step, event.total_steps, event.remaining_s)
        if event.record is not None:
            row = event.record
            self.say(
                f"epoch {row.epoch:3d}: train loss {row.train_loss:.4f}, test accuracy "
                f"{row.test_accuracy:.1%}, {seconds(row.step_time_s)} a step, "
                f"{num_bytes(row.peak_memory_bytes)}"
            )
        elif event.kind in ("started", "warning"):
            self.say(event.message)


class ProfileProgress(_Bar):
    """Takes the events of `profile`."""

    def __call__(self, event: Any) -> None:
        """Draw, say what is worth a line, and pass on."""
        self.then(event)
        if event.kind == "probe_started":
            self.show(
                f"measuring batch {_probe(event.probe)}",
                event.num_done,
                event.num_expected or None,
                event.expected_remaining_s,
            )
        elif event.kind in ("starting", "started"):
            self.show("starting the ranks", 0, None, None)
        elif event.kind == "probe_finished" and event.measurement is not None:
            self._finished(event)
        elif event.reason:
            self.say(f"{event.kind.replace('_', ' ')}: {event.reason}")

    def _finished(self, event: Any) -> None:
        row = event.measurement
        outcome = (
            f"{seconds(row.step_time_s)} a step, {num_bytes(row.peak_memory_bytes)}"
            if row.status == "ok"
            else f"{row.status}: {row.reason}"
        )
        left = event.expected_remaining_s
        rest = f", about {_time_left(left)}" if left is not None and left >= 1 else ""
        self.say(f"batch {_probe(event.probe)}: {outcome}{rest}")


def _time_left(left: float) -> str:
    """Whole seconds or minutes: an estimate has no more digits."""
    return f"{left:.0f} s left" if left < 120 else f"{left / 60:.0f} min left"


def _probe(probe: Any) -> str:
    """`64 on 2 ranks`."""
    ranks = "1 rank" if probe.world_size == 1 else f"{probe.world_size} ranks"
    return f"{probe.local_batch_size} on {ranks}"
