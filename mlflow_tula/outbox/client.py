"""The calls that `tula` makes while it works, sent or kept."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from mlflow import MlflowClient
from mlflow.entities import DatasetInput, Metric, Param, RunTag

from mlflow_tula.outbox.box import Outbox
from mlflow_tula.outbox.calls import is_away, send_call
from mlflow_tula.stores import answers

_logger = logging.getLogger(__name__)

_RETRY_S = 10.0
_TRUST_S = 5.0
_NEVER = -1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class _RunInfo:
    run_id: str
    experiment_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _RunData:
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingRun:
    """In place of MLflow's run, while nobody answers: nothing is known of it but its id."""

    info: _RunInfo
    data: _RunData = field(default_factory=_RunData)


class StoreClient:
    """The calls that `tula` makes while it works; with an outbox none fails for want of a store."""

    def __init__(self, outbox: Outbox | None = None, *, client: MlflowClient | None = None) -> None:
        """Without an outbox every call goes straight to MLflow, through `client` where given."""
        self.client = client or MlflowClient()
        self.outbox = outbox
        self._lock = threading.RLock()
        self._asked = self._answered = _NEVER
        self._told = False

    def create_run(
        self,
        experiment_id: str,
        start_time: int | None = None,
        tags: Mapping[str, str] | None = None,
        run_name: str | None = None,
    ) -> Any:
        """Make a run; returns MLflow's, or a WaitingRun."""
        local = "" if self.outbox is None else self.outbox.local_id()
        made = self._do(
            "create_run",
            run_id=local,
            experiment_id=experiment_id,
            start_time=start_time or int(time.time() * 1000),
            run_name=run_name,
            tags=dict(tags or {}),
        )
        if made is not None:
            return made
        return WaitingRun(info=_RunInfo(run_id=local, experiment_id=experiment_id))

    def log_batch(
        self,
        run_id: str,
        metrics: Sequence[Metric] = (),
        params: Sequence[Param] = (),
        tags: Sequence[RunTag] = (),
    ) -> None:
        """Log values, parameters and tags."""
        self._do(
            "log_batch",
            run_id=run_id,
            metrics=[(one.key, one.value, one.timestamp, one.step) for one in metrics],
            params=[(one.key, one.value) for one in params],
            tags=[(one.key, one.value) for one in tags],
        )

    def set_terminated(self, run_id: str, *, status: str) -> None:
        """End a run."""
        self._do("set_terminated", run_id=run_id, status=status, end_time=int(time.time() * 1000))

    def log_artifacts(self, run_id: str, folder: str) -> None:
        """Log every file of a folder."""
        self._do("log_artifacts", Path(folder), run_id=run_id)

    def log_text(self, run_id: str, text: str, name: str) -> None:
        """Log a text as a file."""
        self._do("log_text", run_id=run_id, text=text, name=name)

    def log_table(self, run_id: str, *, data: Any, artifact_file: str) -> None:
        """Log a frame for MLflow's table view."""
        columns = json.loads(data.to_json(orient="split", index=False))
        self._do("log_table", run_id=run_id, data=columns, name=artifact_file)

    def log_inputs(self, run_id: str, datasets: Sequence[DatasetInput]) -> None:
        """Log datasets that a run has used."""
        plain = [
            {"dataset": dict(one.dataset), "tags": {tag.key: tag.value for tag in one.tags}}
            for one in datasets
        ]
        self._do("log_inputs", run_id=run_id, datasets=plain)

    def get_run(self, run_id: str) -> Any:
        """A run, or one of which nothing is known while nobody answers."""
        return self._ask(
            lambda: self.client.get_run(run_id),
            WaitingRun(info=_RunInfo(run_id=run_id, experiment_id="")),
        )

    def search_runs(self, experiment_ids: Sequence[str], condition: str) -> list[Any]:
        """Runs, none while nobody answers."""
        return cast(
            "list[Any]",
            self._ask(lambda: list(self.client.search_runs(list(experiment_ids), condition)), []),
        )

    def list_artifacts(self, run_id: str) -> list[Any]:
        """Files of a run, none while nobody answers."""
        return cast("list[Any]", self._ask(lambda: self.client.list_artifacts(run_id), []))

    def flush(self, patience_s: float = 0.0) -> bool:
        """Send what waits, trying for so long; whether nothing is left."""
        deadline = time.monotonic() + patience_s
        while self.outbox is not None and len(self.outbox):
            with self._lock:
                if answers() and self.outbox.send(self.client) == 0:
                    _logger.info("the store answers again and has been told everything")
                    self._told = False
                    return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(min(1.0, patience_s))
        return True

    def _do(self, call: str, files: Path | None = None, /, **facts: Any) -> Any:
        """Make the call, or keep it behind those that wait already."""
        operation = {"call": call, **facts}
        if self.outbox is None:
            return send_call(self.client, operation, {}, None, files)
        with self._lock:
            if self._is_there():
                try:
                    return send_call(self.client, operation, {}, None, files)
                except Exception as error:
                    if not is_away(error):
                        raise
                    self._answered = _NEVER
                    self._tell(error)
            self.outbox.keep(operation, files)
        return None

    def _ask(self, question: Any, otherwise: Any) -> Any:
        if self.outbox is None:
            return question()
        with self._lock:
            if not self._is_there():
                return otherwise
            try:
                return question()
            except Exception as error:
                if not is_away(error):
                    raise
                self._answered = _NEVER
                self._tell(error)
        return otherwise

    def _is_there(self) -> bool:
        """Whether a call can be sent now, without waiting long for a store that is away."""
        now = time.monotonic()
        assert self.outbox is not None, "only asked with an outbox"
        if len(self.outbox):
            if now - self._asked < _RETRY_S:
                return False
            self._asked = now
            return self.flush()
        if now - self._answered > _TRUST_S:
            if not answers():
                self._asked = now
                self._tell(None)
                return False
            self._answered = now
        return True

    def _tell(self, error: BaseException | None) -> None:
        """Say once that the store is away."""
        if not self._told:
            reason = f" ({type(error).__name__})" if error is not None else ""
            _logger.warning(
                "the MLflow store does not answer%s: the work goes on, and what is logged waits in "
                "%s",
                reason,
                self.outbox.folder if self.outbox is not None else "",
            )
        self._told = True
