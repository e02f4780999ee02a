"""An open MLflow run, and how values are logged to it: in batches, under names it takes."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from mlflow.entities import Metric, Param, RunTag

from mlflow_tula.outbox import Outbox, StoreClient
from mlflow_tula.stores import masked, store_errors

_logger = logging.getLogger(__name__)

PREFIX = "tula."
"""Of every parameter: `mlflow run` logs its own under the plain names, in its own spelling."""

MAX_PARAM = 500
_MAX_NOTE = 4500
_BATCH = 900
_PER_KIND = 90


class Run:
    """An open MLflow run. Set `interrupted` for a run that was stopped but kept what it had.

    `continued` says that the run was broken off earlier, and holds what was logged until then.
    """

    def __init__(
        self,
        run_id: str,
        experiment_id: str,
        *,
        continued: bool = False,
        outbox: Outbox | None = None,
    ) -> None:
        """Take the run's id and its experiment's."""
        self.run_id = run_id
        self.experiment_id = experiment_id
        self.interrupted = False
        self.continued = continued
        self.client = StoreClient(outbox)

    def tag(self, tags: Mapping[str, object]) -> None:
        """Set tags; None is left out."""
        self.log(tags=tags)

    def params(self, params: Mapping[str, object]) -> None:
        """Log parameters under `tula.`; None is left out, a long one becomes an artifact too.

        A parameter that the run already has keeps its first value, as MLflow demands.
        """
        known = self.client.get_run(self.run_id).data.params
        chosen: dict[str, str] = {}
        for name, value in params.items():
            if value is None:
                continue
            key, text = PREFIX + _clean(name), masked(value)
            if len(text) > MAX_PARAM:
                where = f"params/{_clean(name)}.txt"
                self.client.log_text(self.run_id, text, where)
                note = f"... (cut; the whole text is the artifact {where})"
                text = text[: MAX_PARAM - len(note)] + note
            if key not in known:
                chosen[key] = text
            elif known[key] != text:
                _logger.warning("parameter %s stays %.60s (now: %.60s)", key, known[key], text)
        self.log(params=chosen)

    def metrics(self, metrics: Mapping[str, object], *, step: int = 0) -> None:
        """Log numbers at one step; what is not a finite number is left out."""
        self.log(metrics=[(name, value, step) for name, value in metrics.items()])

    def log(
        self,
        *,
        metrics: Iterable[tuple[str, object, int]] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, object] | None = None,
    ) -> None:
        """Log (name, value, step) metrics, finished parameters and tags, in few requests."""
        log_batch(self.client, self.run_id, metrics=metrics, params=params, tags=tags)

    def describe(self, markdown: str) -> None:
        """Set what people read first on the run's page."""
        if len(markdown) > _MAX_NOTE:
            markdown = markdown[: _MAX_NOTE - 20].rsplit("\n", 1)[0] + "\n\n(cut)"
        self.tag({"mlflow.note.content": markdown})

    def files(self, folder: str | Path) -> None:
        """Log every file of a folder as artifacts of the run."""
        with store_errors("store the run's files"):
            self.client.log_artifacts(self.run_id, str(folder))


class _Logs(Protocol):
    """What `log_batch` needs of a client."""

    def log_batch(
        self, run_id: str, metrics: Any = ..., params: Any = ..., tags: Any = ...
    ) -> Any: ...


def log_batch(
    client: _Logs,
    run_id: str,
    *,
    metrics: Iterable[tuple[str, object, int]] = (),
    params: Mapping[str, str] | None = None,
    tags: Mapping[str, object] | None = None,
) -> None:
    """`MlflowClient.log_batch` without its limits: chunks, clean names, finite numbers only."""
    now = int(time.time() * 1000)
    numbers = [
        Metric(_clean(name), value, now, step)
        for name, given, step in metrics
        if (value := _number(given)) is not None
    ]
    texts = [Param(name, value) for name, value in (params or {}).items()]
    notes = [RunTag(key, str(value)) for key, value in (tags or {}).items() if value is not None]
    while numbers or texts or notes:
        with store_errors("log to the run"):
            client.log_batch(
                run_id, metrics=numbers[:_BATCH], params=texts[:_PER_KIND], tags=notes[:_PER_KIND]
            )
        numbers, texts, notes = numbers[_BATCH:], texts[_PER_KIND:], notes[_PER_KIND:]


def _clean(name: str) -> str:
    """A name that MLflow takes."""
    return re.sub(r"[^\w./ -]+", "_", name)[:240]


def _number(value: Any) -> float | None:
    """A finite float, or None."""
    if value is None or isinstance(value, (str, bytes)):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
