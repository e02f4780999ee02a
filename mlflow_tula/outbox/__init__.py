"""What a store that has gone away is to be told later.

    client = StoreClient(Outbox(folder))       # used like an MlflowClient, for what `tula` logs
    client.log_batch(run_id, metrics=...)      # sent, or kept in `folder` where nobody answers
    client.flush()                             # in order, what was kept; True when nothing is left

A server may die in the middle of a sweep: the work goes on, and what would have been logged waits
as one JSON line a call (and copies of files) until the server answers again: at the next call, at
the end of the command, at the start of the next one in the same folder, or with `tula sync`.

    operations.jsonl    the calls, in order; a line is whole once it ends with a newline
    sent.json           how many of them were sent, and which ids runs were given
    files/<number>/     what `log_artifacts` was given

A call that was sent but not ticked off, because the process was killed in between, is sent again:
values come twice with the same step and time, which MLflow shows as one; a run is not made twice.
"""

from mlflow_tula.outbox.box import OUTBOX_NAME, Outbox, find_outboxes
from mlflow_tula.outbox.calls import is_away
from mlflow_tula.outbox.client import StoreClient, WaitingRun

__all__ = ["OUTBOX_NAME", "Outbox", "StoreClient", "WaitingRun", "find_outboxes", "is_away"]
