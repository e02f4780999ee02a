"""A JSON-lines file of outcomes: appended whole, and read again after a kill at any point."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from mlflow_tula.comparing.facts import Outcome
from mlflow_tula.documents import parse_json
from mlflow_tula.errors import SchemaError, StoreError


class RecordFile:
    """Outcomes on disk, one a line.

    A line is written with one call and flushed to the disk, and counts only with its newline: what
    a kill left of a line is dropped at the next append, and its trial is run again.
    """

    def __init__(self, path: str | Path) -> None:
        """Use this file; it need not exist yet."""
        self.path = Path(path)

    def read(self) -> dict[str, Outcome]:
        """All outcomes by their trial's key; the last one of a key counts."""
        return {outcome.trial.key: outcome for outcome in self._outcomes()}

    def append(self, outcome: Outcome) -> None:
        """Add one outcome.

        Raises:
            StoreError: the file cannot be written.
        """
        line = json.dumps(outcome.to_dict(), allow_nan=False, separators=(",", ":")) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # never through a link that somebody left under this name
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
            descriptor = os.open(self.path, flags, 0o644)
            try:
                _drop_torn_end(descriptor)
                os.write(descriptor, line.encode())
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StoreError(
                f"cannot write {self.path}: {error.strerror or error}; choose another --output-dir"
            ) from error

    def _outcomes(self) -> Iterator[Outcome]:
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError) as error:
            raise StoreError(f"cannot read {self.path}: {error}") from error
        whole = text[: text.rfind("\n") + 1]
        for number, line in enumerate(whole.splitlines(), start=1):
            if not line.strip():
                continue
            try:
                document = parse_json(line, "the record")
                if not isinstance(document, dict):
                    raise SchemaError("a record must be a JSON object")
                yield Outcome.from_dict(document)
            except ValueError as error:
                raise SchemaError(
                    f"line {number} of {self.path} is no record of `tula compare`: {error}; move "
                    "the file away"
                ) from error


def _drop_torn_end(descriptor: int) -> None:
    """Cut off what follows the last newline."""
    size = end = os.fstat(descriptor).st_size
    while end > 0:
        start = max(end - 65536, 0)
        at = os.pread(descriptor, end - start, start).rfind(b"\n")
        if at >= 0:
            end = start + at + 1
            break
        end = start
    if end < size:
        os.ftruncate(descriptor, end)
