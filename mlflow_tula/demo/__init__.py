"""The profile that `tula demo` replays: real measurements, in recording.json beside this module.

`benchmarks/record_demo.py` has made the file; the commands that it stands for are written in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from mlflow_tula.documents import check_document
from mlflow_tula.errors import SchemaError
from mlflow_tula.files import read_json
from mlflow_tula.predictors.convergence_rows import ConvergenceRow
from mlflow_tula.specs import check_name, check_real
from mlflow_tula.table import ProfileTable

if TYPE_CHECKING:
    import pandas as pd

RECORDING_KIND = "tula.demo_recording"
RECORDING_SCHEMA_VERSION = 1
RECORDING = Path(__file__).with_name("recording.json")
MADE_BY = "python benchmarks/record_demo.py"

MARK = "(recorded)"
"""Added to the device's name when the profile is replayed. The name is hashed, so that no machine,
not even one of the same kind, has the fingerprint of the recording."""

_WORDS = ("recorded_on", "profile_command")
_TRAINING_WORDS = ("training_command", "target")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """A profile as it was measured, the epochs that trainings took, and by which commands.

    `recorded_on` is a date (ISO 8601), `target` what the trainings had to reach, in words;
    `profile_time_s` and `training_time_s` are seconds of the whole profile and of all trainings.
    Without trainings `convergence` is empty, and so is what is said of them.
    """

    table: ProfileTable
    recorded_on: str
    profile_command: str
    profile_time_s: float
    convergence: tuple[ConvergenceRow, ...] = ()
    target: str = ""
    training_command: str = ""
    training_time_s: float = 0.0

    def __post_init__(self) -> None:
        """Check every field once."""
        for name in (*_WORDS, *(_TRAINING_WORDS if self.convergence else ())):
            check_name(name, getattr(self, name))
        check_real("profile_time_s", self.profile_time_s, strict=True)
        check_real("training_time_s", self.training_time_s)

    def replayed(self) -> ProfileTable:
        """The table as it is registered: on hardware that is marked as recorded."""
        name = f"{self.table.hardware.device_name} {MARK}"
        hardware = dataclasses.replace(self.table.hardware, device_name=name)
        return dataclasses.replace(self.table, hardware=hardware)

    def convergence_frame(self) -> pd.DataFrame:
        """One row a batch size, with the columns that `fit(convergence=...)` takes."""
        import pandas as pd

        return pd.DataFrame([dataclasses.asdict(row) for row in self.convergence])

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types with `schema_version`, the words first."""
        trained = (*_TRAINING_WORDS, "training_time_s")
        return {
            "schema_version": RECORDING_SCHEMA_VERSION,
            "kind": RECORDING_KIND,
            "made_by": MADE_BY,
            **{name: getattr(self, name) for name in (*_WORDS, "profile_time_s", *trained)},
            "convergence": [dataclasses.asdict(row) for row in self.convergence],
            "table": self.table.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; a newer schema or another kind of document raises SchemaError."""
        check_document(data, kind=RECORDING_KIND, version=RECORDING_SCHEMA_VERSION)
        own = {key: data[key] for key in data if key not in ("schema_version", "kind", "made_by")}
        try:
            rows = tuple(ConvergenceRow(**row) for row in own.pop("convergence"))
            table = ProfileTable.from_dict(own.pop("table"))
            return cls(table=table, convergence=rows, **own)
        except (KeyError, TypeError) as error:
            raise SchemaError(f"the recording is incomplete: {error}") from error


def read_recording(path: Path = RECORDING) -> Recording:
    """The recording that ships with the package, or one of another file.

    Raises:
        InvalidInputError: the file is absent.
        SchemaError: it is damaged, or of a newer version.
    """
    return Recording.from_dict(read_json(path, made_by=MADE_BY))
