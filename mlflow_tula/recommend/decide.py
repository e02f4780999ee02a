"""Recommend: a bundle, a cluster and an objective -> the batch size to train with, and why.

    candidates -> predictions -> what fits -> what meets the limits -> the objective's choice

The choice among candidates that differ by less than their intervals is the current one, else the
smaller batch. Low error and a good choice are different goals (docs/method.md); `knee.py` has the
rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.knee import (
    DEFAULT_RULE,
    DIMINISHING_TOLERANCE,
    KneeRule,
    Settled,
    choose_knee,
    choose_minimum,
    relative_noise,
)
from mlflow_tula.recommend.advice import advise, scale
from mlflow_tula.recommend.cautions import caution
from mlflow_tula.recommend.cautions import name_of as _name
from mlflow_tula.recommend.cautions import ranks_of as _ranks
from mlflow_tula.recommend.curve import Request, is_known, limits, listed, make_curve
from mlflow_tula.recommend.recommendation import (
    CurvePoint,
    Objective,
    Recommendation,
    Scaling,
    three_digits,
)
from mlflow_tula.specs import ClusterSpec, Pricing

if TYPE_CHECKING:
    from mlflow_tula.predictors.bundle import PredictorBundle

__all__ = ["CurvePoint", "KneeRule", "Objective", "Recommendation", "recommend"]

Knee = tuple[CurvePoint, Settled, list[CurvePoint]]
"""A cluster's knee, how it came about, and the cluster's points."""


def recommend(
    bundle: PredictorBundle,
    *,
    cluster: ClusterSpec | Sequence[ClusterSpec],
    candidates: Sequence[int] | None = None,
    objective: Objective = "knee",
    epochs: float | None = None,
    deadline_s: float | None = None,
    budget_usd: float | None = None,
    memory_limit_bytes: float | None = None,
    pricing: Pricing | None = None,
    current_global_batch_size: int | None = None,
    accumulation_steps: int | None = None,
    dataset_size: int | None = None,
    knee_rule: KneeRule = DEFAULT_RULE,
    level: float = 0.9,
    gradient_compression: str | None = None,
    scaling: Scaling = "any",
) -> Recommendation:
    """Choose the batch size, the accumulation and (of several clusters) the cluster.

    Args:
        bundle: the fitted predictors of this workload on this hardware.
        cluster: what to train on; of several, (cluster, batch) pairs are ranked together.
        candidates: global batch sizes; None means powers of two per rank, bounded by the dataset
            and by four times the largest measured local batch size.
        objective: `knee` (where a larger batch stops paying), `min_time`, `min_cost`,
            `min_time_to_target` or `min_cost_to_target`.
        epochs: length of the run that deadline, budget, time and cost are about; one epoch if None.
        deadline_s: longest time allowed.
        budget_usd: most dollars allowed; needs `pricing`.
        memory_limit_bytes: what one device may use; the device's memory when None.
        pricing: dollars per device hour, per GB hour, or both.
        current_global_batch_size: kept unless another gains more than the intervals leave open.
        accumulation_steps: fixes them; None means 1, and more only for a candidate that was asked
            for and does not fit otherwise.
        dataset_size: training samples; the workload's when None.
        knee_rule: `diminishing_returns` or `kneedle`.
        level: probability of the intervals.
        gradient_compression: how gradients are sent among ranks; None: as they are.
        scaling: `strong` keeps one global batch over all clusters, `weak` one local batch (of the
            current size, else of the largest measured one); `any` compares all.

    Raises:
        InvalidInputError: a bad value, an objective without the data it needs, or no candidate
            that fits and meets the limits (the message names the nearest miss).
    """
    request = Request(
        bundle=bundle,
        clusters=(cluster,) if isinstance(cluster, ClusterSpec) else listed("cluster", cluster),
        candidates=None if candidates is None else listed("candidates", candidates),
        objective=objective,
        epochs=epochs,
        deadline_s=deadline_s,
        budget_usd=budget_usd,
        memory_limit_bytes=memory_limit_bytes,
        pricing=pricing,
        current=current_global_batch_size,
        accumulation_steps=accumulation_steps,
        dataset_size=bundle.workload.dataset_size if dataset_size is None else dataset_size,
        knee_rule=knee_rule,
        level=level,
        gradient_compression=gradient_compression,
        scaling=scaling,
    )
    curve = make_curve(request)
    allowed = _allowed(request, curve)
    chosen, reasons = _choose(request, allowed)
    return Recommendation(
        global_batch_size=chosen.global_batch_size,
        local_batch_size=chosen.local_batch_size,
        accumulation_steps=chosen.accumulation_steps,
        nodes=chosen.nodes,
        devices_per_node=chosen.devices_per_node,
        objective=objective,
        basis=request.basis,
        curve=curve,
        reasons=reasons,
        warnings=caution(request, curve, chosen),
        level=level,
        workload=bundle.workload.slug,
        hardware=bundle.hardware.slug,
        knee_rule=knee_rule if objective == "knee" else "",
        advice=advise(request, chosen),
        scaling=scale(request, chosen),
    )


def _allowed(request: Request, curve: Sequence[CurvePoint]) -> list[CurvePoint]:
    """The points that fit and meet the limits, or an error that names the nearest miss."""
    fitting = [point for point in curve if point.fits]
    if not fitting:
        nearest = min(curve, key=lambda p: (p.peak_memory_bytes or 0.0, p.local_batch_size))
        raise InvalidInputError(
            f"no candidate fits: the nearest is {_name(nearest)} ({nearest.fits_reason}); give a "
            "larger memory limit or other candidates, or measure it"
        )
    field = request.decides
    known = [point for point in fitting if getattr(point, field) is not None]
    if not known:
        raise InvalidInputError(
            f"objective {request.objective} has no {field} for any candidate: "
            "a price per GB needs measured peak memory, a target needs convergence data"
        )
    if request.to_target:
        reached = [point for point in known if point.reach_rate != 0.0]
        if not reached:
            raise InvalidInputError(
                "no run at any of the candidates' batch sizes reached the target: give other "
                "candidates, or an easier target"
            )
        known = reached
    allowed = [point for point in known if point.meets_limits]
    if allowed:
        return allowed

    def excess(point: CurvePoint) -> float:
        return max((value or math.inf) / limit for _, value, limit in limits(request, point))

    nearest = min(known, key=excess)
    misses = [
        f"{name} of {limit:g} ({'unknown' if value is None else f'{value:.4g}'} predicted)"
        for name, value, limit in limits(request, nearest)
        if value is None or value > limit
    ]
    raise InvalidInputError(
        f"no candidate meets the {' and the '.join(misses)} over {request.basis}; that is the "
        f"nearest, {_name(nearest)}: give it more, or a shorter run"
    )


def _choose(request: Request, allowed: Sequence[CurvePoint]) -> tuple[CurvePoint, tuple[str, ...]]:
    """The objective's choice among the allowed points, and the reasons in words."""
    if request.objective == "knee":
        chosen, reasons = _choose_knee(request, allowed)
    else:
        chosen, reasons = _choose_minimum(request, allowed)
    if chosen.accumulation_steps > 1 and request.accumulation_steps is None:
        reasons.append(
            f"{chosen.accumulation_steps} accumulation steps: "
            f"{chosen.local_batch_size * chosen.accumulation_steps} samples a rank in one pass are "
            "not known to fit"
        )
    low, high = chosen.step_time_s_lower, chosen.step_time_s_upper
    if not chosen.measured and low is not None and high is not None:
        reasons.append(
            f"its step was not measured but predicted: {three_digits(1e3 * low)} to "
            f"{three_digits(1e3 * high)} ms at {request.level:.0%}"
        )
    if chosen.fits_reason:
        reasons.append(f"it fits: {chosen.fits_reason}")
    return chosen, tuple(reasons)


