"""What can go wrong, as one tree.

    TulaError
    ├── InvalidInputError (ValueError)      the request was wrong: exit code 2
    │   ├── UnknownNameError                a model, dataset, objective ... that does not exist
    │   ├── TableError                      measurements that cannot be used
    │   └── SchemaError                     a stored file of another schema, or not ours
    ├── NotRegisteredError (LookupError)    nothing in the registry for this question: exit code 2
    ├── StoreError (OSError)                a folder, store or server does not answer: exit code 2
    │   └── DanglingAliasError              an alias points to a version that was deleted
    └── WorkFailedError (RuntimeError)      the work began and failed: exit code 1
        ├── ProfilingError
        └── TrainingError

    TulaWarning (UserWarning)
    ├── ExtrapolationWarning                asked beyond what was measured
    ├── TooFewProbesWarning                 a form could not be identified
    ├── MayNotReachTargetWarning            some sizes never reached the target
    └── SlowRankWarning                     one rank holds the others up

A message states the rule, the value and the way out, in one line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class TulaError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code: ClassVar[int] = 1


class InvalidInputError(TulaError, ValueError):
    """The request was wrong; nothing was started."""

    exit_code: ClassVar[int] = 2


class UnknownNameError(InvalidInputError):
    """A name that does not exist; the message suggests the nearest that do."""

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        """Make the message from the kind of name, the name and the names that exist."""
        choices = sorted(known)
        near = _nearest(name.lower(), choices)
        if near:
            way_out = f"did you mean {' or '.join(near)}?"
        elif len(choices) <= 12:
            way_out = f"known: {', '.join(choices)}"
        else:
            way_out = f"known: {', '.join(choices[:6])}, ... ({len(choices)} in all)"
        super().__init__(f"unknown {kind} {name!r}: {way_out}{' ' + hint if hint else ''}")
        self.kind = kind
        self.name = name
        self.suggestions = tuple(near)


class TableError(InvalidInputError):
    """Measurements that cannot be used; names the column and the row."""


class SchemaError(InvalidInputError):
    """A stored document of another schema version, or not a document of ours."""


def _nearest(name: str, choices: list[str]) -> list[str]:
    """Up to three choices like `name`, the most alike first, equals in alphabetical order."""

    def likeness(choice: str) -> float:
        return difflib.SequenceMatcher(None, name, choice).ratio()

    alike = [choice for choice in choices if likeness(choice) >= 0.5]
    return sorted(alike, key=lambda choice: (-likeness(choice), choice))[:3]


class NotRegisteredError(TulaError, LookupError):
    """Nothing is registered for this question."""

    exit_code: ClassVar[int] = 2

    def __str__(self) -> str:
        """The message as written (LookupError's own subclasses would quote it)."""
        return str(self.args[0]) if self.args else ""


class StoreError(TulaError, OSError):
    """A folder, store or server that cannot be read or written."""

    exit_code: ClassVar[int] = 2


class DanglingAliasError(StoreError):
    """An alias of a registered model points to a version that was deleted; `version` says which."""

    def __init__(self, name: str, alias: str, version: int) -> None:
        """Say what is wrong, and the way out."""
        super().__init__(
            f"the alias {alias!r} of {name} points to version {version}, which was deleted: choose "
            f"another with `tula registry promote {name}` (the newest, or --version N)"
        )
        self.version = version


class WorkFailedError(TulaError, RuntimeError):
    """The work began and failed; what was measured is kept."""


class ProfilingError(WorkFailedError):
    """No probe gave a usable measurement."""


class TrainingError(WorkFailedError):
    """A training run ended before its last epoch."""


class TulaWarning(UserWarning):
    """Base of every warning this package issues."""


class ExtrapolationWarning(TulaWarning):
    """The question lies beyond what was measured."""


class TooFewProbesWarning(TulaWarning):
    """Too few rows to identify a form; a simpler one with a wider interval is used."""


class MayNotReachTargetWarning(TulaWarning):
    """Some runs at such a batch size never reached the target."""


class SlowRankWarning(TulaWarning):
    """One rank's steps take clearly longer than the others', who wait for it in every step."""
