"""A recorded profile in the place of a measured one; everything after it is as `tula main` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlflow_tula.cli.flow import Values
from mlflow_tula.cli.places import Progress
from mlflow_tula.cli.sweep import Sweep

if TYPE_CHECKING:
    from mlflow_tula.demo import Recording
    from mlflow_tula.runs import Run
    from mlflow_tula.table import ProfileTable
    from mlflow_tula.workloads.job import Job


class Replay(Sweep):
    """A sweep whose measurements are there already."""

    def __init__(self, run: Run, job: Job, recording: Recording, values: Values) -> None:
        """Take the run, the job that was measured, its recording, and the command's options."""
        self._recording, self._table = recording, recording.replayed()
        super().__init__(run, job, self._table.hardware, values, Progress())

    def measure(self) -> ProfileTable:
        """The recorded table; kept and registered as one that was measured now."""
        self.take(self._table)
        return self._table

    def log(self, table: ProfileTable, **more: Any) -> None:
        """As a sweep's, and the run says that nothing was measured in it."""
        words = self._recording
        notes = [f"a replay: measured on {words.recorded_on} by `{words.profile_command}`"]
        if words.convergence:
            notes.append(f"epochs to a {words.target}: `{words.training_command}`")
        super().log(table, notes=notes, **more)