def _choose_minimum(
    request: Request, allowed: Sequence[CurvePoint]
) -> tuple[CurvePoint, list[str]]:
    """The fastest or the cheapest; ties go to the current, the measured, the smaller one."""
    plain = [float(getattr(point, request.decides)) for point in allowed]
    # a run that fails is run again: what counts is the time until one reaches the target
    tries = [1.0 / (p.reach_rate or 1.0) if request.to_target else 1.0 for p in allowed]
    values = [one * count for one, count in zip(plain, tries, strict=True)]
    current = [i for i, p in enumerate(allowed) if p.global_batch_size == request.current]
    measured = [point.measured for point in allowed]
    settled = choose_minimum(values, _noise(allowed), current=current, measured=measured)
    chosen, best = allowed[settled.index], allowed[int(np.argmin(values))]
    worth = {id(point): value for point, value in zip(allowed, values, strict=True)}
    rivals = _known_rivals(request, chosen, allowed, lambda point: worth[id(point)])
    if rivals:
        again = choose_minimum(
            [worth[id(point)] for point in rivals],
            _noise(rivals),
            measured=[point.measured for point in rivals],
        )
        return rivals[again.index], [_why_known(request, chosen, rivals[again.index])]
    costs = request.decides != "time_s"
    amount = plain[int(np.argmin(values))]
    least = f"${amount:,.4g}" if costs else f"{amount:,.4g} s"
    reasons = [f"{_name(best)} is the {'cheapest' if costs else 'fastest'}: {least} {request.per}"]
    if min(plain) < amount:
        reasons.append(
            f"{_name(allowed[int(np.argmin(plain))])} takes less where it reaches the target, but "
            "more of its runs do not"
        )
    if chosen is not best:
        loss = values[settled.index] / min(values) - 1.0
        why = "a tie goes to the smaller"
        if settled.kept_current:
            why = "the current choice stays"
        elif chosen.measured and not best.measured:
            why = "a tie goes to the one that was measured"
        reasons.append(
            f"{_name(chosen)} comes within {loss:.1%} of it, and {settled.noise:.0%} can be noise: "
            f"{why}"
        )
    return chosen, reasons


