"""Results -> MLflow runs, figures, tables and words: the only room that logs."""

from mlflow_tula.tracking.profiles import (
    ProbeLogger,
    log_profile,
    log_registration,
    log_workload,
    start_run,
)

__all__ = [
    "ProbeLogger",
    "log_profile",
    "log_registration",
    "log_workload",
    "start_run",
]
