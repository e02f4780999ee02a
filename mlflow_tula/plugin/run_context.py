"""Hardware tags on every run that is started on this machine, whoever starts it.

MLflow asks when `mlflow.start_run` creates a run. Runs of `mlflow run` and `client.create_run` are
not covered: those of `tula` and of the backend get the same tags from there. A run that is resumed
keeps the tags of its creator, hence no process id here: `tula doctor` would take a live run for a
stale one.
"""

from __future__ import annotations

import logging

from mlflow.tracking.context.abstract_context import RunContextProvider

_logger = logging.getLogger(__name__)


class HardwareContext(RunContextProvider):  # type: ignore[misc, unused-ignore]
    """`tula.hardware`, `tula.fingerprint` and the device, as registered predictors carry them."""

    def in_context(self) -> bool:
        """Every run runs somewhere."""
        return True

    def tags(self) -> dict[str, str]:
        """The tags; none, and a note in the log, where the hardware cannot be read."""
        try:
            from mlflow_tula.hardware import detect

            hardware = detect()
        except Exception as error:
            _logger.warning("no hardware tags on this run: %s", error)
            return {}
        return {
            "tula.hardware": hardware.slug,
            "tula.fingerprint": hardware.fingerprint,
            "tula.device_type": hardware.device_type,
            "tula.device_name": hardware.device_name,
        }
