"""A sweep: probe after probe until the search, the time or the person says stop."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from mlflow_tula.errors import ProfilingError, TulaError
from mlflow_tula.files import write_json
from mlflow_tula.probes import Probe
from mlflow_tula.probing.events import EventKind, ProfileEvent, SweepRequest
from mlflow_tula.probing.measure import Measurer, row_of
from mlflow_tula.probing.plan import smaller
from mlflow_tula.search import FullSearch, PartialSearch, Search
from mlflow_tula.specs import Workload
from mlflow_tula.table import LinkMeasurement, Measurement, ProfileTable

logger = logging.getLogger(__name__)

AUTO_BUDGET_S = 150.0
AUTO_QUICK_BUDGET_S = 75.0
"""The bound of a sweep where none is named: slow steps, and steps below QUICK_STEP_S."""
QUICK_STEP_S = 0.2
REPEAT_SHARE = 0.5
"""Disturbed trials are repeated in this first share of the time budget."""
MAX_VAIN_REPEATS = 2
"""A machine that stayed busy through so many repeats will not be quiet for the next one."""

_COUNTS = ("optimizer_steps", "evaluation_passes", "gradient_passes")


class Sweep:
    """The state of one sweep: its table, its ranks and its clock."""

    def __init__(
        self,
        request: SweepRequest,
        *,
        on_event: Callable[[ProfileEvent], None] | None = None,
        output: Path | None = None,
    ) -> None:
        """Nothing is started yet."""
        self.request = request
        self.table: ProfileTable | None = None
        self.reason = ""
        self._measurer = Measurer(request)
        self._on_event = on_event
        self._output = output
        self._began = time.monotonic()
        self._num_done = 0
        self._vain_repeats = 0
        self._left_out = 0
        self._candidates: list[Probe] = []

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop every rank."""
        self._measurer.close()

    @property
    def elapsed_s(self) -> float:
        """Since the sweep began, start of processes included."""
        return time.monotonic() - self._began

    @property
    def budget_s(self) -> float | None:
        """No probe is begun that would end later; the first measured step sets it where `auto`."""
        if not self.request.auto_budget:
            return self.request.time_budget_s
        ok = () if self.table is None else self.table.ok
        quick = bool(ok) and (ok[0].step_time_s or 0.0) < QUICK_STEP_S
        return AUTO_QUICK_BUDGET_S if quick else AUTO_BUDGET_S

    def start(self) -> Workload:
        """Start the ranks, who know the workload."""
        self._tell("starting")
        return self._measurer.start()

    def run(
        self, workload: Workload, candidates: Sequence[Probe], resume: ProfileTable | None
    ) -> ProfileTable:
        """Probe until the search stops and return the table.

        Raises:
            ProfilingError: no probe gave a step time; chained to the last failure.
        """
        self.table = ProfileTable(
            workload=workload,
            hardware=self.request.hardware,
            measurements=() if resume is None else resume.measurements,
            links=self.request.known_links if resume is None else resume.links,
            features=self._measurer.features,
        )
        self._candidates = list(candidates)
        self._tell("started")
        if self._unanswered():
            self._probe_links(() if resume is None else resume.links)
        while (probe := self._next_probe()) is not None:
            row = self._measure(probe)
            if row.status == "oom" and self.request.walk_down:
                self._walk_down(probe)
        self._tell("finished", reason=self.reason)
        if not self.table.ok:
            raise self._nothing_measured()
        return self.table

    def _next_probe(self) -> Probe | None:
        """What the search wants, less what would end after the time budget."""
        assert self.table is not None, "set by run()"
        while True:
            if not self._unanswered():
                budget = f"{self._left_out} would not fit in the time budget"
                self.reason = budget if self._left_out else "every candidate was measured"
                return None
            search = self._make_search()
            try:
                probe = search.next_probe(self.table, self.elapsed_s)
            except TulaError as error:
                # What was measured is worth more than the search's opinion of the next probe.
                self.reason = f"the search could not go on: {error}"
                logger.warning("%s", self.reason)
                return None
            self.reason = search.reason
            if probe is None or not self._too_slow(probe):
                return probe
            self._candidates.remove(probe)
            self._left_out += 1

    def _make_search(self) -> Search:
        budget = self.budget_s
        if self.request.search == "full":
            return FullSearch(self._candidates, time_budget_s=budget)
        return PartialSearch(self._candidates, time_budget_s=budget)

    def _unanswered(self) -> list[Probe]:
        assert self.table is not None, "set by run()"
        known = {_key(row) for row in self.table.measurements}
        return [probe for probe in self._candidates if _key(probe) not in known]

    def _too_slow(self, probe: Probe) -> bool:
        """Whether a probe would end after the time budget; never before anything was measured."""
        assert self.table is not None, "set by run()"
        budget = self.budget_s
        if budget is None or not self.table.ok:
            return False
        return self.elapsed_s + self._measurer.seconds(self.table, probe) > budget

    def _walk_down(self, probe: Probe) -> None:
        """Halve the batch until something runs, when the smallest candidate ran out of memory."""
        assert self.table is not None, "set by run()"
        peers = [p.local_batch_size for p in self._candidates if p.layout == probe.layout]
        if probe.local_batch_size > min(peers):
            return
        step = smaller(probe, self.table.workload)
        while step is not None:
            self._candidates.append(step)
            self.reason = f"smaller than the smallest: local batch size {step.local_batch_size}"
            if self._measure(step).status != "oom":
                return
            step = smaller(step, self.table.workload)

    def _measure(self, probe: Probe) -> Measurement:
        """One more row in the table."""
        assert self.table is not None, "set by run()"
        if (refusal := self._measurer.refusal(self.table, probe)) is not None:
            row = row_of(probe, status="oom", reason=refusal)
            self._keep(row)
            self._tell("probe_refused", probe=probe, measurement=row, reason=refusal)
            return row
        self._tell("probe_started", probe=probe, reason=self.reason)
        row, details = self._measurer.measure(self.table, probe)
        if details.get("contended") and self._has_time_to_repeat(row):
            row, details = self._repeat(probe, row, details)
        self._keep(row)
        self._num_done += 1
        self._tell("probe_finished", probe=probe, measurement=row, details=details)
        return row

    def _repeat(
        self, probe: Probe, row: Measurement, details: dict[str, Any]
    ) -> tuple[Measurement, dict[str, Any]]:
        """The faster of a disturbed trial and one more of the same."""
        assert self.table is not None, "set by run()"
        self._tell("probe_repeated", probe=probe, measurement=row, details=details)
        again, details_again = self._measurer.measure(self.table, probe)
        if details_again.get("contended"):
            self._vain_repeats += 1
        counts = {key: details[key] + details_again.get(key, 0) for key in _COUNTS}
        if again.status == "ok" and (again.step_time_s or 0.0) < (row.step_time_s or 0.0):
            row, details = again, details_again
        return row, details | counts | {"repeated": True}

    def _has_time_to_repeat(self, row: Measurement) -> bool:
        budget = self.budget_s
        if self._vain_repeats >= MAX_VAIN_REPEATS:
            return False
        return budget is None or self.elapsed_s + (row.probe_time_s or 0.0) < REPEAT_SHARE * budget

    def _probe_links(self, resumed: Sequence[LinkMeasurement]) -> None:
        """The communication probe of each link class, before any training step.

        Where a class is known already one message checks it: a changed link is measured anew. What
        an interrupted sweep measured itself needs no check.
        """
        for layout in self._link_layouts():
            assert self.table is not None, "set by run()"
            scope = "inter_node" if layout[0] > 1 else "intra_node"
            known = [link for link in self.table.links if link.scope == scope]
            if any(link.scope == scope for link in resumed):
                continue
            if known and not self._measurer.link_has_changed(layout, known):
                continue
            found = self._measurer.measure_links(layout)
            if found:
                rest = tuple(link for link in self.table.links if link.scope != scope)
                self.table = dataclasses.replace(self.table, links=(*rest, *found))
                self._save()
                seconds = self._measurer.link_time_s
                self._tell("links_measured", details={"scope": scope, "probe_time_s": seconds})

    def _link_layouts(self) -> list[tuple[int, int]]:
        """Where links are probed: across all nodes, and among all devices of one."""
        asked = {(p.nodes, p.devices_per_node) for p in self._candidates if p.world_size > 1}
        within = [layout for layout in asked if layout[0] == 1]
        across = [layout for layout in asked if layout[0] > 1]
        if self.request.link_layout is not None:
            across.append(self.request.link_layout)
        return [max(layouts) for layouts in (across, within) if layouts]

    def _keep(self, row: Measurement) -> None:
        assert self.table is not None, "set by run()"
        self.table = self.table.with_rows([row])
        self._save()

    def _save(self) -> None:
        if self._output is not None and self.table is not None:
            write_json(self._output, self.table.to_dict())

    def _tell(self, kind: EventKind, **facts: Any) -> None:
        if self._on_event is None:
            return
        expected: float | None = None
        remaining: float | None = None
        left: list[Probe] = []
        if self.table is not None:
            left = self._unanswered()
            if self.table.ok:
                probe, budget = facts.get("probe"), self.budget_s
                seconds = self._measurer.seconds
                expected = None if probe is None else seconds(self.table, probe)
                remaining = sum(seconds(self.table, probe) for probe in left)
                if budget is not None:
                    remaining = min(remaining, max(budget - self.elapsed_s, 0.0))
        self._on_event(
            ProfileEvent(
                kind=kind,
                num_done=self._num_done,
                num_expected=self._num_done + len(left),
                elapsed_s=self.elapsed_s,
                expected_probe_s=expected,
                expected_remaining_s=0.0 if kind == "finished" else remaining,
                **facts,
            )
        )

    def _nothing_measured(self) -> ProfilingError:
        assert self.table is not None, "set by run()"
        tried = "; ".join(
            f"{row.local_batch_size} x {row.world_size} rank{'s' * (row.world_size > 1)} "
            f"({row.status}: {row.reason})"
            for row in self.table.measurements
        )
        error = ProfilingError(
            f"no batch size could be measured: {tried or self.reason}; try a smaller model or "
            f"image size, or a larger memory limit"
        )
        error.__cause__ = self._measurer.last_error
        return error


def _key(of: Probe | Measurement) -> Probe:
    return of if isinstance(of, Probe) else Probe.of(of)
