"""Which batch size and world size to measure next: full search, and an adaptive partial one.

A search is asked again after every probe, with the table as it stands, and answers with the next
`Probe` or None; `reason` then says why this one, or why it stopped. Rows that ran out of memory or
failed are answers too: feasibility is a map, not a threshold, and nothing is probed twice.

`PartialSearch` goes upwards in wide steps: the smallest size, the geometric middle between it and
the largest, and so on, for large probes cost most (`benchmarks/search_curve.py` shows what a start
with both ends loses by it). Of the last and the middle world size it measures what would be chosen
there and one size far from it, and then the choice of all, unless a neighbour vouches for it. Then
it probes whatever is worth most to the decision per second it costs: predictions and intervals are
drawn as random curves (`knee.decision_gains`; the knowledge gradient of sequential design; Frazier,
Powell and Dayanik, "A Knowledge-Gradient Policy for Sequential Information Collection", 2008).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from mlflow_tula.batches import candidate_batch_sizes
from mlflow_tula.errors import InvalidInputError, TulaWarning
from mlflow_tula.fit import fit
from mlflow_tula.knee import (
    DIMINISHING_TOLERANCE,
    TIE,
    Floats,
    decision_gains,
    diminishing_returns,
    relative_noise,
)
from mlflow_tula.predictors.bundle import PredictorBundle
from mlflow_tula.predictors.convergence import ConvergencePredictor
from mlflow_tula.probes import (
    MAX_FAILURES,
    Probe,
    SearchCost,
    answers_of,
    expected_probe_time_s,
    factor_apart,
    full_search_cost,
    only_failures,
    step_up,
    walls_of,
)
from mlflow_tula.specs import check_int, check_real
from mlflow_tula.table import ProfileTable

__all__ = [
    "MAX_FAILURES",
    "FullSearch",
    "PartialSearch",
    "Probe",
    "Search",
    "SearchCost",
    "candidate_batch_sizes",
    "expected_probe_time_s",
    "full_search_cost",
]

ENOUGH = 0.01
"""Expected loss of the decision, as a share of its time, below which no probe is worth its time."""
_Z90 = 1.645
_MEASURED_NOISE = 0.02
FIRST_SHARE = 0.4
"""Of the time left, what the first probe of another world size may take."""
FAR, NEAR = 4, 2
"""Factors between local batch sizes: far enough to tell compute from synchronisation; so near that
a measurement vouches for the other."""


class Search(Protocol):
    """What the profiler asks after every probe."""

    reason: str

    def next_probe(self, table: ProfileTable, elapsed_s: float) -> Probe | None:
        """The next configuration to measure, or None to stop; `reason` says why."""


class FullSearch:
    """Every candidate once, small worlds and small batches first."""

    def __init__(self, candidates: Sequence[Probe], *, time_budget_s: float | None = None) -> None:
        """Take the candidates; a time budget ends the search early."""
        self.candidates = _checked(candidates)
        self.time_budget_s = _budget(time_budget_s)
        self.reason = ""

    def next_probe(self, table: ProfileTable, elapsed_s: float) -> Probe | None:
        """The first candidate without a row."""
        answers = answers_of(table)
        open_probes = [probe for probe in self.candidates if probe not in answers]
        if hopeless := only_failures(table):
            self.reason = hopeless
            return None
        if not open_probes:
            self.reason = f"all {len(self.candidates)} candidates were measured"
            return None
        if self.time_budget_s is not None and elapsed_s >= self.time_budget_s:
            self.reason = (
                f"the time budget of {self.time_budget_s:g} s ended with {len(open_probes)} of "
                f"{len(self.candidates)} candidates not measured"
            )
            return None
        self.reason = f"full search: {len(open_probes)} candidates left"
        return open_probes[0]


class PartialSearch:
    """Few probes: upwards in wide steps, a second world size, then what the decision needs.

    Args:
        candidates: every configuration that could be asked about.
        time_budget_s: bound of the whole sweep; a probe that would not fit in it is not begun.
        max_local_batch_size: nothing larger is probed (an estimate of memory, where there is one).
        convergence: with it the decision is the least time to target, without it the knee of
            epoch time.
        min_probes: so many answers of the first world size before it may stop.
    """

    def __init__(
        self,
        candidates: Sequence[Probe],
        *,
        time_budget_s: float | None = None,
        max_local_batch_size: int | None = None,
        convergence: ConvergencePredictor | None = None,
        min_probes: int = 4,
    ) -> None:
        """Take the candidates; see the class for the rest."""
        self.candidates = _checked(candidates)
        self.time_budget_s = _budget(time_budget_s)
        if max_local_batch_size is not None:
            bound = check_int("max_local_batch_size", max_local_batch_size)
            self.candidates = tuple(p for p in self.candidates if p.local_batch_size <= bound)
            if not self.candidates:
                raise InvalidInputError(
                    f"no candidate has a local batch size of at most max_local_batch_size = {bound}"
                )
        self.convergence = convergence
        self.min_probes = check_int("min_probes", min_probes)
        self.reason = ""
        self._fitted: tuple[ProfileTable, PredictorBundle] | None = None

    def next_probe(self, table: ProfileTable, elapsed_s: float) -> Probe | None:
        """The next configuration to measure, or None to stop."""
        if hopeless := only_failures(table):
            self.reason = hopeless
            return None
        answers = answers_of(table)
        left = None if self.time_budget_s is None else self.time_budget_s - elapsed_s
        wanted = (
            self._outline(table, answers, left)
            or self._near_choice(table, answers, left)
            or self._worth_most(table, answers, left)
        )
        if wanted is None:
            return None
        if left is not None and answers:
            expected = expected_probe_time_s(table, wanted)
            if expected > left:
                self.reason = (
                    f"the time budget of {self.time_budget_s:g} s: the next probe would take "
                    f"about {expected:.0f} s, {max(left, 0.0):.0f} s are left"
                )
                return None
        return wanted

    def _outline(
        self, table: ProfileTable, answers: Mapping[Probe, str], left_s: float | None
    ) -> Probe | None:
        """Upwards in wide steps at the first world size; two sizes of the last and the middle."""
        groups = self._groups(answers)
        for number in dict.fromkeys((0, len(groups) - 1, len(groups) // 2) if groups else ()):
            group = groups[number]
            where = f"world size {group[0].world_size}"
            # The first world size leaves time for the others, the last one need not.
            if number == 0 or not table.ok:
                found = step_up(table, group, answers, left_s and left_s / 3)
            else:
                found = self._second(table, group, answers, left_s)
            if found is not None:
                probe, what = found
                self.reason = f"{what} of {where}: local batch size {probe.local_batch_size}"
                return probe
        return None

    def _second(
        self,
        table: ProfileTable,
        group: Sequence[Probe],
        answers: Mapping[Probe, str],
        left_s: float | None,
    ) -> tuple[Probe, str] | None:
        """Of another world size first what would be chosen there, then a size far from that.

        The first tells most where it matters, and leaves time for the second: only two sizes, a
        factor FAR apart, tell slower compute from synchronisation.
        """
        running = [p.local_batch_size for p in group if answers.get(p) == "ok"]
        failed = [p.local_batch_size for p in group if answers.get(p, "ok") != "ok"]
        if len(running) > 1 or len(failed) >= MAX_FAILURES:
            return None
        goal, what = group[self._decide(self._fit(table), group)].local_batch_size, "the choice"
        options = [
            p
            for p in group
            if p not in answers and p.local_batch_size < min(failed, default=np.inf)
        ]
        if running:
            options = [p for p in options if factor_apart(p.local_batch_size, running[0]) >= FAR]
            smaller = [p for p in options if p.local_batch_size < running[0]]
            goal, what = (running[0] // FAR if smaller else goal), "far from the other"
        seconds = {probe: expected_probe_time_s(table, probe) for probe in options}
        # one large probe says more than a small one, where there is no time for two
        for share in (1.0,) if running else (FIRST_SHARE, 1.0):
            found = min(
                (p for p in options if left_s is None or seconds[p] <= share * left_s),
                key=lambda p: factor_apart(p.local_batch_size, goal),
                default=None,
            )
            if found is not None and factor_apart(found.local_batch_size, goal) <= FAR:
                break
        return None if found is None else (found, what)

    def _near_choice(
        self, table: ProfileTable, answers: Mapping[Probe, str], left_s: float | None
    ) -> Probe | None:
        """What would be chosen of all, or a neighbour, where nothing near it was measured."""
        if not table.ok:
            return None
        bundle, choices = self._fit(table), []
        for group in self._groups(answers):
            usable = [probe for probe in group if answers.get(probe, "ok") == "ok"]
            if usable:
                log_times, _ = self._predict(bundle, usable)
                chosen = self._decide(bundle, usable)
                choices.append((float(log_times[chosen]), usable[chosen], usable))
        if not choices:
            return None
        slack = 0.0 if self.convergence is not None else np.log1p(DIMINISHING_TOLERANCE)
        best = min(time for time, _, _ in choices) + slack
        _, choice, group = next(entry for entry in choices if entry[0] <= best)
        size = choice.local_batch_size
        near = [p for p in group if factor_apart(p.local_batch_size, size) <= NEAR]
        options = [p for p in near if left_s is None or expected_probe_time_s(table, p) <= left_s]
        if not options or any(probe in answers for probe in near):
            return None
        found = min(options, key=lambda p: factor_apart(p.local_batch_size, size))
        self.reason = (
            f"nothing was measured near what would be chosen, {size} a rank at world size "
            f"{choice.world_size}: local batch size {found.local_batch_size}"
        )
        return found

    def _groups(self, answers: Mapping[Probe, str]) -> list[list[Probe]]:
        """Candidates by layout, without those behind a wall that are not yet answered."""
        walls = walls_of(answers)
        groups: dict[tuple[int, int, int, str], list[Probe]] = {}
        for probe in self.candidates:
            walled = any(
                world <= probe.world_size and size <= probe.local_batch_size
                for world, size in walls
            )
            if probe in answers or not walled:
                groups.setdefault(probe.layout, []).append(probe)
        return list(groups.values())

    def _worth_most(
        self, table: ProfileTable, answers: Mapping[Probe, str], left_s: float | None
    ) -> Probe | None:
        """The unmeasured candidate whose outcome lowers the expected loss most per second."""
        if not table.ok:
            self.reason = f"none of {len(answers)} probes fits: no smaller candidate is left"
            return None
        bundle, loss = self._fit(table), 0.0
        worth: dict[Probe, float] = {}
        for number, group in enumerate(self._groups(answers)):
            least = self.min_probes if number == 0 else 0
            loss_here, worth_here = self._worth(table, bundle, answers, group, least)
            loss, worth = max(loss, loss_here), worth | worth_here
        seconds = {probe: expected_probe_time_s(table, probe) for probe in worth}
        affordable = [p for p in worth if left_s is None or seconds[p] <= left_s]
        if affordable:
            best = max(affordable, key=lambda probe: worth[probe] / seconds[probe])
            self.reason = (
                f"local batch size {best.local_batch_size} at world size {best.world_size} is "
                f"worth most to the decision (expected loss {loss:.1%})"
            )
            return best
        if worth:
            self.reason = f"the time budget: {len(worth)} probes worth their time do not fit in it"
        else:
            self.reason = f"the decision no longer changes (expected loss {loss:.1%})"
        return None

    def _worth(
        self,
        table: ProfileTable,
        bundle: PredictorBundle,
        answers: Mapping[Probe, str],
        group: Sequence[Probe],
        least: int,
    ) -> tuple[float, dict[Probe, float]]:
        """Expected loss of one layout's decision, and by how much each probe of it would lower it.

        Nothing is worth a probe once the decision stands, with at least `least` answers. A choice
        beyond all that was measured is a guess, however sure the fit is: it does not stand.
        """
        running = [probe for probe in group if answers.get(probe, "ok") == "ok"]
        unknown = [i for i, probe in enumerate(running) if probe not in answers]
        if not unknown:
            return 0.0, {}
        loss, gains = self._gains(bundle, running, answers)
        chosen = self._decide(bundle, running)
        guess = all(running[i] not in answers for i in range(chosen, len(running)))
        few = len(group) - len(unknown) < least
        if not (few or guess) and (loss < ENOUGH or self._steady(table, bundle, running)):
            return loss, {}
        forced = {i for i in unknown if few or (guess and i == chosen)}
        worth = {i: max(gains[i], ENOUGH if i in forced else 0.0) for i in unknown}
        return loss, {running[i]: gain for i, gain in worth.items() if gain >= ENOUGH / 4}

    def _fit(self, table: ProfileTable) -> PredictorBundle:
        """The predictors so far; that there are few rows is no news here."""
        if self._fitted is None or self._fitted[0] is not table:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", TulaWarning)
                self._fitted = table, fit(table, self.convergence)
        return self._fitted[1]

    def _predict(self, bundle: PredictorBundle, group: Sequence[Probe]) -> tuple[Floats, Floats]:
        """Logarithm of the time that decides, and the relative noise of the step time.

        The step time's own interval: a probe can narrow it, but not that of the epochs to target.
        """
        import pandas as pd

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TulaWarning)
            out = bundle.predict(pd.DataFrame([probe.to_dict() for probe in group]))
        name = "epoch_time_s" if self.convergence is None else "time_to_target_s"
        ends = (out[f"step_time_s_{end}"].to_numpy(float) for end in ("lower", "upper"))
        return np.log(out[name].to_numpy(float)), relative_noise(*ends)

    def _decide(self, bundle: PredictorBundle, group: Sequence[Probe]) -> int:
        """Index of the candidate that would be chosen now."""
        log_times, _ = self._predict(bundle, group)
        if self.convergence is not None:
            return int(np.argmin(log_times))
        sizes = [probe.global_batch_size for probe in group]
        return diminishing_returns(sizes, np.exp(log_times - log_times.min()))

    def _gains(
        self, bundle: PredictorBundle, group: Sequence[Probe], answers: Mapping[Probe, str]
    ) -> tuple[float, Floats]:
        """Expected loss of deciding now, and by how much each candidate's probe would lower it."""
        centre, noise = self._predict(bundle, group)
        known = np.array([probe in answers for probe in group])
        spread = np.where(known, np.minimum(noise / _Z90, _MEASURED_NOISE), noise / _Z90)
        sizes = np.array([probe.global_batch_size for probe in group], float)
        return decision_gains(sizes, centre, spread, known, to_knee=self.convergence is None)

    def _steady(self, table: ProfileTable, bundle: PredictorBundle, group: Sequence[Probe]) -> bool:
        """Whether the choice stays within a tie when any one inner measurement is left out."""
        centre, _ = self._predict(bundle, group)
        chosen = self._decide(bundle, group)
        # Rows of this layout alone: there are enough of them, and so small a fit is quick.
        own = tuple(row for row in table.ok if Probe.of(row).layout == group[0].layout)
        inner = sorted(own, key=lambda row: row.local_batch_size)[1:-1]
        for left_out in inner:
            rest = tuple(row for row in own if row is not left_out)
            other = self._decide(self._fit(replace(table, measurements=rest)), group)
            if abs(centre[other] - centre[chosen]) > TIE:
                return False
        return len(inner) > 1


def _checked(candidates: Sequence[Probe]) -> tuple[Probe, ...]:
    """Distinct candidates, small worlds and small batches first."""
    if not len(candidates) or not all(isinstance(probe, Probe) for probe in candidates):
        raise InvalidInputError("candidates must be a non-empty list of Probe")
    return tuple(
        sorted(set(candidates), key=lambda p: (p.world_size, p.layout, p.local_batch_size))
    )


def _budget(time_budget_s: float | None) -> float | None:
    if time_budget_s is None:
        return None
    return check_real("time_budget_s", time_budget_s, strict=True)
