"""MLflow runs that end properly: FINISHED, FAILED, or KILLED on Ctrl-C and SIGTERM.

`start_run` resumes the run that `mlflow run` made (MLFLOW_RUN_ID), joins no other experiment then,
and otherwise makes a run of its own. Everything is logged in batches: one call costs as much as a
hundred values.

With a `Place` two things more: the same command in the same folder goes on with the run that was
broken off there, and what a store that has gone away does not take waits in an outbox.
"""

from mlflow_tula.processes import process_tags
from mlflow_tula.runs.opening import sigterm_raises, start_run
from mlflow_tula.runs.place import Place
from mlflow_tula.runs.run import MAX_PARAM, PREFIX, Run, log_batch
from mlflow_tula.runs.tags import git_tags

__all__ = [
    "MAX_PARAM",
    "PREFIX",
    "Place",
    "Run",
    "git_tags",
    "log_batch",
    "process_tags",
    "sigterm_raises",
    "start_run",
]
