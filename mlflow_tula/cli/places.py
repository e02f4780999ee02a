"""The folder that a command works in: writable, what is kept in it, and failures after the start.

Exit code 2 promises that nothing was started; once the work has begun, a full disk or a store
that has gone away is a failure of the work, exit code 1, and what was measured is kept.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlflow_tula.errors import StoreError, WorkFailedError

if TYPE_CHECKING:
    from mlflow_tula.runs import Place

_NOT_THE_REQUEST = frozenset({"resume", "tracking_uri", "output_dir"})
"""What may differ from the command that was broken off."""
_LONGEST_PATH = 200


def check_output(folder: Path) -> None:
    """Raise StoreError unless the folder, or the one it would be made in, can be written.

    Called before anything is made: a folder that cannot be used leaves no run behind.
    """
    there = folder.absolute()
    try:
        while not there.exists() and there != there.parent:
            there = there.parent
        with tempfile.NamedTemporaryFile(dir=there, prefix=".tula-"):
            pass
    except OSError as error:
        raise StoreError(
            f"cannot write below {_short(there)}: {error.strerror or error}; choose another "
            f"--output-dir than {_short(folder)}"
        ) from error


def _short(folder: Path) -> str:
    """A path as a line can hold it."""
    text = str(folder)
    return text if len(text) <= _LONGEST_PATH else f"{text[:_LONGEST_PATH]}... ({len(text)} long)"


def make_place(folder: Path, values: Mapping[str, Any]) -> Place:
    """Where the run of this command can be gone on with, and what a store does not take waits."""
    from mlflow_tula.runs import Place

    asked = {name: value for name, value in values.items() if name not in _NOT_THE_REQUEST}
    return Place(folder=folder, request=asked, resume=values["resume"])


class Progress:
    """Whether the work has begun: with the first probe, or the first training step."""

    def __init__(self) -> None:
        """It has not."""
        self.begun = False

    def then(self, on_event: Callable[[Any], None]) -> Callable[[Any], None]:
        """Note the first event of work, and pass every event on."""

        def tell(event: Any) -> None:
            began = event.kind == "probe_started" or getattr(event, "step", 0) > 0
            self.begun = self.begun or began
            on_event(event)

        return tell


@contextmanager
def work_may_fail() -> Iterator[Progress]:
    """Turn a StoreError into a WorkFailedError where it comes after the work has begun."""
    progress = Progress()
    try:
        yield progress
    except StoreError as error:
        if not progress.begun:
            raise
        raise WorkFailedError(f"{error} (what was measured is kept)") from error
