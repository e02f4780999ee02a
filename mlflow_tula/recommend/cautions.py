"""What a person should know before they rely on a recommendation, and candidates in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlflow_tula.recommend.recommendation import CurvePoint

if TYPE_CHECKING:
    from mlflow_tula.recommend.curve import Request

FEW_UPDATES = 10
"""Optimizer steps per epoch below which the choice comes with a warning."""


def name_of(point: CurvePoint) -> str:
    """A candidate in a sentence."""
    where = f" on {ranks_of(point)}" if point.world_size > 1 else ""
    return f"{point.global_batch_size}{where}"


def ranks_of(point: CurvePoint) -> str:
    """Its ranks, and its nodes where there are several."""
    ranks = f"{point.world_size} rank{'s' if point.world_size > 1 else ''}"
    return f"{ranks} of {point.nodes} nodes" if point.nodes > 1 else ranks


def caution(request: Request, curve: Sequence[CurvePoint], chosen: CurvePoint) -> tuple[str, ...]:
    """What a person should know before they rely on the choice."""
    found = list(request.bundle.report.warnings)
    if chosen.extrapolated and request.bundle.cold_start is None:
        found.append(f"{name_of(chosen)} lies beyond what was measured: measure it to be sure")
    if chosen.may_not_reach_target and request.to_target:
        found.append(f"some runs at batch sizes like {chosen.global_batch_size} missed the target")
    upper = chosen.time_s_upper
    if request.deadline_s is not None and upper is not None and upper > request.deadline_s:
        found.append(
            f"the deadline of {request.deadline_s:g} s is met by the prediction of "
            f"{chosen.time_s:,.4g} s, but its interval reaches {upper:,.4g} s"
        )
    found += _current_warnings(request, curve)
    updates = request.dataset_size // chosen.global_batch_size
    if updates < FEW_UPDATES and not request.to_target:
        found.append(
            f"an epoch of {chosen.global_batch_size} is only {updates} optimizer "
            f"step{'s' if updates != 1 else ''}: time per epoch says nothing of accuracy, expect "
            "more epochs (an objective to a target counts them, with convergence data)"
        )
    if chosen.local_batch_size == 1:
        found.append("a local batch of 1 breaks batch normalisation")
    drop_last = request.bundle.workload.drop_last
    if not drop_last and request.dataset_size % chosen.global_batch_size == 1:
        found.append(
            "the last batch of an epoch holds one sample, which breaks batch normalisation: "
            "drop it, or take another size"
        )
    return tuple(dict.fromkeys(found))


def _current_warnings(request: Request, curve: Sequence[CurvePoint]) -> list[str]:
    """Why the current batch size could not even be considered, where that is so."""
    if request.current is None:
        return []
    points = [point for point in curve if point.global_batch_size == request.current]
    if not points:
        return [f"the current global batch size {request.current} is not among the candidates"]
    if not any(point.fits for point in points):
        return [f"the current global batch size {request.current}: {points[0].fits_reason}"]
    if not any(point.fits and point.meets_limits for point in points):
        return [f"the current global batch size {request.current} misses a limit"]
    return []
