"""MLflow's system metrics (processor, memory, disk, network, GPU) of a run, when asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mlflow_tula.runs import Run
from mlflow_tula.stores import quiet_mlflow

INTERVAL_S = 5.0
"""MLflow's own 10 s show nothing of a run of seconds; MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL
goes before."""


@contextmanager
def system_metrics(run: Run, *, wanted: bool) -> Iterator[None]:
    """Sample the whole machine while the block runs, under `system/` on the run.

    A thread of this process samples and sends; on a CPU that is shared with what is measured, it
    costs a few milliseconds every INTERVAL_S.
    """
    if not wanted:
        yield
        return
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    with quiet_mlflow():
        monitor = SystemMetricsMonitor(
            run.run_id, sampling_interval=INTERVAL_S, resume_logging=run.continued
        )
        monitor.start()
    try:
        yield
    finally:
        with quiet_mlflow():
            monitor.finish()
