"""What a loop showed -> its MLflow run, in batches, outside the timed path.

Curves, one point every `every_n_steps` steps:
    step/step_time_s, step/gradient_norm, step/gradient_variability
Values of the loop as a whole, brought up to date at every flush (they are what searches and
`tula fit --runs` read):
    step_time_s (median), step_time_std_s, num_steps, throughput, peak_memory_bytes,
    local_batch_size, accumulation_steps, nodes, devices_per_node, global_batch_size,
    gradient_norm, gradient_variability, noise_scale, noise_scale_coverage
The tag `tula.noise_scale_doubt` says why a noise scale is a rough one, where it is.
The run is the one that is active in the training thread. Where there is none for ten seconds, or
until the loop ends, one is made, which never becomes the active run: nothing of the user's code
can run into it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlflow
from mlflow import MlflowClient

from mlflow_tula.integrations.facts import ObserverSettings
from mlflow_tula.integrations.loop import Loop
from mlflow_tula.integrations.machine import Layout, PeakMemory, hardware_of
from mlflow_tula.outbox.client import StoreClient
from mlflow_tula.runs import Run, process_tags
from mlflow_tula.stores import check_store, quiet_mlflow, store_errors
from mlflow_tula.tracking.observed_tags import DOUBT_TAG, spec_tags
from mlflow_tula.tracking.training_log import TrainingLogger

_logger = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""How long a loop waits for a run of the user's before one is made."""

_ENOUGH_STEPS = 10
_MOST_POINTS = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The run to log to; `leave_alone` where nothing may be logged now."""

    run_id: str | None = None
    leave_alone: bool = False
    client: MlflowClient | None = None


class _Record:
    """One loop in one run."""

    def __init__(self, run: Run, *, managed: bool) -> None:
        self.run = run
        self.managed = managed
        self.logger = TrainingLogger(run, interval_s=None)
        self.values: dict[str, object] = {}
        self.tags: dict[str, object] = {}
        self.described = False


class LoopSession:
    """Logs one loop; `tick` in the training thread, all else in the watch's."""

    def __init__(
        self,
        loop: Loop,
        settings: ObserverSettings,
        find_target: Callable[[], Target],
        *,
        layout: Layout,
        known: Callable[[], dict[str, Any]] = dict,
        integration: str = "tula",
    ) -> None:
        """Prepare; the run is chosen while the loop runs.

        Args:
            loop: what is observed.
            settings: names and intervals.
            find_target: which run is active; called in the training thread.
            layout: this rank's place.
            known: fields of LoopFacts that the caller knows better.
            integration: name of the integration, for the tag `mlflow.autologging`.
        """
        self.loop = loop
        self._settings = settings
        self._find_target = find_target
        self._layout = layout
        self._known = known
        self._integration = integration
        self._peak = PeakMemory(loop)
        self._points: deque[tuple[dict[str, object], int]] = deque(maxlen=_MOST_POINTS)
        self._record: _Record | None = None
        self._last_norm: object = None
        self._began = time.monotonic()
        self._tags: dict[str, object] = {}
        self._thread = threading.get_ident()
        # Held while sending: both the training thread (a run ends) and the watch's send.
        self._sending = threading.RLock()

    @property
    def run_id(self) -> str | None:
        """The run that is logged to, once it is chosen."""
        return None if self._record is None else self._record.run.run_id

    def tick(self) -> None:
        """Note a point of the curves when it is due, and see which run is active."""
        loop, gradients = self.loop, self.loop.gradients
        sampled = gradients.norm is not self._last_norm
        due = loop.step % self._settings.every_n_steps == 0
        loop.facts()
        if loop.step == 1:
            self._choose_run()
        if not (due or sampled):
            return
        begin = time.perf_counter()
        point: dict[str, object] = {}
        if sampled:
            self._last_norm = gradients.norm
            point["step/gradient_norm"] = gradients.norm
            point["step/gradient_variability"] = gradients.variability
        if due:
            point["step/step_time_s"] = loop.times.latest(self._settings.every_n_steps)
            self._choose_run()
        self._points.append((point, loop.step))
        loop.spent(begin)

    def _choose_run(self) -> None:
        """Follow the user's active run; a run that has been replaced gets its last values."""
        target, record = self._find_target(), self._record
        if target.leave_alone:
            self._points.clear()
            self._began = time.monotonic()
            return
        if target.run_id is None or target.run_id == self.run_id:
            return
        with self._sending:
            if record is not None:
                self._close(record, "FINISHED")
                self.loop.leave_run()
            self._record = _Record(_open(target.run_id, target.client), managed=False)

    def leave_run(self, run_id: str) -> None:
        """The run ends now: log what belongs to it, and look for another."""
        mine = threading.get_ident() == self._thread
        if mine and self._record is None and self._points:
            self._choose_run()
        if self.run_id != run_id:
            return
        with self._sending:
            record, self._record = self._record, None
            if record is not None:
                self._close(record, "FINISHED")
            self.loop.leave_run()
            self._began = time.monotonic()

    def flush(self) -> None:
        """Send points and values; make a run when none came."""
        with self._sending:
            if self._record is None and time.monotonic() - self._began > PATIENCE_S:
                self._record = self._make_run()
            if self._record is not None:
                self._send(self._record, last=False)

    def finish(self, status: str) -> None:
        """Send the rest and end the run, if it was made here."""
        with self._sending:
            if self._record is None and self._worth_a_run():
                target = self._find_target()
                if target.leave_alone:
                    return
                if target.run_id is None:
                    self._record = self._make_run()
                else:
                    self._record = _Record(_open(target.run_id, target.client), managed=False)
            record, self._record = self._record, None
            if record is not None:
                self._close(record, status)

    def _worth_a_run(self) -> bool:
        """A few untimed steps (a test of shapes, say) make no run of their own."""
        return bool(self._points) or self.loop.times.summary() is not None

    def _make_run(self) -> _Record | None:
        """A run of our own, in the experiment that `mlflow.start_run` would take."""
        from mlflow.tracking.context.registry import resolve_tags
        from mlflow.tracking.fluent import _get_experiment_id

        check_store()
        self._learn()
        with store_errors("make a run for this training loop"), quiet_mlflow():
            client = MlflowClient()
            tags = resolve_tags(
                {
                    "mlflow.autologging": self._integration,
                    "tula.command": "autolog",
                    **{key: str(value) for key, value in process_tags().items()},
                }
            )
            name = f"train {self._tags.get('tula.workload', 'loop')}"
            made = client.create_run(str(_get_experiment_id()), tags=tags, run_name=name)
        _logger.info("logging this training loop to the new run %s", made.info.run_id)
        return _Record(Run(made.info.run_id, made.info.experiment_id), managed=True)

    def _send(self, record: _Record, *, last: bool) -> None:
        self._learn()
        values = self._values()
        changed = {k: v for k, v in values.items() if record.values.get(k) != v}
        record.values = values
        while self._points:
            point, step = self._points.popleft()
            record.logger.log(point, step=step)
        record.logger.log(changed, step=self.loop.step)
        if not record.logger.flush():
            return
        if self._tags != record.tags:
            record.run.tag(self._tags)
            record.tags = dict(self._tags)
        if not record.described and (last or _steps(values) >= _ENOUGH_STEPS):
            record.described = True
            names = ("global_batch_size", *_BATCH)
            record.run.params({name: values.get(name) for name in names})

    def _close(self, record: _Record, status: str) -> None:
        self._send(record, last=True)
        if record.managed:
            record.run.describe(_words(record.values))
            with store_errors("end the run"), quiet_mlflow():
                record.run.client.set_terminated(record.run.run_id, status=status)

    def _learn(self) -> None:
        """Tags from what was seen."""
        facts = self.loop.facts()
        known = {key: value for key, value in self._known().items() if value is not None}
        facts = type(facts)(**{**_fields(facts), **known})
        hardware = hardware_of(facts.device_type)
        shape = facts.input_shape
        self._tags = {
            **spec_tags(facts.workload(self._settings), hardware),
            "tula.autolog": process_tags()["tula.version"],
            "tula.input_shape": None if shape is None else "x".join(map(str, shape)),
            "tula.num_threads": facts.num_threads,
            DOUBT_TAG: self.loop.noise.doubt() or None,
        }

    def _values(self) -> dict[str, object]:
        """The loop as a whole."""
        summary, layout = self.loop.times.summary(), self._layout
        gradients = self.loop.gradients
        values: dict[str, object] = {
            "peak_memory_bytes": self._peak.read(),
            "gradient_norm": _number(gradients.norm),
            "gradient_variability": _number(gradients.variability),
            "noise_scale": self.loop.noise.noise_scale(),
            "noise_scale_coverage": self.loop.noise.coverage(),
        }
        if summary is None:
            return values
        values |= {
            "step_time_s": summary.step_time_s,
            "step_time_std_s": summary.step_time_std_s,
            "num_steps": summary.num_steps,
            "nodes": layout.nodes,
            "devices_per_node": layout.devices_per_node,
        }
        if summary.key is not None:
            local, passes = summary.key.local_batch_size, summary.key.accumulation_steps
            samples = local * passes * layout.world_size
            values |= {
                "local_batch_size": local,
                "accumulation_steps": passes,
                "global_batch_size": samples,
                "throughput": samples / summary.step_time_s,
            }
        return values


