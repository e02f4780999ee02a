"""A training run's numbers, on their way to MLflow without holding up a step.

One `log_batch` of a thousand values costs about as much as one `log_metric`, so values are
collected and sent by a thread every few seconds. A store that stalls or goes away costs training
nothing: values wait, the oldest are dropped when too many do, and one warning says so.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from mlflow_tula.runs import Run, log_batch

_logger = logging.getLogger(__name__)

_MOST_WAITING = 200_000
_CHUNK = 5_000
_CLOSE_TIMEOUT_S = 30.0


class TrainingLogger:
    """Collects metrics and sends them every `interval_s` seconds; a context manager.

    Use as `train(..., on_event=logger)` (it takes TrainEvents), or call `log`.

        with start_run("vgg11.digits", command="train") as run, TrainingLogger(run) as logger:
            logger.log({"train_loss": 0.3}, step=10)
    """

    def __init__(self, run: Run, *, interval_s: float | None = 2.0) -> None:
        """Log to this run; the thread starts with the first value. None: the owner flushes."""
        self.run = run
        self.dropped = 0
        self._interval_s = interval_s
        self._waiting: deque[tuple[str, object, int]] = deque()
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._leave = threading.Event()
        self._thread: threading.Thread | None = None
        self._warned = False

    def __enter__(self) -> Self:
        """Nothing to open."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Send what is left."""
        self.close()

    def __call__(self, event: Any) -> None:
        """Take a TrainEvent: its steps under `step/`, its epoch record under the plain names."""
        for record in getattr(event, "steps", ()):
            metrics = {f"step/{name}": value for name, value in record.metrics().items()}
            self.log(metrics, step=record.step)
        record = getattr(event, "record", None)
        if record is not None:
            self.log({**record.metrics(), "epoch": record.epoch}, step=record.step)

    def log(self, metrics: Mapping[str, object], *, step: int) -> None:
        """Take metrics of one step; returns at once."""
        with self._lock:
            self._waiting.extend((name, value, step) for name, value in metrics.items())
            while len(self._waiting) > _MOST_WAITING:
                self._waiting.popleft()
                self.dropped += 1
        if self._interval_s is None:
            return
        if self._thread is None and not self._leave.is_set():
            self._thread = threading.Thread(target=self._work, name="tula-log", daemon=True)
            self._thread.start()

    def flush(self) -> bool:
        """Send everything now; False (and a warning, once) when the store does not take it."""
        with self._sending:
            while True:
                with self._lock:
                    chunk = [
                        self._waiting.popleft() for _ in range(min(_CHUNK, len(self._waiting)))
                    ]
                if not chunk:
                    return True
                try:
                    log_batch(self.run.client, self.run.run_id, metrics=chunk)
                except Exception as error:
                    with self._lock:
                        self._waiting.extendleft(reversed(chunk))
                    if not self._warned:
                        _logger.warning("training goes on, but is not logged: %s", error)
                    self._warned = True
                    return False

    def close(self) -> None:
        """Stop the thread and send what is left."""
        self._leave.set()
        if self._thread is not None:
            self._thread.join(timeout=_CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                _logger.warning("the store still takes values after %s s", _CLOSE_TIMEOUT_S)
                return
        if not self.flush() or self.dropped:
            left = len(self._waiting) + self.dropped
            _logger.warning("%s values of this training were not logged", left)

    def _work(self) -> None:
        """Send at intervals until closed."""
        while not self._leave.wait(self._interval_s):
            self.flush()
