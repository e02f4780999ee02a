"""From one hardware to another: a model known there, and some models known on both.

What a model takes more or less than its kernels say is partly its own (a badly shaped
convolution), and travels with it:

    log t_here(b) = kernels_here(b) + rho (log t_there(b) - kernels_there(b))

rho and the error come from the models known on both, each left out in turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.model_features import ModelFeatures
from mlflow_tula.predictors import cross_model_formulas as formulas
from mlflow_tula.predictors.cross_model import CrossModelPredictor, KnownModel
from mlflow_tula.specs import Spec
from mlflow_tula.table import ProfileTable

Array = NDArray[np.float64]

PRIOR_RHO, PRIOR_PAIRS, PRIOR_SD = 0.6, 2.0, 0.15
"""The share that travels, before any model was seen on both; worth so many models; its error."""
SIZE_SD = 0.03
"""What is left of each size by itself, beside the deviation that all sizes share."""
LEAST_SHARED = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer(Spec):
    """How much of a model's own pace travels, and the deviation of log step time that is left.

    `models` are those known on both hardwares.
    """

    rho: float
    deviation: float
    models: tuple[str, ...]

    @classmethod
    def fit(
        cls,
        here: Sequence[tuple[ModelFeatures, ProfileTable]],
        there: Sequence[tuple[ModelFeatures, ProfileTable]],
    ) -> Transfer:
        """Learn from what is known on both.

        Args:
            here: features and tables on the hardware that is asked about.
            there: the same on the other one.

        Raises:
            InvalidInputError: fewer than two models were profiled on both.
        """
        mine, theirs = _by_model(here), _by_model(there)
        shared = sorted(set(mine) & set(theirs))
        if len({name for name, _ in shared}) < LEAST_SHARED:
            raise InvalidInputError(
                f"a transfer needs at least {LEAST_SHARED} models profiled on both hardwares, not "
                f"{len(shared)}: profile one here with `tula main --model NAME`"
            )
        pairs = []
        for name in sorted({name for name, _ in shared}):
            own, other = (_without(rows, name) for rows in (here, there))
            for key in (key for key in shared if key[0] == name):
                sizes = np.intersect1d(mine[key].sizes, theirs[key].sizes)
                if not len(sizes):
                    continue
                pairs.append((_rest(own, mine[key], sizes), _rest(other, theirs[key], sizes)))
        return cls(
            models=tuple(sorted({name for name, _ in shared})),
            **_regression(pairs),
        )


def _regression(pairs: Sequence[tuple[Array, Array]]) -> dict[str, float]:
    """The share by least squares through the origin, shrunk to the prior; what deviation is left.

    Each model counts once, however many sizes it has.
    """
    ours = np.concatenate([own / math.sqrt(len(own)) for own, _ in pairs])
    others = np.concatenate([other / math.sqrt(len(other)) for _, other in pairs])
    weight = PRIOR_PAIRS * PRIOR_SD**2
    rho = float((ours @ others + weight * PRIOR_RHO) / (others @ others + weight))
    left = ours - rho * others
    variance = (float(left @ left) + PRIOR_PAIRS * PRIOR_SD**2) / (len(pairs) + PRIOR_PAIRS)
    return {"rho": float(np.clip(rho, 0.0, 1.2)), "deviation": math.sqrt(variance)}


def transferred_log_times(
    how: Transfer,
    here: CrossModelPredictor,
    there: CrossModelPredictor,
    features: ModelFeatures,
    table: ProfileTable,
    sizes: Array,
) -> tuple[Array, Array]:
    """Log seconds at each local batch size here, from a table measured there, and its covariance.

    Args:
        how: what travels.
        here: the cross-model predictor of the hardware that is asked about.
        there: that of the hardware of `table`.
        features: the model's kernels.
        table: its own measurements there.
        sizes: local batch sizes.

    Raises:
        InvalidInputError: the table has no row of one rank.
    """
    seen = KnownModel.of(features, table)
    if seen is None:
        raise InvalidInputError(
            "a transfer needs rows of one rank and one pass a step in the other hardware's table"
        )
    mean, _ = here.log_step_time(features, sizes)
    foreseen, _ = there.log_step_time(features, seen.sizes)
    own = np.interp(np.log(sizes), np.log(seen.sizes), seen.log_times - foreseen)
    spread = np.full((len(sizes), len(sizes)), how.deviation**2)
    return mean + how.rho * own, spread + np.eye(len(sizes)) * SIZE_SD**2


def _by_model(
    rows: Sequence[tuple[ModelFeatures, ProfileTable]],
) -> dict[tuple[str, int | None], KnownModel]:
    found = {}
    for features, table in rows:
        known = KnownModel.of(features, table)
        if known is not None:
            found[(table.workload.model, table.workload.image_size)] = known
    return found


def _without(rows: Sequence[tuple[ModelFeatures, ProfileTable]], name: str) -> CrossModelPredictor:
    return CrossModelPredictor.fit(
        [(features, table) for features, table in rows if table.workload.model != name],
        left_out=False,
    )


def _rest(known: CrossModelPredictor, model: KnownModel, sizes: Array) -> Array:
    """What a model takes more than the others foresee, as logarithms at these sizes."""
    foreseen = formulas.log_step_time(
        np.asarray(known.params["log_theta"], float),
        formulas.work(model.features.to_dict()["operations"], sizes),
    )[0]
    at = np.searchsorted(model.sizes, sizes)
    return np.asarray(model.log_times[at] - foreseen)
