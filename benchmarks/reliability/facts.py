"""What a part of the reliability campaign found, as JSON lines that `report.py` reads.

    with Recorder("crash", short=short, seed=seed) as record:
        record(Outcome(part="crash", case="train, SIGKILL", injected=1, survived=1, lost=0))

Lines are appended to build/reliability/<part>.jsonl as they come, behind one line that says when,
with what and on which machine; a campaign that is broken off keeps what it had.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

FOLDER = Path(__file__).resolve().parents[2] / "build" / "reliability"
VERSIONS = ("mlflow-tula", "mlflow", "torch", "numpy", "pandas", "scipy", "sqlalchemy")

Kind = Literal["fault", "input", "check"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One fault, one lot of inputs or one check; `report.py` adds up those of one case.

    kind "fault": `injected` faults, of which `survived` lost nothing and `lost` lost something.
    kind "input": `injected` inputs tried, of which `lost` crashed, hung or changed something.
    kind "check": `injected` checks, of which `lost` failed; `detail` says what was found.
    """

    part: str
    case: str
    injected: int = 1
    survived: int = 0
    lost: int = 0
    detail: str = ""
    kind: Kind = "fault"

    def __post_init__(self) -> None:
        """Every fault ends one way or the other."""
        if self.survived + self.lost != self.injected:
            raise ValueError(
                f"survived and lost must add up to injected, not {self.survived} + {self.lost} "
                f"to {self.injected}, in {self.part} {self.case}"
            )


class Recorder:
    """Appends the outcomes of one part to its file; a context manager, and called with each."""

    def __init__(
        self, part: str, *, short: bool, seed: int | None = None, folder: Path | None = None
    ) -> None:
        """Begin the part's file anew when entered.

        Args:
            part: the script's name, and the file's.
            short: whether this is the shortened campaign; the report says so.
            seed: what the faults were drawn from.
            folder: where to write; build/reliability when None.
        """
        self.part, self.lost = part, 0
        self.path = (folder or FOLDER) / f"{part}.jsonl"
        self._head = {"header": True, "part": part, "short": short, "seed": seed, **here()}
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        """Write the first line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self._head) + "\n")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write the last line; a part that broke says so."""
        seconds = round(time.monotonic() - self._began, 1)
        self._append({"end": True, "seconds": seconds, "broken": repr(error) if error else ""})

    def __call__(self, outcome: Outcome) -> None:
        """Keep one outcome, and say it where something was lost."""
        self.lost += outcome.lost
        self._append(asdict(outcome))
        if outcome.lost:
            print(f"LOST {outcome.case}: {outcome.detail}", file=sys.stderr, flush=True)

    @property
    def exit_code(self) -> int:
        """1 where something was lost."""
        return int(self.lost > 0)

    def _append(self, document: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(document) + "\n")


def here() -> dict[str, Any]:
    """Date, versions and machine of this campaign."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": f"{_cpu_model()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in VERSIONS},
    }


def _cpu_model() -> str:
    from mlflow_tula.hardware import detect

    return detect().cpu_model or platform.machine()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"