def _choose_knee(request: Request, allowed: Sequence[CurvePoint]) -> tuple[CurvePoint, list[str]]:
    """The knee of each cluster's curve, then the fewest devices that come near the best of them."""
    knees = _knees(request, allowed)
    chosen, settled, here = _fewest(knees)
    rivals = _known_rivals(request, chosen, allowed, _time)
    if rivals:
        known = _fewest(_knees(request, rivals))[0]
        return known, [_why_known(request, chosen, known)]
    reasons = _knee_reasons(request, chosen, settled, here)
    if len(knees) > 1:
        verb = "is" if chosen.world_size == 1 else "are"
        reasons.append(
            f"{_ranks(chosen)} {verb} the fewest within {DIMINISHING_TOLERANCE:.0%} of the fastest "
            "cluster"
        )
    return chosen, reasons


def _knees(request: Request, points: Sequence[CurvePoint]) -> list[Knee]:
    """The knee of each cluster's points."""
    knees: list[Knee] = []
    for cluster in dict.fromkeys((p.nodes, p.devices_per_node) for p in points):
        here = [p for p in points if (p.nodes, p.devices_per_node) == cluster]
        sizes = [p.global_batch_size for p in here]
        current = sizes.index(request.current) if request.current in sizes else None
        settled = choose_knee(
            sizes, [_time(p) for p in here], _noise(here), rule=request.knee_rule, current=current
        )
        knees.append((here[settled.index], settled, here))
    return knees


def _fewest(knees: Sequence[Knee]) -> Knee:
    """The entry of the fewest devices that comes near the fastest one."""
    fastest = min(_time(point) for point, _, _ in knees)
    return next(k for k in knees if _time(k[0]) <= (1.0 + DIMINISHING_TOLERANCE) * fastest)


def _known_rivals(
    request: Request,
    chosen: CurvePoint,
    allowed: Sequence[CurvePoint],
    value: Callable[[CurvePoint], float],
) -> list[CurvePoint]:
    """Points of other clusters that are preferred to one that was only predicted.

    A point that was measured, or half or twice its local batch on as many ranks, beats one on
    another cluster that was not, where their intervals overlap and nothing that is known on that
    cluster is clearly better. The current choice stays.
    """
    if chosen.global_batch_size == request.current or is_known(request, chosen):
        return []
    known = [point for point in allowed if is_known(request, point)]
    cluster = (chosen.nodes, chosen.devices_per_node)
    own = [value(p) for p in known if (p.nodes, p.devices_per_node) == cluster]
    top = value(chosen) * float(chosen.time_s_upper or math.inf) / _time(chosen)
    return [
        point
        for point in known
        if (point.nodes, point.devices_per_node) != cluster
        and value(point) <= (1.0 + DIMINISHING_TOLERANCE) * min(own, default=math.inf)
        and value(point) * float(point.time_s_lower or 0.0) / _time(point) <= top
    ]


def _why_known(request: Request, predicted: CurvePoint, known: CurvePoint) -> str:
    """Why a measured cluster was preferred, in words."""
    unit = ("", " s") if request.decides == "time_s" else ("$", "")
    first, second = (
        f"{unit[0]}{float(getattr(p, request.decides)):,.4g}{unit[1]}" for p in (predicted, known)
    )
    return (
        f"{_name(predicted)} is predicted to take {first}, but nothing near it was measured; "
        f"{_name(known)} takes {second}, the intervals overlap, and what was measured wins"
    )


def _knee_reasons(
    request: Request, chosen: CurvePoint, settled: Settled, here: Sequence[CurvePoint]
) -> list[str]:
    """Why the knee is where it is, in words."""
    best = min(here, key=_time)
    if best is chosen:
        reasons = [f"{_name(chosen)} is the fastest that fits: {_time(best):,.4g} s {request.per}"]
    else:
        saved = 1.0 - _time(best) / _time(chosen)
        reasons = [
            f"larger than {chosen.global_batch_size} saves {saved:.0%} of the time at most "
            f"({best.global_batch_size}, {request.per})"
        ]
    smaller = [p for p in here if p.global_batch_size < chosen.global_batch_size]
    if smaller:
        extra = _time(smaller[-1]) / _time(chosen) - 1.0
        reasons.append(f"{smaller[-1].global_batch_size} would take {extra:.0%} longer")
    if settled.kept_current:
        reasons.append(
            f"the current {chosen.global_batch_size} stays: the rule alone says "
            f"{here[settled.by_rule].global_batch_size}, but the intervals leave "
            f"{settled.noise:.0%} open"
        )
    return reasons


def _time(point: CurvePoint) -> float:
    """Seconds of a point whose time is known."""
    return float(point.time_s or 0.0)


def _noise(points: Sequence[CurvePoint]) -> list[float]:
    """Each point's relative half interval of time."""
    ends = np.array([(p.time_s_lower, p.time_s_upper) for p in points], dtype=np.float64)
    return [float(share) for share in relative_noise(ends[:, 0], ends[:, 1])]