_BATCH = ("local_batch_size", "accumulation_steps", "nodes", "devices_per_node")


def _open(run_id: str, client: MlflowClient | None) -> Run:
    """A run of somebody else's."""
    run = Run(run_id, "")
    if client is not None:
        run.client = StoreClient(client=client)
    return run


def _steps(values: dict[str, object]) -> int:
    count = values.get("num_steps", 0)
    return count if isinstance(count, int) else 0


def _fields(facts: Any) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in facts.__dataclass_fields__}


def _number(value: Any) -> float | None:
    """A 0-d tensor as a number; waits for the device."""
    return None if value is None else float(value)


def _words(values: dict[str, object]) -> str:
    """The first line of a run's page."""
    step = values.get("step_time_s")
    if not isinstance(step, float):
        return "A training loop, observed by `mlflow_tula.autolog()`."
    return (
        f"**{1e3 * step:.4g} ms a step** at global batch size "
        f"{values.get('global_batch_size', 'unknown')}, over {values['num_steps']} steps; observed "
        "by `mlflow_tula.autolog()`."
    )


def active_target(*, exclusive: bool = False) -> Target:
    """The run that is active in this thread, or the one that `mlflow run` has made."""
    active = mlflow.active_run()
    if active is not None:
        made_by_autologging = "mlflow.autologging" in active.data.tags
        return Target(run_id=active.info.run_id, leave_alone=exclusive and not made_by_autologging)
    return Target(run_id=os.environ.get("MLFLOW_RUN_ID") or None)
